"""What `torch.compile` makes of a model: which parts are compiled, and which operators stay whole in the graphs."""
