"""The size of the scripts' batches."""

WHOLE_BATCH = BATCH = 16  # of a plain run; the test sets that of a process
