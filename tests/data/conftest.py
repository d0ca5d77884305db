"""Shared by the data tests: no network, whatever the machine offers."""

from __future__ import annotations

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups on the hub fail at once instead of after their retries (the variable is read at import, so too late)."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
