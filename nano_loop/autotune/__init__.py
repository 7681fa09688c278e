"""Chooses among an operator's algorithms by measurement, like ``torch.backends.cudnn.benchmark`` on a GPU."""
