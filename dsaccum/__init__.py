"""Train GPT models with DeepSpeed at any effective batch, and prove that accumulation changed nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsaccum.verification.api import verify as verify

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``dsaccum.verify``, loaded when it is first asked for, so that ``import dsaccum`` stays light."""
    if name == "verify":
        from dsaccum.verification.api import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "verify"]
