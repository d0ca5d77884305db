"""A script as people write it: it patches DeepSpeed in its own process, then trains. Not a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from dsaccum.preflight import preflight
from dsaccum.training.main import main

original = DeepSpeedEngine.backward


def divided_again(self: Any, loss: Any, *arguments: Any, **keywords: Any) -> Any:
    return original(self, loss / self.gradient_accumulation_steps(), *arguments, **keywords)


DeepSpeedEngine.backward = divided_again

if __name__ == "__main__":
    experiments = Path(__file__).parents[2] / "launch" / "experiments"
    sys.exit(main(sys.argv[1:], experiments / "stdlib-nano.yaml", preflight))
