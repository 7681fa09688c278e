"""How the processes of a run are started or joined, and how all of them end together."""
