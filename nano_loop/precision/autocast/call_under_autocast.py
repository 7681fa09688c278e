"""The context of each call into a model: autocast, records of activations, and explained dtype errors.

All three are one context, and autocast is set as `torch.autocast` does: a small model's call is so short that more
Python frames around it would affect the step time.

`torch_replaced` makes the other changes to torch for these calls.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, distributions, nn
from torch.autograd.function import BackwardCFunction

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.ownership import call_state
from nano_loop.patching.user_code import users_frame
from nano_loop.precision.autocast.output_activations import Activations, noting

# torch has no exception class for these errors, and words each one differently.
_ABOUT_DTYPES = re.compile(
    r"bfloat16|\bHalf\b|expected scalar type|"
    r"same (dtype|type|scalar type)|equal to src\.dtype|dtypes match|expected dtype",
    re.IGNORECASE,
)
_ADVICE = "Put it under `with nano_loop.disable_casts():`, where it computes in fp32, or name it in fp32_ops"
_UNDER_AUTOCAST = "autocast gives it tensors that torch refuses, such as bf16 or fp16 with fp32"
_NO_KERNEL, _IN_FP32 = "torch has no kernel for it in this dtype", _ADVICE.partition(", or name")[0]


def explain(error: BaseException, expected: str = _UNDER_AUTOCAST, advice: str = _ADVICE) -> None:
    """Add the operation, the user's line and advice to an error about dtypes that is being raised.

    Other kinds of errors are not changed. `expected` and `advice` are the last two parts of the text. In Python 3.10,
    whose exceptions have no notes, a `NanoError` is raised instead.
    """
    # torch's error for a missing kernel, "not implemented", is also a RuntimeError.
    text = _explanation(error, expected, advice) if isinstance(error, RuntimeError) else None
    if text is None:
        return
    if not hasattr(error, "add_note"):
        raise NanoError(f"{error}\n{text}") from error
    error.add_note(text)


def _explanation(error: RuntimeError, expected: str, advice: str) -> str | None:
    if not _ABOUT_DTYPES.search(str(error)) or any(advice in note for note in getattr(error, "__notes__", ())):
        return None
    if "not implemented" in str(error):
        expected, advice = _NO_KERNEL, _IN_FP32
    frame = users_frame(traceback.extract_tb(error.__traceback__))
    got = "An operation of the model"
    if frame is not None:
        got = f"{frame.line or got} ({frame.filename}, line {frame.lineno})"
    return error_message(got, expected, advice)


class CallUnderAutocast:
    """Run the body under autocast on the CPU; enter it once. For `dtype`, see `cpu_autocast`.

    `torch.compile` cannot trace it: use `cpu_autocast` in compiled code.
    """

    __slots__ = ("_before", "_dtype", "_outer", "activations")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        #: The activations recorded by operators in the body.
        self.activations = Activations()

    def __enter__(self) -> CallUnderAutocast:
        self._outer, noting.activations = noting.activations, self.activations
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._before = enabled, dtype, torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", self._dtype)
        torch.set_autocast_cache_enabled(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        enabled, dtype, keeps_casts = self._before
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(keeps_casts)
        noting.activations = self._outer
        if error is not None:
            explain(error)


@contextmanager
def torch_replaced() -> Iterator[None]:
    """Replace the other parts of torch that must know that a call into a set-up model is under autocast."""
    backward, classes = cast(Any, BackwardCFunction), {*filter(_is_distribution, vars(distributions).values())}
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.MultiheadAttention, "forward", _off_the_fast_path))
        stack.enter_context(replaced(nn.TransformerEncoderLayer, "forward", _clearing_padding))
        stack.enter_context(replaced(nn.TransformerEncoder, "forward", _leaving_out_padding))
        stack.enter_context(replaced(Tensor, "numpy", _with_fp32))
        for kind in classes:
            stack.enter_context(replaced(kind, "__init__", _with_fp32))
        stack.enter_context(replaced(backward, "__init__", _noting))
        stack.enter_context(replaced(backward, "apply", _applying))
        yield


def _off_the_fast_path(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Prevent torch's attention layers from using their fast paths without gradients, which do not support autocast.

    They check whether autocast is enabled, but for CUDA. We enable that setting only for their calls: otherwise an
    activation checkpoint around a layer would save it, and torch 2.8 warns when the backward enables it again.
    """

    @functools.wraps(forward)
    def with_autocast_noticed(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not call_state.accelerated or not torch.is_autocast_enabled("cpu"):
            return forward(self, *args, **kwargs)
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            return forward(self, *args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", before)

    return with_autocast_noticed


def _leaving_out_padding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let an encoder return zeros at padded positions, before its norm, where torch's fast path does.

    The fast path drops these positions, as nested tensors. A mean over all positions depends on it.
    """
    slow = _off_the_fast_path(forward)

    @functools.wraps(forward)
    def encode(
        self: Any, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, *more: Any, **named: Any
    ) -> Any:
        before = noting.padding
        if not torch.compiler.is_compiling():
            padded = _dropped_positions(self, src, mask, src_key_padding_mask)
            noting.padding = None if padded is None else (self.layers[-1], padded)
        try:
            return slow(self, src, mask, src_key_padding_mask, *more, **named)
        finally:
            noting.padding = before

    return encode


def _clearing_padding(forward: Callable[..., Any]) -> Callable[..., Any]:
    slow = _off_the_fast_path(forward)

    @functools.wraps(forward)
    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        output = slow(self, *args, **kwargs)
        padding = None if torch.compiler.is_compiling() else noting.padding
        if padding is None or padding[0] is not self:
            return output
        return output.masked_fill(padding[1].unsqueeze(-1), 0.0)

    return call


def _dropped_positions(encoder: Any, src: Tensor, mask: Any, padding: Any) -> Tensor | None:
    """Return the padded positions that torch's fast path would drop without autocast, or None if it would not."""
    if not call_state.accelerated or not torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    uses_nested = getattr(encoder, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    if not uses_nested or mask is not None or padding is None or src.dim() != 3 or src.is_nested:
        return None
    first = encoder.layers[0]
    is_followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *first.parameters()))
    if first.training or is_followed:
        return None
    padded: Tensor = padding if padding.dtype is torch.bool else padding != 0
    is_at_end = not getattr(encoder, "mask_check", True) or bool((padded[:, 1:] | ~padded[:, :-1]).all())
    return padded if is_at_end else None


def _is_distribution(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, distributions.Distribution) and "__init__" in vars(value)


def _with_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass results to numpy and distributions, which do not support bf16 or fp16, as the call would return them.

    An RL policy returns `Categorical(logits=...)`, or converts its action to an array inside the call.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        activations = noting.activations
        if activations is not None:
            args, kwargs = map_tensors(activations.in_fp32, (args, kwargs))
        return original(*args, **kwargs)

    return call


# The autocast dtypes in the forwards of custom functions, by their graph nodes, which are also their `ctx`.
_dtypes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if call_state.accelerated and torch.is_autocast_enabled("cpu"):
            _dtypes[self] = torch.get_autocast_dtype("cpu")

    return init


def _applying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the backward of a custom `torch.autograd.Function` under the autocast of its forward.

    A function that saves a bf16 tensor gets an fp32 gradient, and torch's products refuse to mix them. The decorators
    `custom_fwd` and `custom_bwd` solve this, but few functions use them.
    """

    @functools.wraps(original)
    def apply(self: Any, *gradients: Any) -> Any:
        dtype = _dtypes[self] if self in _dtypes else None  # noqa: SIM401  # its `get` is untyped
        if dtype is None:
            return original(self, *gradients)
        with CallUnderAutocast(dtype):
            return original(self, *gradients)

    return apply
