"""Train a GPT with DeepSpeed: deepspeed [--num_gpus W] launch/train.py --deepspeed ds_configs/accum4.json."""

import sys
from pathlib import Path

from dsaccum.preflight import preflight
from dsaccum.sizing import PlannedSizing
from dsaccum.training.main import main

if __name__ == "__main__":
    default_experiment = Path(__file__).parent / "experiments" / "stdlib-nano.yaml"
    sys.exit(main(sys.argv[1:], default_experiment, preflight, PlannedSizing()))
