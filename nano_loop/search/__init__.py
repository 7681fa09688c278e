"""The search for the fastest options: a training loop takes steps under each, in processes that are thrown away.

`nano_loop.autotune` chooses between ways to compute one operator, inside of a run. This chooses between whole runs.
"""
