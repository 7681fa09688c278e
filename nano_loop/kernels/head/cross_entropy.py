"""Cross-entropy over many classes, such as the words of a language model, from logits in bf16 or fp32.

torch casts the logits to fp32, stores their log-softmax, fills a tensor with zeros for its gradient, computes the
gradient of the logits from both, and casts it back: five tensors of 200 MB each for 1,024 words of a vocabulary of
50,257. Here, C functions (``cross_entropy.c``) read the logits once for the loss and once for the gradient, which is
computed immediately, in the dtype of the logits. Only the gradient is kept for the backward pass, so programs may write
to the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override as overrides

from nano_loop.kernels import override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.double_backward import gradients_of
from nano_loop.kernels.head.chunks import Elementwise, RowFunction
from nano_loop.kernels.memory import BF16, FP32, INT64, computes_now, empty, has_tangent, is_plain
from nano_loop.kernels.override import COMPILED, Algorithm, Call, Override
from nano_loop.patching.operators import Kernel
from nano_loop.patching.ownership import Rules, rules_now, rules_of_node
from nano_loop.patching.patch_table import value_in_force
from nano_loop.patching.torch_private import below_autocast, shared_until_written
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
#: Maximum number of autograd nodes outside the model, such as views, between its output and the loss.
_FAR = 4
#: torch's numbers of the reductions; 0 means none.
MEAN, SUM = 1, 2


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
    """Return a call with only some rows, whose time is measured."""
    rows = max(override.MOST_ELEMENTS // max(call.tensors[0][:1].numel(), 1), 1)
    call = call._replace(tensors=tuple(tensor[:rows] for tensor in call.tensors))
    return call if call.is_measurable else None


def _computed(call: Call) -> Tensor | None:
    return cross_entropy(*call.tensors, *call.numbers, **call.details)


def _below_autocast(call: Call) -> Tensor | None:
    with below_autocast():
        return _computed(call)


def _rules_of(call: Call) -> Rules | None:
    """Return the rules of the set-up model that computed the logits in a call of this thread, or is computing them."""
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
    # Autocast casts to fp32.
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
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute `torch.nn.functional.cross_entropy` of classes, or return None for calls that only torch supports.

    `logits` of shape (N, C) or (N, C, ...), fp32 or bf16, must have each target's classes adjacent in memory, as in
    ``model(x).transpose(1, 2)``. `weight` is None, because only torch computes weighted losses. The result is fp32, and
    supports second derivatives.
    """
    if weight is not None or not 0 <= label_smoothing <= 1:
        return None
    if not supports(logits, target):
        return None
    rows = logits if logits.dim() == 2 else logits.movedim(1, -1).flatten(0, -2)
    flat = target.reshape(-1).contiguous()
    function = CrossEntropy(flat, None, None, ignore_index, label_smoothing)
    if not function.has_classes(rows.size(1)):
        return None
    divisor = denominator(flat, None, ignore_index, ("none", "mean", "sum")[reduction])
    place = [_Place.apply(rows)] if torch.is_grad_enabled() else []  # type: ignore[no-untyped-call]
    losses: Tensor = _Losses.apply(rows, function, divisor, place)  # type: ignore[no-untyped-call]
    return losses.view(target.shape) if divisor is None else losses


