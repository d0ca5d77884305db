"""From evidence to claims and named causes."""
