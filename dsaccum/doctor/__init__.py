"""What of this machine can make training or verifying fail: looked at, never changed."""
