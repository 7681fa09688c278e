"""The policy that says for which calls into a model bf16 pays, from the sizes of the products that a call computes.

Autocast costs each product its casts, whatever its size, and gains in proportion to its multiplications. So the first
call with inputs of a new size is counted, and the sum says whether later ones of that size pay. The counts are exact
and depend on sizes alone, so a run computes in the same precision wherever it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nano_loop.kernels.rnn import lstm_layer
from nano_loop.patching.calls.calls import is_forward
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.torch_private import (
    FLASH_ATTENTION,
    TorchDispatchMode,
    current_node_number,
    in_backward,
    in_functorch,
    next_node_number,
)
from nano_loop.patching.torch_private_compiler import is_compiled
from nano_loop.patching.walk import find

#: What is equal for calls that take about as long: the module's id, its method, and the size of the inputs.
Kind = tuple[int, str | None, int]

#: The multiplications that a product gains nothing from, for the calls of its casts, in the forward and the backward.
OF_CASTS = 6 << 20
#: The same for a product that stays in fp32 in a bf16 model, whose input and output are cast.
OF_FP32 = 2 << 20
#: The same for each element of a product's input and output, which are cast or read in another dtype.
OF_ELEMENT = 16

#: The autograd nodes that a call makes at most which is looked at, and counted later.
MOST_NODES = 1000

#: How many calls for which bf16 does not pay are worth a line of the report, if bf16 was asked for.
CALLS_WORTH_SAYING = 100

_ATEN = torch.ops.aten


def _of_recurrence(args: tuple[Any, ...], out: Tensor) -> int:
    inputs, input_weight, hidden_weight = args[:3]
    return int(inputs.numel() // inputs.size(-1) * (input_weight.numel() + hidden_weight.numel()))


#: How to count the multiplications of an operator, from its arguments and its output.
_MULTIPLICATIONS: dict[Any, Callable[[tuple[Any, ...], Tensor], int]] = {
    _ATEN.mm: lambda args, out: out.numel() * args[0].size(-1),
    _ATEN.bmm: lambda args, out: out.numel() * args[0].size(-1),
    _ATEN.addmm: lambda args, out: out.numel() * args[1].size(-1),
    _ATEN.baddbmm: lambda args, out: out.numel() * args[1].size(-1),
    _ATEN.convolution: lambda args, out: (args[0] if args[6] else out).numel() * args[1][0].numel(),
    _ATEN.mkldnn_rnn_layer: _of_recurrence,
    lstm_layer.AS_OPERATOR: _of_recurrence,
    FLASH_ATTENTION: lambda args, out: 2 * out.numel() * args[1].size(-2),
}


def gain(operator: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the multiplications that an operator gains by bf16, less what it costs. Zero for all but products."""
    multiplications = _MULTIPLICATIONS.get(operator)
    out = out[0] if isinstance(out, (tuple, list)) else out
    if multiplications is None or not isinstance(out, Tensor):
        return 0
    if out.dtype is not torch.bfloat16:
        return -OF_FP32
    first = args[1] if operator in (_ATEN.addmm, _ATEN.baddbmm) else args[0]
    elements = int(first.numel() + out.numel())
    return multiplications(args, out) - OF_ELEMENT * elements - OF_CASTS


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the operators of its body gain."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gain, self.products = 0, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled functions run, which torch would leave uncompiled for the rest of the process."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run, with newer versions of torch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        gained = gain(func.overloadpacket, args, out)
        self.gain += gained
        self.products += gained != 0
        return out


class _Verdict(NamedTuple):
    """Whether bf16 pays for a kind of call, and the number of the first autograd node behind the counted call."""

    pays: bool
    since: int


