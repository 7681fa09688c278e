"""Interception of calls into torch during a run. Each change is undone when the last run that uses it ends."""
