"""The profile of a training step: where its time goes, by torch.profiler."""

#: Steps before the first that is timed, and steps that are timed without the profiler.
WARMUP, TIMED = 4, 5
#: Then steps are profiled. What the profiler takes breaks the memory of tensors into pieces, so the first steps take
#: longer, and are not counted.
UNCOUNTED, PROFILED = 3, 5
#: All steps, with the one between the two profiles.
STEPS = WARMUP + TIMED + UNCOUNTED + 1 + PROFILED
