"""Private files of ranks other than 0: folders are real, and what a rank writes is its own until the run ends."""
