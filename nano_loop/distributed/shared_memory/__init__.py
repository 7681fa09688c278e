"""How values and gradients travel on one host: through shared memory."""
