"""What a verification inside a run's own process must leave as it was."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dsaccum.engine.leftovers import forget_earlier_engines


@contextmanager
def undisturbed() -> Iterator[None]:
    """Afterwards random generators, and what an engine changes for its process, are as they were."""
    with torch.random.fork_rng():
        python, arrays = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
            forget_earlier_engines()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