class Bf16Policy:
    """The policy for one model: for which calls into it bf16 pays.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    at_once : bool
        Whether the first call of `forward` is counted, even if that changes how gradients of shared weights round.
    """

    def __init__(self, model: nn.Module, at_once: bool = True) -> None:
        self.model = model
        #: The kinds of calls of which it is settled that they run in bf16, in backwards too.
        self.in_bf16: set[Kind] = set()
        self._at_once = at_once
        self._verdicts: dict[Kind, _Verdict] = {}
        self._countable: set[Kind] = set()
        self._vain = 0

    @property
    def never(self) -> bool:
        """Whether bf16 paid for no call, of which there were enough to say so."""
        return self._vain >= CALLS_WORTH_SAYING and not self.sometimes

    @property
    def sometimes(self) -> bool:
        """Whether bf16 paid for some of the calls."""
        return any(verdict.pays for verdict in self._verdicts.values())

    @property
    def sometimes_not(self) -> bool:
        """Whether bf16 did not pay for some of the calls."""
        return not all(verdict.pays for verdict in self._verdicts.values())

    def of(self, call: Kind) -> bool | None:
        """Return whether bf16 pays for a call, as `kind_of` returns it, or None if no such call was counted.

        An activation checkpoint calls again in the backward, and compares the dtypes with those of the forward. So the
        call that was counted, which was in bf16, pays there too.
        """
        verdict = self._verdicts.get(call)
        if verdict is None:
            return None
        if verdict.pays:
            return True
        if in_backward() and (current_node_number() or 0) < verdict.since:
            return True
        self._vain += 1
        if self._vain >= CALLS_WORTH_SAYING and not self._at_once:
            self.in_bf16.add(call)
        return False

    def counting(self, function: Callable[..., Any], call: Kind) -> AbstractContextManager[None] | None:
        """Return a context in which a call of this kind is counted, or None if it cannot be counted, or not yet.

        Calls in `torch.func` and in a backward cannot, nor can those of compiled models. In inference mode torch shows
        operators that are made of others whole, and computes those without autocast.
        """
        if in_functorch() or in_backward() or torch.is_inference_mode_enabled():
            return None
        if any(map(is_compiled, self.model.modules())):
            self._decide(call, True)
            return None
        at_once = self._at_once and is_forward(function)
        return self._counted(call) if at_once or call in self._countable else None

    def look_at(self, call: Kind, start: int, outputs: Any) -> None:
        """Decide whether the next call of this kind is counted, by the nodes that this one has made since `start`.

        Not if there are many: a method may contain the whole loop, which counting slows down. And where bf16 was asked
        for, not if casts are shared: counting does without autocast's cache, so their gradients would round otherwise.
        """
        if call in self._verdicts or in_functorch() or in_backward():
            return
        if next_node_number() - start > MOST_NODES or (not self._at_once and _casts_are_shared(outputs)):
            self._decide(call, True)
        else:
            self._countable.add(call)

    @contextmanager
    def _counted(self, call: Kind) -> Iterator[None]:
        with _Counting() as counting:
            yield
        # Without products, nothing is known of what the call computes: it runs as it was asked for.
        self._decide(call, counting.gain > 0 or not counting.products)

    def _decide(self, call: Kind, pays: bool) -> None:
        self._verdicts[call] = _Verdict(pays, next_node_number())
        if pays:
            self.in_bf16.add(call)


def kind_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """Return the kind of a call of a method of a module. It is made for each call, so it is short."""
    plain = not kwargs and len(args) == 2 and isinstance(args[1], Tensor)  # as most calls are
    size = args[1].numel() if plain else sum(tensor.numel() for tensor in find(Tensor, (args[1:], kwargs)))
    return id(args[0]), getattr(function, "__name__", None), size.bit_length()


def _casts_are_shared(outputs: Any) -> bool:
    """Whether the cast of a weight has several users in the graph of a call. Autocast's cache adds their gradients."""
    nodes: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        return tensor

    map_tensors(note, outputs)
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if node not in seen:
                seen.add(node)
                nodes.append(node)
            elif _is_cast_of_weight(node):
                return True
    return False


def _is_cast_of_weight(node: Any) -> bool:
    below = node.next_functions
    return node.name() == "ToCopyBackward0" and len(below) == 1 and hasattr(below[0][0], "variable")
