"""Lightning Fabric: its import without side effects, and the strategy that `TorchNano` gives it."""
