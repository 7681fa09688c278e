"""What a worker process writes: it goes to a private folder, from which the worker reads it back."""
