"""A training run: the loop, its control exchange, metrics, run directory, and how it ends."""
