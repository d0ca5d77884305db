"""What people read: the terminal's output, made from the records alone."""
