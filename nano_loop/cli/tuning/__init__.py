"""The search of `nano-loop tune`: a script runs once per candidate, as a child that reports some steps."""

#: Steps that count for a time, at least, and those before them: page faults, kernels that are made, compilation.
LEAST, WARMUP = 8, 4
