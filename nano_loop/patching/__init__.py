"""Interception of torch's calls during a run. Each change is undone when the last run that uses it ends."""
