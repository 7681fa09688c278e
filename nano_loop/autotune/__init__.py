"""Chooses by measurement between ways to compute an operator, as ``torch.backends.cudnn.benchmark`` does on a GPU."""
