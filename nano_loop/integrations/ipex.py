"""Intel Extension for PyTorch (IPEX): its kernels, with checks that IPEX lacks.

This is the only module that imports IPEX. IPEX was archived in March 2026; 2.8.0 is its last version.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, metadata

import torch
from torch import Tensor
from typing_extensions import override

from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.integrations.quiet_import import leaving_no_trace
from nano_loop.kernels.bernoulli import by_torch
from nano_loop.patching.operators import overridden, plainly, registered
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import SkipReason, Step

_MODULE = "intel_extension_for_pytorch"
_DISTRIBUTION = "intel-extension-for-pytorch"
# Attributes of torch that importing IPEX replaces, for its own use or as workarounds for older versions of torch.
_REPLACED = (
    (torch.Tensor, "numpy"),
    (torch.Tensor, "__format__"),
    (torch, "embedding_bag"),
    (torch.cpu.amp, "GradScaler"),
    (torch.jit, "trace"),
    (torch.fx.Tracer, "is_leaf_module"),
)


class Ipex(Step):
    """Imports IPEX, whose kernels then replace torch's in the whole process, until it ends.

    We do not call `ipex.optimize`. It packs weights into bf16 blocks, so ``parameters()`` inside the loop would differ
    from what the optimizer and the user hold; docs/choices.md has the times.
    """

    name = "ipex"
    needs = None
    once = True  # the kernels are registered for the whole process
    required = False  # skip_reason raises its own errors, which name the option and what to do

    @property
    @override
    def enabled(self) -> bool:
        return self.options.use_ipex

    @override
    def final_result(self) -> StepResult | None:
        """Report that IPEX's kernels also run without the option if another run of this process has imported IPEX."""
        if self.enabled or _MODULE not in sys.modules:
            return None
        detail = "not requested, but already imported in this process: its kernels run until the process ends"
        return StepResult(self.name, "applied", detail)

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        """Return None: a request for IPEX is either honoured or an error."""
        self._check_instructions()
        self._check_version()
        if any(isinstance(model, torch.jit.ScriptModule) for model in parts.models):
            expected = "IPEX's passes over TorchScript make the backward of scripted models fail under autocast"
            raise NanoConfigError(error_message(self._request, expected, "Omit it, or pass the model unscripted"))
        return None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self._import_quietly()
        _repair()
        return f"kernels of IPEX {_version(_DISTRIBUTION)}, until the process ends; weights stay plain fp32, not packed"

    @property
    def _request(self) -> str:
        """The argument or the environment variable that requested IPEX."""
        return self.options.as_written["use_ipex"]

    def _check_version(self) -> None:
        """Raise if IPEX is missing or for another torch: importing it would print a message and end the process."""
        version, here = _version(_DISTRIBUTION), _version("torch")
        if _minor(version) == _minor(here):
            return
        replaced = "" if _minor(here) == "2.8" else f", which replaces torch {here} by 2.8.0"
        advice = f"Omit it, or run pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0{replaced}"
        if not version:
            expected = f"IPEX is not installed, and works with torch 2.8 only (this is torch {here})"
            raise ImportError(error_message(self._request, expected, advice))
        expected = f"IPEX {_minor(version)} works with torch {_minor(version)} only, and this is torch {here}"
        raise NanoConfigError(error_message(self._request, expected, advice))

    def _check_instructions(self) -> None:
        if self.machine.architecture in ("x86_64", "AMD64") and "avx2" in self.machine.instruction_sets:
            return
        expected = f"IPEX needs an x86-64 CPU with AVX2, and this is {self.machine.name} ({self.machine.architecture})"
        raise NanoConfigError(error_message(self._request, expected, "Omit it"))

    def _import_quietly(self) -> None:
        if _MODULE in sys.modules:
            return
        try:
            with leaving_no_trace(_MODULE, *_REPLACED), _silent():
                import_module(_MODULE)
        except (Exception, SystemExit) as error:  # the import loads libraries, and may end the process
            got = f"{self._request}: importing IPEX raised {type(error).__name__}"
            raise NanoError(error_message(got, str(error), "Omit it, or reinstall IPEX")) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress the log messages of the import, and torch's warning about kernels that it overrides."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    os.environ["TORCH_WARM_POOL"] = "0"  # otherwise torch's compiler, if imported too, starts worker processes
    try:
        # torch warns only once per process, from C++, about an overridden kernel. This override uses up the warning.
        with overridden("bernoulli_.float", plainly(by_torch), "CPU"):
            yield
    finally:
        logging.disable(before)


def _version(distribution: str) -> str:
    """Return the installed version, or an empty string."""
    try:
        return metadata.version(distribution)
    except (metadata.PackageNotFoundError, TypeError):  # TypeError: sys.path holds bytes
        return str(torch.__version__) if distribution == "torch" else ""  # torch may have been built in place


def _minor(version: str) -> str:
    """Return the major and minor version. IPEX compares only these."""
    return ".".join(re.findall(r"\d+", version)[:2])


@functools.cache  # keeps the replacements alive: IPEX's kernels stay until the process ends
def _repair() -> ExitStack:
    """Replace four of IPEX's kernels in the whole process, until it ends. Call it after the import of IPEX.

    - The kernels of ``layer_norm`` and ``group_norm`` do not register a derivative with torch. In eager mode they
      differentiate themselves. When torch decomposes operators, gradients are silently None (under AOTAutograd) or 0
      (under `torch.func` and in forward mode).
    - Under autocast, ``group_norm`` of IPEX returns bf16 for an fp32 input, but torch's returns fp32.
    - ``mean`` of IPEX returns the sum for ``dim=None``.
    """
    own = {
        name: plainly(getattr(torch.ops.aten, name).default.decompose)(None) for name in ("layer_norm", "group_norm")
    }
    with ExitStack() as repairs:
        repairs.enter_context(registered(own, "AutogradCPU"))
        repairs.enter_context(registered({"group_norm": torch.library.fallthrough_kernel}, "AutocastCPU"))
        repairs.enter_context(registered({"mean.dim": plainly(_mean)(None)}, "CPU"))
        return repairs.pop_all()


def _mean(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the mean with torch's kernel for ``out=``, which IPEX does not replace."""
    out = x.new_empty(0, dtype=dtype or x.dtype)
    return torch.mean(x, dim, keepdim, dtype=dtype, out=out)
