"""Says where the time of a training step goes, by torch.profiler."""
