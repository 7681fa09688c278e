"""Settings of libraries in the caller's process, which workers copy to compute the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

_MKLDNN_OPERATIONS = ("matmul", "conv", "rnn")


def current_settings() -> list[Callable[[], object]]:
    """Return functions that apply this process's settings in another one."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    checks_nan = torch.is_anomaly_check_nan_enabled()
    # torch has no function that returns it. The program may have set another default dtype or device.
    is_flushing = not torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul(1.0).item()
    return [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled(), checks_nan),
        partial(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu")),
        partial(torch.set_flush_denormal, is_flushing),
        partial(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled()),  # type: ignore[no-untyped-call]
        partial(torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled()),  # type: ignore[no-untyped-call]
        partial(_set_mkldnn, bool(torch.backends.mkldnn.enabled), _matmul_precision(), _mkldnn_precisions()),
        partial(np.seterr, **np.geterr()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
    ]


def _matmul_precision() -> str | None:
    """Return the precision of `torch.set_float32_matmul_precision`, or None if it has not been called."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used ``torch.backends.mkldnn.matmul.fp32_precision`` instead
        return None
    return None if precision == "highest" else precision


def _mkldnn_precisions() -> dict[str, str]:
    """Return the precisions of mkldnn's operations that are set; torch 2.8 has none."""
    operations = {name: getattr(torch.backends.mkldnn, name, None) for name in _MKLDNN_OPERATIONS}
    precisions = {name: getattr(operation, "fp32_precision", "none") for name, operation in operations.items()}
    return {name: precision for name, precision in precisions.items() if precision != "none"}


def _set_mkldnn(enabled: bool, matmul_precision: str | None, precisions: dict[str, str]) -> None:
    if matmul_precision is not None:
        torch.set_float32_matmul_precision(matmul_precision)
    for name, precision in precisions.items():
        getattr(torch.backends.mkldnn, name).fp32_precision = precision
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
