"""Programs that were written for a GPU, run on the CPU unchanged."""
