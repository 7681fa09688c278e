"""How gradients travel: through shared memory on one host, through a process group between hosts."""
