"""What travels to a worker: the call with its arguments, big memory shared rather than copied."""
