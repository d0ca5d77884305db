"""Checkpoints: a run's whole state at a window's boundary, so that it can be continued as if it had never stopped."""
