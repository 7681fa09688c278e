"""The search of `nano-loop tune`: a script runs once a candidate, as a child that takes some steps and reports them."""

#: Steps that count for a time, at least, and those before them: page faults, kernels that are made, compilation.
LEAST, WARMUP = 8, 4
