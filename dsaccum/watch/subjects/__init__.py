"""Kinds of runs that can be watched: where the boundary is, and what the optimizer gets."""
