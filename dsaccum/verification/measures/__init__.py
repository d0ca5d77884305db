"""Claims that have windows of their own, without capture: communication and memory."""
