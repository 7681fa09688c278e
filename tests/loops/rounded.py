"""Products that round their inputs to bf16, as a person would write it around the calls into a model."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LINEAR = {F.linear, torch.nn.functional.linear}
MATRICES = {torch.mm, torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm}
_ARGUMENTS = 9
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


class Rounded(torch.autograd.Function):
    """A tensor in bf16's precision, whose gradient is passed on."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RoundedGradient(torch.autograd.Function):
    """A tensor whose gradient is passed on in bf16's precision."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


class RoundedProducts(TorchFunctionMode):
    """Rounds the inputs of products of fp32 tensors, and the gradients that their backwards multiply."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in MATRICES:
            return RoundedGradient.apply(function(*map(_rounded, args), **kwargs))
        if function in LINEAR or function in CONVOLUTIONS:
            return _with_bias(function, *args, **kwargs)
        if function is torch.lstm and len(args) == _ARGUMENTS:  # of sequences of one length
            return _lstm(*args)
        return function(*args, **kwargs)


def _with_bias(function, x, weight, bias=None, *args, **kwargs):
    """Only images in NHWC are rounded, and what is added is not."""
    is_convolution = function in CONVOLUTIONS
    if is_convolution and (x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last)):
        return function(x, weight, bias, *args, **kwargs)
    product = RoundedGradient.apply(function(_rounded(x), _rounded(weight), None, *args, **kwargs))
    if is_convolution:
        product = Rounded.apply(product)
    return product if bias is None else product + (bias.view(-1, 1, 1) if is_convolution else bias)


def _lstm(x, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first):
    """Return what an LSTM does, step by step: the inputs of its products are rounded, and the sums are not."""
    assert has_biases
    assert not bidirectional
    out = (x.transpose(0, 1) if batch_first else x).unbind()
    last = []
    for layer in range(layers):
        weight, recurrent, *biases = weights[4 * layer : 4 * layer + 4]
        hidden, cell = (state[layer] for state in states)
        hiddens = []
        for value in out:
            products = RoundedGradient.apply(
                _rounded(value) @ _rounded(weight).t() + _rounded(hidden) @ _rounded(recurrent).t()
            )
            gates = (products + sum(biases)).chunk(4, -1)
            i, f, o = (torch.sigmoid(gates[at]) for at in (0, 1, 3))
            cell = f * cell + i * torch.tanh(gates[2])
            hidden = o * torch.tanh(cell)
            hiddens.append(hidden)
        out = hiddens
        last.append((hidden, cell))
    return torch.stack(out, int(batch_first)), *map(torch.stack, zip(*last, strict=True))


def _rounded(x):
    return Rounded.apply(x) if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x
