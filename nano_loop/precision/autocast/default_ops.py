"""The operators that torch's autocast casts on the CPU, and the active lists."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.torch_private import arguments_of, as_without_autocast_kernel, below_autocast, has_kernel
from nano_loop.patching.walk import find

# As torch 2.8 to 2.15 registers them in aten/src/ATen/autocast_mode.cpp; tests/precision/test_default_ops.py compares.
_BF16 = """
    _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
    conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention
"""
_PROMOTED = "cat index_copy index_copy.dimname stack"
_FP32 = """
    _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
    binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
    cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine
    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
    fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
    grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor
    linalg_matrix_sqrth linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
    lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d
    orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_Dimname prod.dim_int qr quantile quantile.scalar
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss
    soft_margin_loss stft stft.center svd trace triangular_solve triplet_margin_loss view_as_complex
"""
_KEY = "AutocastCPU"

#: The dtype to which torch's autocast casts the inputs of an operator, by overload name. "low" is autocast's dtype.
TORCHS: dict[str, str] = {
    name: kind
    for names, kind in ((_BF16, "low"), (_FP32, "fp32"), (_PROMOTED, "widest"))
    for name in names.split()
    if has_kernel(name, _KEY)
}


class DefaultOps(NamedTuple):
    """The operators that autocast runs in each dtype, such as ``softmax.int``. All others follow their inputs."""

    bf16: tuple[str, ...]
    fp32: tuple[str, ...]


def default_ops() -> DefaultOps:
    """Return the operators that autocast runs in bf16 and in fp32 on the CPU.

    Inside a run with `bf16_ops` or `fp32_ops`, these are included.

    Returns
    -------
    DefaultOps
        `bf16` and `fp32`, the names of ATen operators with their overloads. Operators in neither list follow their
        input; with inputs of several dtypes, the widest; in place, the tensor that is written to.

    Examples
    --------
    >>> import nano_loop
    >>> "linear" in nano_loop.default_ops().bf16, "mse_loss" in nano_loop.default_ops().fp32
    (True, True)
    """
    kinds = {**TORCHS, **_in_force.kinds}
    return DefaultOps(
        *(tuple(sorted(name for name, kind in kinds.items() if kind == listed)) for listed in ("low", "fp32"))
    )


class _InForce(threading.local):
    """The operator lists of this thread's innermost run."""

    kinds: Mapping[str, str] = {}


_in_force = _InForce()


@contextmanager
def in_force(kinds: Mapping[str, str]) -> Iterator[None]:
    """Make `default_ops` include a run's lists."""
    before, _in_force.kinds = _in_force.kinds, kinds
    try:
        yield
    finally:
        _in_force.kinds = before


def as_torch_does(name: str, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator as torch does under autocast, but without caching the casts of weights."""
    overload, kind = overload_of(name), TORCHS.get(name)
    if kind is None:
        if _has_number(overload, args):
            return below(overload, args, kwargs)
        return as_without_autocast_kernel(overload, keys, *args, **kwargs)
    dtypes = {tensor.dtype for tensor in find(Tensor, (args, kwargs)) if tensor.dtype.is_floating_point}
    if kind == "low":
        dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = map_tensors(lambda tensor: cast_like_autocast(tensor, dtype), (args, kwargs))
    elif kind == "fp32" or len(dtypes) > 1:
        args, kwargs = map_tensors(lambda tensor: cast_like_autocast(tensor, torch.float32), (args, kwargs))
    return below(overload, args, kwargs)


def below(overload: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator below autocast, with arguments as torch passes them to a kernel in Python.

    ``x + 1`` calls ``add.Tensor`` with a wrapped number, which a kernel in Python gets as a plain number. The overload
    packet accepts that.
    """
    with below_autocast():
        function = overload.overloadpacket if _has_number(overload, args) else overload
        return function(*args, **kwargs)


def _has_number(overload: Any, args: tuple[Any, ...]) -> bool:
    return any(type(args[place]) in _NUMBERS for place in _places_of_tensors(overload) if place < len(args))


@functools.cache
def _places_of_tensors(overload: Any) -> tuple[int, ...]:
    return tuple(place for place, argument in enumerate(arguments_of(overload)) if str(argument.type) == "Tensor")


_NUMBERS = frozenset((int, float, bool, complex))


def overload_of(name: str) -> Any:
    """Return the overload of an ATen operator, such as ``softmax.int``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def written_places(overload: Any) -> list[int | str]:
    """Return the positions of the arguments that an overload writes to, or the names of keyword-only ones."""
    return [
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(arguments_of(overload))
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def cast_like_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does: floating-point CPU tensors except fp64, as part of the autograd graph."""
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64) or not tensor.is_cpu:
        return tensor
    return tensor.to(dtype)
