"""Ways to meet what torch does, for the time of a run; each is undone when the last run that uses it ends."""
