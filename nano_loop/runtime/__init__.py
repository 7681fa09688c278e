"""A run: its life cycle, its task and its settings."""
