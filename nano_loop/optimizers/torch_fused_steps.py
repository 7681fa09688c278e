"""Steps by torch's fused kernels in place of torch's loop over operators, when their results are correct.

The kernels read and write as many numbers as a parameter has, starting at the first address of each tensor, and check
nothing. If a parameter, its gradient or a state has gaps, overlaps or another order, elements are updated with other
elements' numbers, and memory of other tensors is overwritten (pytorch#110758 reports it for CUDA). So each step checks
each group. The flags in ``param_groups`` never change for the program: only the function that torch's ``step()`` calls
for a group gets the kernel's flag.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adagrad, Adam, Optimizer

from nano_loop.patching.attributes import module_of, replaced
from nano_loop.patching.optimizers import is_dense, lies_as
from nano_loop.patching.patch_table import entry_set, process_wide, shared_change
from nano_loop.patching.torch_private_optimizers import groups_prepared

_Function = Callable[..., Any]
_Group = dict[str, Any]

_SIZE, _IS_CPU = Tensor.size, attrgetter("is_cpu")

#: By id of the parameter list that a step has made for a group: the list, the group, and the optimizer's id.
_prepared: dict[int, tuple[list[Tensor], _Group, int]] = process_wide("groups that are stepped", {})


class OwnSteps(Protocol):
    """Steps of an optimizer by a kernel that is not torch's."""

    def prepare(self, optimizer: Optimizer, lists: Sequence[list[Any]]) -> None:
        """Prepare the states in the lists of a group, and in the optimizer, for the step."""

    def step(self, original: _Function, group: _Group, lists: Sequence[list[Any]], settings: dict[str, Any]) -> Any:
        """Step a group, given the arguments of torch's function, or call that function."""


#: By id of the optimizers whose steps are fused: the steps used instead of torch's kernels, or None.
_fused: dict[int, OwnSteps | None] = process_wide("optimizers whose steps are fused", {})


@contextmanager
def steps_fused(optimizer: Optimizer, own: OwnSteps | None = None) -> Iterator[None]:
    """Step this optimizer by fused kernels, or its `own`, if its class and groups' flags allow it, until it's freed."""
    kind, number = type(optimizer), id(optimizer)
    del optimizer
    owner = next(base for base in _FUNCTIONS if issubclass(kind, base))
    name, make = _FUNCTIONS[owner]
    with ExitStack() as changes:
        changes.callback(_prepared.clear)  # in case of an error between the two functions
        changes.enter_context(groups_prepared(kind, _noting))
        changes.enter_context(replaced(sys.modules[owner.__module__], name, make))
        changes.enter_context(shared_change(("fused steps", number, own), lambda: entry_set(_fused, number, own)))
        yield


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the steps of an optimizer are fused where possible."""
    return id(optimizer) in _fused


def has_own_steps(optimizer: Optimizer) -> bool:
    """Whether a kernel that is not torch's steps an optimizer."""
    return _fused.get(id(optimizer)) is not None


def steps_as_torch(kind: type[Optimizer]) -> bool:
    """Whether torch's function for the steps of a kind is in place, or replaced by nano_loop only."""
    owner = next(base for base in _FUNCTIONS if issubclass(kind, base))
    return is_torchs(vars(sys.modules[owner.__module__])[_FUNCTIONS[owner][0]])


def is_torchs(function: Any) -> bool:
    """Whether a function belongs to torch, or is this module's replacement of torch's function."""
    while module_of(function) == __name__:
        function = function.__wrapped__
    return module_of(function).partition(".")[0] == "torch"


def takes_kernel(group: _Group) -> bool:
    """Whether a fused kernel supports a group's settings, and the program asks for it or for no implementation."""
    if group["differentiable"] or group.get("capturable") or not isinstance(group["lr"], (int, float)):
        return False
    for beta in group.get("betas", ()):
        if isinstance(beta, Tensor):
            return False
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None)


