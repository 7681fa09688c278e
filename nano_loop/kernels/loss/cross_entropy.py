"""Cross-entropy over many classes, such as the words of a language model, from logits in bf16 or fp32.

torch casts the logits to fp32, stores their logarithmic softmax, fills a tensor with zeros for its gradient, computes
the gradient of the logits from both, and casts that back: tensors of 200 MB for 1,024 words of a vocabulary of 50,257,
five of them. Here, a C function (``cross_entropy.c``) reads the logits once for the loss, and once for the gradient,
which it writes in the dtype of the logits. Only the logits are kept in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels import override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.double_backward import gradients_of
from nano_loop.kernels.memory import BF16, FP32, INT64, computes_now, empty, is_plain
from nano_loop.kernels.override import COMPILED, Algorithm, Call, Override
from nano_loop.patching.operators.operators import Kernel
from nano_loop.patching.operators.upcasts import Upcast, upcast_of
from nano_loop.patching.ownership import Rules, rules_now, rules_of_node
from nano_loop.patching.torch_private import below_autocast
from nano_loop.patching.torch_private_autograd import node_number

_KINDS = {torch.float32: "float", torch.bfloat16: "bf16"}
_POINTERS = {"float": FP32, "bf16": BF16}
KERNEL = CompiledKernel(
    "cross_entropy",
    {
        **{f"cross_entropy_{kind}": (logits, INT64, FP32, FP32, FP32) for kind, logits in _POINTERS.items()},
        **{
            f"gradient_{kind}_to_{to}": (_POINTERS[kind], INT64, FP32, FP32, FP32, _POINTERS[to])
            for kind, to in (("float", "float"), ("bf16", "float"), ("bf16", "bf16"))
        },
    },
)

#: Minimum number of logits. Below it, the Python overhead exceeds the gain.
MIN_LOGITS = 1 << 16
#: How many autograd nodes outside of the model, such as views, may lie between its output and the loss.
_FAR = 4
_MEAN, _SUM = 1, 2  # torch's numbers of the reductions; 0 is none


_OPERATOR = torch.ops.aten.cross_entropy_loss.default


def _under_autocast(kernel: Kernel, logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Call | None:
    if logits.numel() < MIN_LOGITS or logits.dtype not in _KINDS:
        return None
    return Call("cross_entropy", (logits, target), args, kernel, details=kwargs)


def _outside_autocast(kernel: Kernel, logits: Tensor, target: Tensor, *args: Any) -> Call | None:
    if logits.numel() < MIN_LOGITS or logits.dtype is not torch.float32 or not supports(logits, target):
        return None
    return Call("cross_entropy", (logits, target), args, kernel, details={}, leaves=1, timed=_timed)


def _timed(call: Call) -> Call | None:
    """Return the loss of some rows of a vocabulary's logits."""
    rows = max(override.MOST_ELEMENTS // max(call.tensors[0][:1].numel(), 1), 1)
    call = call._replace(tensors=tuple(tensor[:rows] for tensor in call.tensors))
    return call if call.is_measurable else None


def _computed(call: Call) -> Tensor | None:
    return cross_entropy(*call.tensors, *call.numbers, **call.details)


def _below_autocast(call: Call) -> Tensor | None:
    with below_autocast():
        return _computed(call)


def _rules_of(call: Call) -> Rules | None:
    """Return the rules of the set-up model that has computed logits, in a call of this thread, or is computing them."""
    rules = rules_now()
    node: Any = call.tensors[0].grad_fn
    for _ in range(_FAR):
        if rules is not None or node is None:
            break
        rules = rules_of_node(node_number(node))
        node = node.next_functions[0][0] if node.next_functions else None
    return rules


def _by_autocast(logits: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    with below_autocast():
        weight = None if weight is None else weight.float()
        return torch.ops.aten.cross_entropy_loss(logits.float(), target, weight, *args, **kwargs)  # type: ignore[no-any-return]


OVERRIDES = (
    # Under autocast, which casts to fp32.
    Override(
        "cross_entropy_loss",
        (Algorithm(COMPILED, _below_autocast, tuple(_KINDS), is_raced=False),),
        _under_autocast,
        dispatch_key="AutocastCPU",
        otherwise=_by_autocast,
    ),
    Override(
        "cross_entropy_loss",
        (Algorithm(COMPILED, _computed, override.FP32, kernel=KERNEL.name),),
        _outside_autocast,
        dispatch_key="AutogradCPU",
        rules=_rules_of,
        otherwise=_OPERATOR.decompose,
    ),
)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute `torch.nn.functional.cross_entropy` of classes, or return None where torch has to.

    Parameters
    ----------
    logits : torch.Tensor
        Of shape (N, C) or (N, C, ...), float32 or bfloat16. The classes of each target lie side by side in memory, as
        in ``model(x).transpose(1, 2)``.
    target : torch.Tensor
        Of shape (N,) or (N, ...), int64.
    weight : torch.Tensor or None
        Any weight is torch's to compute.
    reduction : int
        torch's number: 0 for none, 1 for the mean, 2 for the sum.
    ignore_index, label_smoothing
        As in torch.

    Returns
    -------
    torch.Tensor or None
        float32, of the target's shape or (). It can be differentiated twice.
    """
    if weight is not None or not 0 <= label_smoothing <= 1:
        return None
    if not supports(logits, target):
        return None
    rows = logits if logits.dim() == 2 else logits.movedim(1, -1).flatten(0, -2)
    upcast = upcast_of(rows, logits) if logits.dtype is torch.float32 else None
    source = None if upcast is None else upcast.source()
    # In a tuple, they are no inputs of the function.
    narrow = None if source is None else (source.detach().view(rows.shape), upcast, _Place.apply(rows))  # type: ignore[no-untyped-call]
    losses: Tensor | None = _Losses.apply(  # type: ignore[no-untyped-call]
        rows, target.reshape(-1).contiguous(), ignore_index, label_smoothing, narrow
    )
    if losses is None:
        return None
    if reduction not in (_MEAN, _SUM):
        return losses.view(target.shape)
    return losses.sum() if reduction == _SUM else losses.sum() / target.ne(ignore_index).sum()


def supports(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel computes a call, which nobody traces. torch handles all other calls, and all errors."""
    return (
        is_plain(logits, tuple(_KINDS))
        and is_plain(target, (torch.int64,))
        and computes_now()
        and logits.dim() >= 2
        and (*logits.shape[:1], *logits.shape[2:]) == target.shape
        and logits.numel() > 0
        and (logits if logits.dim() == 2 else logits.movedim(1, -1)).is_contiguous()
    )


class _Losses(torch.autograd.Function):
    """The loss of each row, in fp32; nothing for a target that is not a class."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignored: int,
        smoothing: float,
        narrow: tuple[Tensor, Upcast, Tensor] | None,
    ) -> Tensor | None:
        values, ctx.upcast, ctx.place = narrow or (logits, None, None)
        computed = forward(values, target, ignored, smoothing)
        if computed is None:
            return None
        losses, maxima, sums = computed
        ctx.save_for_backward(values, target, maxima, sums)
        ctx.dtype, ctx.numbers = logits.dtype, (ignored, smoothing)
        return losses

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        (values, target, maxima, sums), (ignored, smoothing) = ctx.saved_tensors, ctx.numbers

        def compute() -> tuple[Tensor]:
            unseen = ctx.upcast is not None and ctx.upcast.gradient_is_unobserved
            dtype = values.dtype if unseen else ctx.dtype
            gradient = backward(factors, maxima, sums, values, target, ignored, smoothing, dtype)
            return (ctx.upcast.hand_over(gradient) if unseen else gradient,)

        def by_torch(logits: Tensor) -> Tensor:
            logits = logits.float() if ctx.place is None else logits + values
            losses: Tensor = _OPERATOR.decompose(logits, target, None, 0, ignored, smoothing)
            return losses

        inputs = values if ctx.place is None else ctx.place
        return gradients_of(ctx, (inputs,), (factors,), compute, by_torch)


class _Place(torch.autograd.Function):
    """Zeros at a tensor's place in the graph, of no size in memory; what they are added to has the tensor's path."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def forward(logits: Tensor, target: Tensor, ignored: int, smoothing: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the loss of each row of (N, C), its maximum, and the sum of exponentials of its differences from that.

    None for a target that is not a class.
    """
    maxima, sums, losses = (empty(len(logits)) for _ in range(3))
    call = (logits, target, *logits.shape, ignored, float(smoothing))
    computed = KERNEL(f"cross_entropy_{_KINDS[logits.dtype]}", *call, maxima, sums, losses)
    return (losses, maxima, sums) if computed else None


def backward(
    factors: Tensor,
    maxima: Tensor,
    sums: Tensor,
    logits: Tensor,
    target: Tensor,
    ignored: int,
    smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits, in a dtype, from that of each row's loss and the results of `forward`."""
    logits, target, maxima, sums = (tensor.contiguous() for tensor in (logits, target, maxima, sums))
    gradient = torch.empty_like(logits, dtype=dtype)
    call = (logits, target, *logits.shape, ignored, float(smoothing))
    name = f"gradient_{_KINDS[logits.dtype]}_to_{_KINDS[dtype]}"
    KERNEL(name, *call, maxima, sums, factors.contiguous(), gradient)
    return gradient
