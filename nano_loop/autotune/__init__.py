"""Chooses by measurement between algorithms of an operator, as ``torch.backends.cudnn.benchmark`` does on a GPU."""
