"""What the tests of the instruments share: the one start of two ranks."""

from tests.instruments.two_ranks import two_ranks

__all__ = ["two_ranks"]
