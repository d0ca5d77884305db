"""What the user decides: the experiment YAML (what to train) and the DeepSpeed JSON (how to step)."""
