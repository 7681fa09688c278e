"""The names of operators that users write in lists and files, and the ATen operators that they denote."""

from __future__ import annotations

import errno
import re
import stat
from pathlib import Path
from typing import Any

#: The operators that CUDA's autocast runs in fp32 but the CPU's does not.
SAFE = (
    *("softmax", "log_softmax", "layer_norm", "group_norm", "norm", "exp", "expm1", "log", "log2", "log10", "log1p"),
    *("pow", "reciprocal", "rsqrt", "softplus", "sum", "mean", "cumsum", "cumprod", "logsumexp", "cosine_similarity"),
)

# Python's operators, which Habana's lists also use, and functions whose operators have other names.
_OTHER_NAMES = {
    "truediv": ("div",),
    "itruediv": ("div_",),
    "floordiv": ("floor_divide",),
    "idiv": ("div_",),
    **{f"i{name}": (f"{name}_",) for name in ("add", "sub", "mul", "pow")},
    **{f"r{name}": (name,) for name in ("add", "mul", "pow", "matmul")},
    **{f"dropout{count}d": ("feature_dropout",) for count in (1, 2, 3)},
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss", "nll_loss_nd", "nll_loss2d"),
    "norm": ("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"),
    "rnn": ("rnn_tanh", "rnn_relu"),
    "interpolate": tuple(
        f"upsample_{kind}"
        for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
}
_ATEN = re.compile(r"^(aten::|torch\.ops\.aten\.)")
_FAMILIES = ("linalg", "fft", "special")
_LONGEST_FILE = 1 << 20  # bytes of a list of names


def operators_of(name: str) -> tuple[str, ...]:
    """Return the ATen operators that a name denotes, such as ``softmax`` or ``mul.Tensor``; empty if unknown.

    Names are ``"softmax"``, ``"F.softmax"``, ``"Tensor.mul"``, ``"torch.linalg.inv"``, ``"aten::addmm"``, ``"__add__"``
    or ``"truediv"``. ``"aten::mul.Tensor"`` denotes one overload, all others denote every overload.
    """
    exact = _ATEN.sub("", name)
    if exact != name:
        packet, _, overload = exact.partition(".")
        overloads = _overloads(packet)
        is_known = (overload or "default") in overloads if overload else bool(overloads)
        return (exact,) if is_known else ()
    *path, last = name.split(".")
    last = last.strip("_") if last.startswith("__") else last
    if path and path[-1] in _FAMILIES:
        last = f"{path[-1]}_{last}"
    return tuple(packet for packet in _OTHER_NAMES.get(last, (last,)) if _overloads(packet))


def overloads_of(operator: str) -> list[tuple[str, Any]]:
    """Return the overloads of an operator, with the names under which kernels are registered for them."""
    import torch  # imported here and below, since reading the presets must not import torch

    packet, _, overload = operator.partition(".")
    names = [overload] if overload else _overloads(packet)
    operator_packet = getattr(torch.ops.aten, packet)
    return [(packet if name == "default" else f"{packet}.{name}", getattr(operator_packet, name)) for name in names]


def read_names(path: Path) -> tuple[str, ...]:
    """Return the names in a file, one a line, ``#`` before comments; raise if it is no regular file or too long."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device, which may block or never end
        raise OSError(errno.EINVAL, "it is not a regular file")
    with path.open("rb") as file:
        content = file.read(_LONGEST_FILE + 1)
    if len(content) > _LONGEST_FILE:
        raise OSError(errno.EFBIG, f"it has more than {_LONGEST_FILE:,} bytes")
    lines = (line.partition("#")[0].strip() for line in content.decode("utf-8").splitlines())
    return tuple(filter(None, lines))


def _overloads(packet: str) -> list[str]:
    if not packet.isidentifier():
        return []
    import torch

    overloads = getattr(getattr(torch.ops.aten, packet, None), "overloads", None)
    return list(overloads()) if callable(overloads) else []
