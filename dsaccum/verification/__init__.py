"""Proof that N accumulated micro-batches were one big batch: case, ranks, capture, comparison, diagnosis, verdict."""
