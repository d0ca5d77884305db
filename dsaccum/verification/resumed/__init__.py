"""A verification that goes on from a run's checkpoint: the run's own next windows, in any split of its batch."""
