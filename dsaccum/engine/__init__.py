"""The DeepSpeed side: one window in, one optimizer step out. Nothing below this floor knows DeepSpeed."""