def supports(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel supports a call, and it is not traced. torch handles all other calls, and all errors."""
    return (
        is_plain(logits, tuple(_KINDS))
        and is_plain(target, (torch.int64,))
        and computes_now()
        and not has_tangent(logits)
        and logits.dim() >= 2
        and (*logits.shape[:1], *logits.shape[2:]) == target.shape
        and logits.numel() > 0
        and (logits if logits.dim() == 2 else logits.movedim(1, -1)).is_contiguous()
    )


def denominator(target: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor | None:
    """Return the divisor of the sum of losses, or None without a reduction."""
    if reduction == "none":
        return None
    target = target.long()  # torch accepts uint8, which would index a weight as a mask
    counts = target.ne(ignored)
    if reduction == "sum":
        return torch.ones((), dtype=torch.float32, device="cpu")
    return counts.sum().float() if weight is None else (weight[target * counts] * counts).sum()


def mean_of_rows(mean: Tensor, count_rows: Callable[[], float], summed: Callable[[], Tensor]) -> Tensor:
    """Return a mean over rows, which a listener may replace by the mean over the rows of all processes."""
    for listener in value_in_force(mean_of_rows) or ():
        mean = listener(mean, count_rows, summed)
    return mean


class CrossEntropy(RowFunction):
    """The loss of each row.

    `target` has the classes, in one dimension. It must not be written to. `before` is a function that is applied to the
    logits first, or None. `weight` has the weights of the classes, if there are any. `ignored` is the target of rows
    without a loss. `smoothing` is the part of the target that is spread over all classes.
    """

    def __init__(
        self,
        target: Tensor,
        before: Elementwise | None,
        weight: Tensor | None = None,
        ignored: int = -100,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(self._by_torch, before)
        self.target, self.weight, self.ignored, self.smoothing = target, weight, ignored, float(smoothing)
        has_loss = target.ne(ignored)
        self.places = None if bool(has_loss.all()) else has_loss.nonzero().squeeze(1)
        self._sums: tuple[Tensor, Tensor] | None = None  # of the rows whose gradient is computed next

    def has_classes(self, count: int) -> bool:
        """Whether all targets are classes or ignored. torch raises for others."""
        target = self.target if self.places is None else self.target[self.places]
        return not target.numel() or (int(target.min()) >= 0 and int(target.max()) < count)

    def _by_torch(self, logits: Tensor, places: slice | Tensor) -> tuple[Tensor]:
        losses: Tensor = _OPERATOR.decompose(
            logits.float(), self.target[places], self.weight, 0, self.ignored, self.smoothing
        )
        return (losses,)

    def _is_compiled(self, logits: Tensor) -> bool:
        is_simple = self.before is None and (self.weight is None or not self.smoothing)
        return is_simple and logits.dtype in _KINDS and KERNEL.unavailable is None

    @overrides
    def outputs(self, logits: Tensor, places: slice | Tensor, has_gradient: bool = False) -> tuple[Tensor, ...]:
        if not self._is_compiled(logits):
            return super().outputs(logits, places)
        target = self.target[places]
        computed = forward(logits, target, self.ignored, self.smoothing)
        assert computed is not None
        losses, maxima, sums = computed
        self._sums = (maxima, sums) if has_gradient else None
        return (losses if self.weight is None else losses * self._weights(target),)

    @overrides
    def gradient(self, logits: Tensor, places: slice | Tensor, factors: Tensor, into: Tensor | None = None) -> Tensor:
        if not self._is_compiled(logits):
            return super().gradient(logits, places, factors)
        if self._sums is None:
            self.outputs(logits, places, has_gradient=True)
        target, sums = self.target[places], self._sums
        assert sums is not None
        self._sums = None
        factors = factors if self.weight is None else factors * self._weights(target)
        into = logits if into is None else into
        return backward(factors, *sums, logits, target, self.ignored, self.smoothing, into)

    def logarithms(self, gradient: Tensor, factor: Tensor) -> Tensor:
        """Return the classes' log-probabilities from the logits' gradient, which is multiplied by a factor."""
        target = self.target.where(self.target.ne(self.ignored), 0).unsqueeze(1)
        results = (gradient.float() / factor).add_(self.smoothing / gradient.size(1))
        return (
            results.scatter_add_(1, target, results.new_full(target.shape, 1 - self.smoothing)).clamp_min_(1e-38).log_()
        )

    def _weights(self, target: Tensor) -> Tensor:
        assert self.weight is not None
        return self.weight[target.where(target.ne(self.ignored), 0)]


class LogLikelihood(CrossEntropy):
    """The loss of each row of a log-softmax. `before` is the function before the log-softmax."""

    @overrides
    def of_tensor(self, rows: Tensor) -> Tensor:
        weight, ignored = self.weight, self.ignored
        return nn.functional.nll_loss(rows.float(), self.target, weight, ignore_index=ignored, reduction="none")


class _Losses(torch.autograd.Function):
    """The loss of each row of existing logits, or their sum divided by a number, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, function: CrossEntropy, divisor: Tensor | None, place: list[Tensor]
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        all_rows = slice(None)
        has_gradient = bool(place) and ctx.needs_input_grad[0]
        (losses,) = function.outputs(logits, all_rows, has_gradient)
        ctx.factor = torch.ones((), dtype=torch.float32, device="cpu") if divisor is None else divisor.reciprocal()
        if has_gradient:
            factors = ctx.factor.expand(len(losses)).contiguous()
            gradient = function.gradient(logits, all_rows, factors, torch.empty_like(logits))
            ctx.save_for_backward(gradient, *place)
        ctx.function = function
        return losses if divisor is None else losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, factors: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, place = ctx.saved_tensors
        if factors is None:
            return None, None, None, None

        def compute() -> tuple[Tensor]:
            if factors.dim() == 0 and factors.item() == 1:
                with suppress(RuntimeError):  # memory made by a hook of saved tensors
                    return (shared_until_written(gradient),)  # so a second backward finds it unchanged
            return (gradient * (factors.unsqueeze(1) if factors.dim() else factors),)

        def by_torch(logits: Tensor) -> Tensor:
            losses: Tensor = ctx.function.compute(logits + ctx.function.logarithms(gradient, ctx.factor), slice(None))[
                0
            ]
            factor: Tensor = ctx.factor
            return losses if factors.dim() else losses.sum() * factor

        return gradients_of(ctx, (place,), (factors,), compute, by_torch)


class _Place(torch.autograd.Function):
    """Zeros at a tensor's place in the graph, without memory. Whatever is added to them keeps the tensor's path."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def forward(logits: Tensor, target: Tensor, ignored: int, smoothing: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return losses, maxima and sums of exponentials of rows of (N, C), or None if a target is not a class."""
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
    into: Tensor,
) -> Tensor:
    """Write the gradient of the logits into `into`, maybe `logits`, given that of losses and `forward`'s results."""
    call = (logits, target, *logits.shape, ignored, smoothing)
    KERNEL(f"gradient_{_KINDS[logits.dtype]}_to_{_KINDS[into.dtype]}", *call, maxima, sums, factors, into)
    return into