def are_counters(counters: Sequence[Any]) -> bool:
    """Whether a kernel counts steps with these tensors like torch's loop, which adds 1 for each parameter."""
    are_numbers = all(isinstance(counter, Tensor) and counter.is_floating_point() for counter in counters)
    return are_numbers and len({*map(id, counters)}) == len(counters)


def lie_alike(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether each parameter, its gradient and its states, if there are all, have the layout that a kernel needs."""
    return lie_in_order(lists) or all(map(_is_alike, zip(*lists, strict=True)))


def lie_in_order(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether all tensors are contiguous, not negated, and of one dtype, as usual: this costs time in each step."""
    parameters = lists[0]
    dtype, shapes = parameters[0].dtype, [*map(_SIZE, parameters)]
    try:
        for tensors in lists:
            for tensor in tensors:
                if tensor is None or tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.is_neg():
                    return False
            if tensors is not parameters and [*map(_SIZE, tensors)] != shapes:
                return False
    except RuntimeError:  # tensors without strides, such as sparse ones in CSR
        return False
    return dtype.is_floating_point and all(map(_IS_CPU, parameters))


def _is_alike(tensors: Sequence[Any]) -> bool:
    parameter, *others = tensors
    if not (parameter.dtype.is_floating_point and parameter.is_cpu and is_dense(parameter)) or parameter.is_neg():
        return False
    return all(
        other is not None and other.dtype is parameter.dtype and lies_as(other, parameter) and not other.is_neg()
        for other in others
    )


def _noting(original: _Function) -> _Function:
    """Return the replacement of the function that makes the lists of a group in a step."""

    @functools.wraps(original)
    def prepare(self: Optimizer, group: _Group, *lists: Any, **kwargs: Any) -> Any:
        result = original(self, group, *lists, **kwargs)
        own = _fused.get(id(self))
        if own is not None:
            own.prepare(self, lists)
        if id(self) in _fused and lists and lists[0]:
            _prepared[id(lists[0])] = lists[0], group, id(self)
        return result

    return prepare


def _fusing(has_counters: bool, original: _Function) -> _Function:
    """Return the replacement of the function that steps the lists of a group."""

    @functools.wraps(original)
    def step(parameters: list[Tensor], *lists: Any, **settings: Any) -> Any:
        unknown = None, None, 0
        _, group, number = unknown if torch.compiler.is_compiling() else _prepared.pop(id(parameters), unknown)
        own = _fused.get(number)
        if group is not None and own is not None:
            return own.step(original, group, [parameters, *lists], settings)
        is_scaled = settings.get("grad_scale") is not None or settings.get("found_inf") is not None
        if group is None or is_scaled:
            return original(parameters, *lists, **settings)
        of_parameters = [parameters, *filter(_exist, lists[:-1] if has_counters else lists)]
        if group["fused"]:  # set by the program: torch changes no versions then, and is wrong for different layouts
            if all(map(_is_plain, chain(*of_parameters))) and not lie_alike(of_parameters):
                settings.update(fused=False, foreach=False)
        elif takes_kernel(group) and lie_alike(of_parameters) and (not has_counters or are_counters(lists[-1])):
            settings.update(fused=True, foreach=False)
            increment_version([*chain(parameters, *of_parameters[2:])])
        return original(parameters, *lists, **settings)

    return step


def _exist(states: Sequence[Tensor | None]) -> bool:
    """Whether these states exist: others belong to other settings, or are momenta before the first step."""
    return any(state is not None for state in states)


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether a fused kernel accepts a tensor without an error."""
    if tensor is None or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() and not tensor.is_neg()


#: The name of torch's function for the steps of a kind, in the kind's module, and the function that replaces it.
_FUNCTIONS: dict[type[Optimizer], tuple[str, Callable[[_Function], _Function]]] = {
    Adam: ("adam", functools.partial(_fusing, True)),
    SGD: ("sgd", functools.partial(_fusing, False)),
    Adagrad: ("adagrad", functools.partial(_fusing, True)),
}
