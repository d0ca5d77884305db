"""A bare DeepSpeed script up to its first optimizer step; started by ``processes.py``.

Run: python tests/benchmarks/bare_start.py CONFIG.json EXPERIMENT.yaml SIGN [SECTION.KEY=VALUE ...]

It reads the same samples by the same code as a run does, and leaves out everything else: checks of the config, the
run's directory and records, watchdog, signals, counts, checkpoints. Like a run it keeps DeepSpeed from compiling an
operation that training does not use, which takes most of a minute at the first start on a machine.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM

from dsaccum.config.loading import load_experiment
from dsaccum.data import load_data
from dsaccum.data.stream import collate
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group

quiet_libraries()
config_path, experiment_path, sign, *overrides = sys.argv[1:]
config = json.loads(Path(config_path).read_text())
experiment = load_experiment(experiment_path, overrides)
ranks = Ranks.from_environment()
limit_threads(ranks)
start_process_group(ranks, timedelta(seconds=600))

data = load_data(experiment.data, Path(experiment_path))
sizes = {"vocab_size": len(data.tokenizer), "max_position_embeddings": experiment.data.sequence_length}
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model(experiment.model.architecture, **sizes, **experiment.model.config)
)
rate = experiment.auto.lr
config["optimizer"]["params"]["lr"] = rate
config["scheduler"]["params"] = {"warmup_max_lr": rate, "warmup_num_steps": 10, "total_num_steps": 200}
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

steps, rows = config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]
for step in range(steps):
    batch = collate(data.samples, range(step * rows, (step + 1) * rows), data.tokenizer.pad_token)
    engine.backward(engine(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
    engine.step()
Path(sign).write_text("done")
