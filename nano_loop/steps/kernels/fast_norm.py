"""Computes norms, and their gradients, in two passes over their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.modules import batchnorm, normalization
from typing_extensions import override

from nano_loop.kernels.norm import norms, rms_norm
from nano_loop.kernels.norm.pending_output import NormWithActivation, all_written
from nano_loop.patching.calls.calls import Call
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason


class FastNorm(KernelStep):
    """Replaces the CPU kernels of norms for set-up models, in reduced precision and where products round.

    Gains most where images are in NHWC: torch's backward of a group norm takes ten times as long there, and its batch
    norms reach a third of the memory's rate. Norms that are small or in another layout are torch's. A batch or group
    norm whose output goes to a ReLU, SiLU or hardswish is computed with it, and with what is added before a ReLU.
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

    @override
    def apply(self, parts: TrainingObjects) -> str:
        for model in parts.models:
            self.interceptors.for_model(model).around_modules(_around, self.name)
        return super().apply(parts)

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        return [*super().contexts(), all_written()]


def _around(module: nn.Module) -> Call | None:
    """Return what is around the calls of a norm whose output no code sees before the module returns it."""
    code = getattr(type(module).forward, "__code__", None)
    file = normalization.__file__ if isinstance(module, nn.GroupNorm) else batchnorm.__file__
    is_torchs = code is not None and code.co_filename == file  # and not what somebody has put there
    return NormWithActivation() if is_torchs and not isinstance(module, nn.SyncBatchNorm) else None
