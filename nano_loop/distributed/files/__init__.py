"""Private files of ranks other than 0: folders are real, but a rank's writes stay private until the run ends."""
