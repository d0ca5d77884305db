"""One window of the real engine under MemTracker, in a process of its own: ``python -m tests.planning.measured JSON``.

A process each, because an engine is never freed, and ZeRO 3 replaces ``torch.nn.functional.linear`` for good. Prints
one JSON object: the peak, the worst moment of the forward pass by category, and, where asked for, resident memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from datetime import timedelta
from typing import Any

from dsaccum.engine.process import Ranks, quiet_libraries

quiet_libraries()


def measured(subject: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    """Run this module on a subject: model, sequence_length, vocabulary, micro_batch, steps, config, resident."""
    command = [sys.executable, "-m", "tests.planning.measured", json.dumps(subject)]
    # glibc keeps what is freed in blocks below a threshold that grows up to 32 MB; resident memory is then what was
    # once needed by anything. Fixed, every tensor of 64 kB or more goes back when it is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _measure(subject: dict[str, Any]) -> dict[str, Any]:
    import torch

    from dsaccum.batch import EffectiveBatch
    from dsaccum.config.experiment import ModelConfig
    from dsaccum.engine.process import start_process_group
    from dsaccum.engine.window_engine import WindowEngine
    from dsaccum.instruments.memory import measure_memory
    from dsaccum.loss import build_loss
    from dsaccum.model import build_model

    start_process_group(Ranks.from_environment({}), timedelta(seconds=300))
    length, rows, steps = (subject[name] for name in ("sequence_length", "micro_batch", "steps"))
    model = build_model(
        ModelConfig.model_validate(subject["model"]),
        vocabulary_size=subject["vocabulary"],
        sequence_length=length,
        seed=0,
        end_token=1,
        pad_token=0,
        source="measured",
    )
    batch = EffectiveBatch(1, steps, rows)
    counts = {
        "train_batch_size": batch.total,
        "gradient_accumulation_steps": steps,
        "train_micro_batch_size_per_gpu": rows,
    }
    engine = WindowEngine(model, {**subject["config"], **counts}, batch, build_loss(None, source="measured"))

    def window() -> None:
        tokens = [torch.randint(3, subject["vocabulary"], (rows, length)) for _ in range(steps)]
        micro_batches = [{"input_ids": each, "labels": each.clone()} for each in tokens]
        engine.run_window(micro_batches, batch.total * (length - 1))

    window()
    if subject.get("resident"):
        return {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    use = measure_memory(engine.engine, [window])
    # With one micro-step no gradient stands in the forward pass, but between backward and step, which counts here too.
    forward = sum(use.in_forward.values()) if steps > 1 else None
    return {"peak_bytes": use.peak_bytes, "forward_bytes": forward, "by_category": use.by_category}


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]))))
