"""Is my script right? Watch a training script that exists, with no change to it, and verify one of its optimizer steps.

From outside: ``python -m dsaccum.watch -- SCRIPT.py ITS ARGUMENTS``, under any launcher. From inside:
``dsaccum.watch.attach()`` before ``deepspeed.initialize`` (or before the first optimizer step).
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsaccum.watch.session import Session


def attach(window: int | tuple[int, ...] = 3, **keywords: Any) -> Session:
    """Watch what this process makes from now on.

    Args:
        window: which optimizer steps to look at, from 1.
        keywords: of ``dsaccum.watch.session.Session``: ``json``, ``html``, ``stop_after``, ``report``.

    Returns:
        the session: ``record`` and ``verdict`` so far, and ``end()``, which is called at exit, too.

    Raises:
        ConfigError: a window is none, or a file that is to be written is there already, or cannot be.
    """
    from dsaccum.watch.session import Session

    session = Session((window,) if isinstance(window, int) else window, **keywords)
    atexit.register(session.end)
    return session
