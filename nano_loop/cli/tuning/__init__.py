"""The search of `nano-loop tune`: each candidate runs the script in a child process that times some steps."""

#: The minimum number of timed steps, and of the steps before them, which fault in pages and compile kernels.
LEAST, WARMUP = 8, 4
