"""Computes gradients of bf16 convolutions by a C function, or by products and sums, where torch's kernel is slower."""

from __future__ import annotations

from torch import nn

from nano_loop.kernels.convolution import convolution, weight_gradient
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason


class FastConvolution(KernelStep):
    """Replaces the backward of the set-up models' convolutions, and calls torch's kernel where that one is faster."""

    name = "fast_convolution"
    replacements = convolution.REPLACEMENTS
    kernel = weight_gradient.KERNEL
    says = "weights' gradients in blocks, by bf16 instructions"
    says_without_kernel = "weights' gradients by plain bf16 products where oneDNN is slow, since "
    absent = SkipReason("no_convolution", "the model calls none of torch's convolutions")
    modules = (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
    functions = frozenset(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
    )
    finds_all = True
