"""The profile of a training step: how it spends its time, measured by torch.profiler."""

#: Steps before the first timed one, and steps that are timed without the profiler.
WARMUP, TIMED = 4, 5
#: Then steps are profiled. The profiler's allocations fragment memory, so the first are slower and are not counted.
UNCOUNTED, PROFILED = 3, 5
#: All steps, with the one between the two profiles.
STEPS = WARMUP + TIMED + UNCOUNTED + 1 + PROFILED
