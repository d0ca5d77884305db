"""What DeepSpeed's engine itself holds while a window runs, after its source: one module for each of its wrappers."""
