"""Exchange of values and gradients on one host through shared memory."""
