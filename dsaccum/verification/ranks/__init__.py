"""A pool of ranks: processes that are started once, run tasks together, and leave nothing behind."""
