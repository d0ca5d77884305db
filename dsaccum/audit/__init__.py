"""What the installed DeepSpeed gets right and wrong: every way of calling it, in many circumstances, as it behaves."""
