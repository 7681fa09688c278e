"""Ranks that torchrun, srun or mpirun has started."""
