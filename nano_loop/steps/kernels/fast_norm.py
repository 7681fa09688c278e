"""Computes norms, and their gradients, in two passes over their tensors."""

from __future__ import annotations

from torch import nn

from nano_loop.kernels.norm import norms, rms_norm
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason


class FastNorm(KernelStep):
    """Replaces the CPU kernels of norms for set-up models, in reduced precision and where products round.

    Gains most where images are in NHWC: torch's backward of a group norm takes ten times as long there, and its batch
    norms reach a third of the memory's rate. Norms that are small or in another layout are torch's.
    """

    name = "fast_norm"
    takes_fp32 = True
    replacements = (*norms.REPLACEMENTS, *rms_norm.REPLACEMENTS)
    kernel = norms.KERNEL
    says = "two passes over the tensors, forward and backward"
    absent = SkipReason("no_norm", "the model calls none of torch's norms")
    modules = (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
        *(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    )
    functions = frozenset(("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm"))
    finds_all = True
