"""Lightning Fabric: its import without side effects, and the strategy of `TorchNano`."""
