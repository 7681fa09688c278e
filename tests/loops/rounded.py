"""Products that round their inputs to bf16 or fp16, as a user would write it around the calls into a model."""

import math
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nano_loop.kernels.attention import blocked_attention

LINEAR = {F.linear, torch.nn.functional.linear}
MATRICES = {torch.mm, torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm}
_ARGUMENTS = 9
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


def rounded(x, dtype):
    """Return a tensor rounded to a dtype; fp16 values are scaled by the largest one."""
    if dtype is torch.bfloat16:
        return x.bfloat16().to(x.dtype)
    finite = x[x.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    scale = 2.0 ** math.floor(math.log2(largest)) if largest else 1.0
    return (x / scale).half().to(x.dtype) * scale


class Rounded(torch.autograd.Function):
    """Rounds a tensor to a dtype, and passes its gradient through."""

    @staticmethod
    def forward(ctx, x, dtype):
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RoundedGradient(torch.autograd.Function):
    """Passes a tensor through, and rounds its gradient to a dtype."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.dtype), None


class RoundedProducts(TorchFunctionMode):
    """Rounds the inputs of products of fp32 tensors, and the gradients that their backwards multiply."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in MATRICES:
            return self._gradient(function(*map(self._rounded, args), **kwargs))
        if function in LINEAR or function in CONVOLUTIONS:
            return self._with_bias(function, *args, **kwargs)
        if function is torch.lstm and len(args) == _ARGUMENTS and self.dtype is torch.bfloat16:  # equal lengths
            return self._lstm(*args)
        if self.dtype is torch.bfloat16 and blocked_attention.KERNEL.unavailable is None:
            if function is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            if function is F.multi_head_attention_forward:  # it calls attention itself if no mode is asked
                with self, patch.object(F, "has_torch_function", lambda _: False):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        """Return attention by products of rounded inputs, as the kernel in C computes it."""
        scores = self._gradient(self._rounded(query) @ self._rounded(key).mT) / math.sqrt(query.size(-1))
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
        weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)  # as torch's attention
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        result = self._gradient(self._rounded(weights) @ self._rounded(value))
        return result.transpose(-3, -2).contiguous().transpose(-3, -2)  # torch's layout

    def _with_bias(self, function, x, weight, bias=None, *args, **kwargs):
        """Round only NHWC images and sequences to bf16, including the sums. The bias is not rounded."""
        is_convolution, in_bf16 = function in CONVOLUTIONS, self.dtype is torch.bfloat16
        is_nhwc = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if is_convolution and in_bf16 and not (is_nhwc or weight.dim() == 3):
            return function(x, weight, bias, *args, **kwargs)
        product = self._gradient(function(self._rounded(x), self._rounded(weight), None, *args, **kwargs))
        if is_convolution and in_bf16:
            product = self._rounded(product)
        if bias is None:
            return product
        return product + (bias.view(-1, *[1] * (weight.dim() - 2)) if is_convolution else bias)

    def _lstm(self, x, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first):
        """Compute an LSTM step by step: the inputs of its products are rounded, the sums are not."""
        assert has_biases
        assert not bidirectional
        out = (x.transpose(0, 1) if batch_first else x).unbind()
        last = []
        for layer in range(layers):
            weight, recurrent, *biases = weights[4 * layer : 4 * layer + 4]
            hidden, cell = (state[layer] for state in states)
            hiddens = []
            for value in out:
                of_inputs = self._rounded(value) @ self._rounded(weight).t()
                products = self._gradient(of_inputs + self._rounded(hidden) @ self._rounded(recurrent).t())
                gates = (products + sum(biases)).chunk(4, -1)
                i, f, o = (torch.sigmoid(gates[at]) for at in (0, 1, 3))
                cell = f * cell + i * torch.tanh(gates[2])
                hidden = o * torch.tanh(cell)
                hiddens.append(hidden)
            out = hiddens
            last.append((hidden, cell))
        result = torch.stack(out)
        return result.transpose(0, 1) if batch_first else result, *map(torch.stack, zip(*last, strict=True))

    def _rounded(self, x):
        return Rounded.apply(x, self.dtype) if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x

    def _gradient(self, product):
        return RoundedGradient.apply(product, self.dtype)
