"""The profile of a training step: where its time goes, by torch.profiler."""

#: Steps before the first that is timed, and that are timed without the profiler.
WARMUP, TIMED = 4, 5
#: Then every second step is profiled. The memory that the profiler takes breaks that of tensors into pieces, so the
#: first profiled steps take longer, and are not counted; so do the steps between them, in which the memory recovers.
UNCOUNTED, PROFILED = 3, 5
#: All steps; the last one, which is profiled too, is recorded with the shapes of inputs.
STEPS = WARMUP + TIMED + 2 * (UNCOUNTED + PROFILED) + 1
