"""What the scripts with Hugging Face Trainer set up alike."""

from __future__ import annotations

from typing import Any


def options(stage: int, **own: Any) -> dict[str, Any]:
    """Of ``TrainingArguments``: windows of 4 micro-batches of 2 rows, with DeepSpeed unless the stage is -1."""
    return {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "deepspeed": _deepspeed(stage) if stage >= 0 else None,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        **own,
    }


def dividing_again(kind: type) -> type:
    """The loss once more by N."""

    class DividesAgain(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            n = self.args.gradient_accumulation_steps
            return (loss[0] / n, *loss[1:]) if isinstance(loss, tuple) else loss / n

    return DividesAgain


def _deepspeed(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100000},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
