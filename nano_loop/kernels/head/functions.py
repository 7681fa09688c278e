"""torch's functions of lazy logits: which results stay lazy, and which are computed in chunks of rows.

Each takes torch's function and its arguments, and returns NotImplemented if the real tensor must be computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from nano_loop.kernels.head.chunks import Elementwise, RowFunction
from nano_loop.kernels.head.cross_entropy import CrossEntropy, LogLikelihood, denominator, mean_of_rows
from nano_loop.kernels.head.logits import LazyLogits
from nano_loop.kernels.memory import is_plain


def _takes_lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns NotImplemented if the first argument is no longer lazy, or has no rows."""

    @functools.wraps(function)
    def checked(func: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        first = kwargs.pop("input", None) if first is None else first
        if not isinstance(first, LazyLogits) or not first.is_lazy or not first.rows.numel():
            return NotImplemented
        return function(func, first, *args, **kwargs)

    return checked


# --- what stays lazy ---


@_takes_lazy
def _itself(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else lazy


@_takes_lazy
def _contiguous(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or lazy.vocabulary != lazy.dim() - 1:
        return NotImplemented
    if lazy.rows.is_contiguous():
        return lazy
    return lazy.derived(Tensor.contiguous, rows=lazy.rows.contiguous(), is_copy=True)


@_takes_lazy
def _detached(func: Any, lazy: LazyLogits, *_: Any) -> Any:
    return lazy.detached()


class Applied:
    """A method applied to rows of logits after `before`: ``float``, or a method along the vocabulary."""

    def __init__(self, name: str, before: Elementwise | None) -> None:
        self.name, self.before = name, before

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the result."""
        logits = logits if self.before is None else self.before(logits)
        return logits.float() if self.name == "float" else getattr(logits, self.name)(-1)


def _is_log_softmax(before: Elementwise | None) -> TypeGuard[Applied]:
    return isinstance(before, Applied) and before.name == "log_softmax"


@_takes_lazy
def _cast(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return a cast to fp32, or the tensor itself if nothing changes."""
    wanted = torch.float32 if func.__name__ == "float" else lazy.dtype
    for argument in (*args, *(kwargs.get(name) for name in ("dtype", "device"))):
        if isinstance(argument, torch.dtype):
            wanted = argument
        elif argument is not None and (not isinstance(argument, (str, torch.device)) or str(argument) != "cpu"):
            return NotImplemented
    if kwargs.keys() - {"dtype", "device", "non_blocking"}:
        return NotImplemented
    return lazy if wanted is lazy.dtype else _in_fp32(lazy) if wanted is torch.float32 else NotImplemented


def _in_fp32(lazy: LazyLogits) -> LazyLogits:
    return lazy.derived(Tensor.float, dtype=torch.float32, before=Applied("float", lazy.before), is_copy=True)


@_takes_lazy
def _viewed_as(func: Any, lazy: LazyLogits, other: Tensor) -> Any:
    return _rearranged(getattr(Tensor, func.__name__.removesuffix("_as")), lazy, other.shape)


@_takes_lazy
def _rearranged(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function that rearranges dimensions or selects rows: views, or a copy of all rows.

    The function is called with a tensor that contains row numbers, expanded along the vocabulary without memory. Before
    that, it is called with a tensor without any memory, because it might copy the vocabulary.
    """
    if any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values())):  # a view of the bits
        return NotImplemented

    def operation(tensor: Tensor) -> Any:
        return func(tensor, *args, **kwargs)

    for rows, is_copy in ((lazy.rows, False), (lazy.rows.contiguous(), True)):
        numbers = rows.unsqueeze(lazy.vocabulary).expand([*lazy.shape])
        empty = torch.empty_strided(numbers.shape, numbers.stride(), dtype=numbers.dtype, device="meta")
        try:
            changed = operation(empty)
        except RuntimeError:  # torch raises it for the real tensor
            return NotImplemented
        views = [changed] if isinstance(changed, Tensor) else changed
        dims = [dim for view in views if (dim := _vocabulary_of(view, lazy.head.width)) is not None]
        if len(dims) < len(views):
            continue
        changed = operation(numbers)
        if isinstance(changed, Tensor):
            return lazy.derived(operation, rows=changed.select(dims[0], 0), vocabulary=dims[0], is_copy=is_copy)
        return tuple(
            lazy.derived(lambda tensor, place=place: operation(tensor)[place], rows=view.select(dim, 0), vocabulary=dim)
            for place, (view, dim) in enumerate(zip(changed, dims, strict=True))
        )
    return NotImplemented


def _vocabulary_of(view: Tensor, width: int) -> int | None:
    sizes = enumerate(zip(view.shape, view.stride(), strict=True))
    dims = [dim for dim, (size, step) in sizes if size == width and step == 0]
    return dims[0] if len(dims) == 1 else None


@_takes_lazy
def _indexed(func: Any, lazy: LazyLogits, key: Any) -> Any:
    """Return some rows, selected by slices, integers and None, or by one tensor."""
    keys = key if isinstance(key, tuple) else (key,)
    if all(item is None or item is Ellipsis or type(item) in (int, slice) for item in keys):
        return _rearranged(func, lazy, key)
    is_rows = type(key) is Tensor and key.dtype in (torch.bool, torch.int64) and lazy.vocabulary == lazy.dim() - 1
    if not is_rows or (key.dtype is torch.bool and key.dim() > lazy.rows.dim()) or not lazy.rows.dim():
        return NotImplemented
    rows, key = lazy.rows[key], key.clone()
    return lazy.derived(lambda tensor: tensor[key], rows=rows, vocabulary=rows.dim(), is_copy=True)


def _is_vocabulary(dim: Any, lazy: LazyLogits) -> bool:
    return type(dim) is int and dim in (lazy.vocabulary, lazy.vocabulary - lazy.dim())


@_takes_lazy
def _iterated(func: Any, lazy: LazyLogits) -> Any:
    parts = _rearranged(Tensor.unbind, lazy, 0)
    return parts if parts is NotImplemented else iter(parts)


@_takes_lazy
def _softmax(func: Any, lazy: LazyLogits, dim: Any = None, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Return a softmax over the vocabulary, or its logarithm."""
    kwargs.pop("_stacklevel", None)
    if kwargs or any(type(item) is not int for item in args):
        return NotImplemented
    if not _is_vocabulary(dim, lazy) or dtype not in (None, torch.float32):
        return NotImplemented
    lazy = lazy if dtype in (None, lazy.dtype) else _in_fp32(lazy)
    name = func.__name__
    return lazy.derived(lambda tensor: getattr(tensor, name)(dim), before=Applied(name, lazy.before), is_copy=True)


@_takes_lazy
def _elementwise(func: Any, lazy: LazyLogits, *others: Any, **kwargs: Any) -> Any:
    """Return an elementwise function of lazy logits, numbers and other lazy logits of the same rows."""
    if kwargs or not all(type(item) in (int, float) or _goes_with(item, lazy) for item in others):
        return NotImplemented
    tensors = [item for item in others if isinstance(item, LazyLogits)]
    # Functions in a graph must not hold lazy tensors, because these hold their head.
    numbers = [None if isinstance(item, LazyLogits) else item for item in others]
    befores = [item.before if item.sources else _without_gradient(item.before) for item in (lazy, *tensors)]

    def applied(first: Tensor, *rest: Tensor) -> Tensor:
        following = iter(rest)
        return func(first, *(next(following) if number is None else number for number in numbers))  # type: ignore[no-any-return]

    def before(logits: Tensor) -> Tensor:
        return applied(*(logits if item is None else item(logits) for item in befores))

    return lazy.derived(applied, *tensors, before=before, is_copy=True)


def _without_gradient(before: Elementwise | None) -> Elementwise:
    """Return a function whose result is a constant for the gradient, as that of a detached twin."""
    return lambda logits: (logits if before is None else before(logits)).detach()


def _goes_with(other: Any, lazy: LazyLogits) -> bool:
    if not isinstance(other, LazyLogits) or other.head is not lazy.head or not other.is_lazy:
        return False
    return other.rows is lazy.rows and other.vocabulary == lazy.vocabulary and other.dtype is lazy.dtype


# --- functions computed in chunks ---


@_takes_lazy
def _reduced(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return a reduction over the vocabulary, or its largest elements."""
    name = func.__name__
    args, count = (args[1:], (args[0],)) if name == "topk" and args else (args, ())
    count = count or ((kwargs.pop("k"),) if "k" in kwargs else ())
    dim = args[0] if args else kwargs.pop("dim", -1 if name == "topk" else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    keeps = bool((args[1] if len(args) > 1 else kwargs.pop("keepdim", False)) and name != "topk")
    dtype = kwargs.pop("dtype", None) if name in ("sum", "mean") else None
    if not _is_vocabulary(dim, lazy) or kwargs or len(args) > (1 if name == "topk" else 2):
        return NotImplemented
    if dtype not in (None, torch.float32):
        return NotImplemented
    lazy = lazy if dtype in (None, lazy.dtype) else _in_fp32(lazy)

    def compute(logits: Tensor, _: Any) -> tuple[Tensor, ...]:
        results = func(logits, *count, -1)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    has_gradient = bool(lazy.sources) and torch.is_grad_enabled()
    is_exact = name in _COMPARED
    if is_exact and not has_gradient and 2 * lazy.rows.numel() < len(lazy.head.hidden):
        return NotImplemented  # all rows would be computed, and once more for the comparison
    function = RowFunction(compute, lazy.before, is_exact)
    with torch.set_grad_enabled(torch.is_grad_enabled() and name != "argmax"):
        results = (lazy.detached() if name == "argmax" else lazy).reduced(function)
    shaped = [_as_rows(item, lazy, keeps) for item in results]
    return shaped[0] if len(shaped) == 1 else getattr(torch.return_types, name)(shaped)


def _as_rows(result: Tensor, lazy: LazyLogits, keeps: bool = False) -> Tensor:
    """Return results of rows in the shape of the lazy tensor, with the vocabulary replaced or removed."""
    whole = result.view((*lazy.rows.shape, *result.shape[1:]))
    if whole.dim() > lazy.rows.dim():
        return whole.movedim(-1, lazy.vocabulary)
    return whole.unsqueeze(lazy.vocabulary) if keeps else whole


@_takes_lazy
def _gathered(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return some classes of each row. If it is one class of a log-softmax, the result is the negative loss."""
    names = ("dim", "index") if func.__name__ == "gather" else ("indices", "dim")
    named = dict(zip(names, args, strict=False)) | kwargs
    dim, index = named.pop("dim", None), named.pop("index", named.pop("indices", None))
    if named or not _is_vocabulary(dim, lazy) or not is_plain(index, (torch.int64,)):
        return NotImplemented
    last = index.movedim(dim, -1) if index.dim() == lazy.dim() else index
    if last.shape[:-1] != lazy.rows.shape:
        return NotImplemented
    index = last.reshape(len(lazy.rows.flatten()), -1).clone()
    if not bool(((index >= 0) & (index < lazy.head.width)).all()):
        return NotImplemented
    if _is_log_softmax(lazy.before) and index.size(1) == 1:
        (losses,) = lazy.reduced(LogLikelihood(index.squeeze(1), _logits_before(lazy.before.before)))
        result = -losses.unsqueeze(1).to(lazy.dtype)
    else:
        has_gradient = bool(lazy.sources) and torch.is_grad_enabled()
        function = RowFunction(lambda logits, places: (logits.gather(1, index[places]),), lazy.before, not has_gradient)
        (result,) = lazy.reduced(function)
    return _as_rows(result, lazy)


def _logits_before(before: Elementwise | None) -> Elementwise | None:
    """Return the function that must be applied to logits before the loss. A cast is not needed: the loss reads bf16."""
    return None if isinstance(before, Applied) and (before.name, before.before) == ("float", None) else before


@_takes_lazy
def _loss(
    func: Any,
    lazy: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return cross-entropy, or the negative log-likelihood of a log-softmax."""
    kind, before = CrossEntropy, lazy.before
    is_nll = func.__name__ == "nll_loss"
    if is_nll:
        if not _is_log_softmax(before):
            return NotImplemented
        kind, before = LogLikelihood, before.before
    classes = min(1, lazy.dim() - 1)
    if lazy.vocabulary != classes or size_average is not None or reduce is not None or not 0 <= label_smoothing <= 1:
        return NotImplemented
    if (
        not is_plain(target, (torch.int64,))
        or target.shape != lazy.rows.shape
        or reduction not in ("none", "mean", "sum")
    ):
        return NotImplemented
    if weight is not None and (
        not is_plain(weight, (torch.float32,)) or weight.requires_grad or weight.shape != (lazy.head.width,)
    ):
        return NotImplemented
    dtype = torch.float32 if torch.is_autocast_enabled("cpu") else lazy.dtype
    flat, weight = target.flatten().clone(), None if weight is None else weight.clone()
    function = kind(flat, _logits_before(before), weight, ignore_index, label_smoothing)
    if not function.has_classes(lazy.head.width):
        return NotImplemented
    divisor = denominator(flat, weight, ignore_index, reduction)
    (loss,) = lazy.reduced(function, divisor)
    if reduction == "mean" and lazy.dim() > 1:
        assert divisor is not None
        smoothing = () if is_nll else (label_smoothing,)
        summed = functools.partial(func, lazy, target, weight, None, ignore_index, None, "sum", *smoothing)
        return mean_of_rows(loss.to(dtype), divisor.item, summed)
    return (loss.view(target.shape) if reduction == "none" else loss).to(dtype)


_REARRANGED = dict.fromkeys(
    (
        *("transpose", "swapaxes", "permute", "movedim", "unsqueeze", "squeeze", "flatten", "view", "reshape"),
        *("select", "narrow", "split", "chunk", "unbind"),
    ),
    _rearranged,
)
_ELEMENTWISE = dict.fromkeys(
    (
        *("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide"),
        *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "neg", "__neg__", "exp", "log", "tanh", "square"),
    ),
    _elementwise,
)
#: Reductions to which programs compare logits, for example to keep the largest ones.
_COMPARED = frozenset(("max", "amax", "topk"))
_REDUCED = dict.fromkeys(("argmax", "max", "amax", "topk", "logsumexp", "sum", "mean"), _reduced)

FUNCTIONS = MappingProxyType(
    {
        **_REARRANGED,
        **_ELEMENTWISE,
        **_REDUCED,
        **dict.fromkeys(("detach", "data"), _detached),
        **dict.fromkeys(("view_as", "reshape_as"), _viewed_as),
        **dict.fromkeys(("softmax", "log_softmax"), _softmax),
        **dict.fromkeys(("gather", "take_along_dim"), _gathered),
        **dict.fromkeys(("cross_entropy", "nll_loss"), _loss),
        "cpu": _itself,
        "contiguous": _contiguous,
        "to": _cast,
        "float": _cast,
        "__getitem__": _indexed,
        "__iter__": _iterated,
    }
)
