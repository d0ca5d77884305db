"""Train GPT models with DeepSpeed at any effective batch, and prove that accumulation changed nothing."""

__version__ = "0.1.0"
