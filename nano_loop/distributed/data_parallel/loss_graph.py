"""The autograd graph between losses and the last layers before them, before a backward runs.

A layer is an operation on parameters, or on values computed from parameters alone, such as a transposed weight. It is a
last one if no path from a loss leads to it through another layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from nano_loop.kernels.head.cross_entropy import MEAN
from nano_loop.patching.torch_private_autograd import output_numel, reduction_of

#: The key, in a node's metadata, of a loss that is a mean over all ranks' rows.
OVER_ALL_RANKS = "nano_loop: a mean over all ranks"
#: Maximum number of nodes that are searched.
_MOST_NODES = 64


def _walk(roots: Iterable[Any], inputs_of: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield roots, the `inputs_of` them, the inputs of these, and so on, up to a maximum number."""
    waiting = [*roots]
    seen: set[Any] = set()
    while waiting and len(seen) <= _MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += inputs_of(node)


def reductions(roots: Iterable[Any]) -> list[tuple[Any, int, bool]]:
    """Return the nodes nearest to scalar roots that reduce tensors, their numbers of elements, and which are means."""
    nodes = []

    def scalars(node: Any) -> list[Any]:
        inputs = [(one, output_numel(one, place)) for one, place in node.next_functions if one is not None]
        if node.metadata.get(OVER_ALL_RANKS):
            nodes.append((node, 1, False))
        elif all(size == 1 for _, size in inputs):
            return [one for one, _ in inputs]
        else:
            is_mean = node.name().startswith("Mean") or reduction_of(node) == MEAN
            nodes.append((node, max(size for _, size in inputs), is_mean))
        return []

    for _ in _walk(roots, scalars):
        pass
    return nodes


def before_layers(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes between scalar roots and the last layers."""

    def inputs_of(node: Any) -> list[Any]:
        return [] if _is_layer(node) else [one for one, _ in node.next_functions]

    return [node for node in _walk(roots, inputs_of) if not _is_layer(node)]


def _is_layer(node: Any) -> bool:
    return any(_is_of_parameter(one) for one, _ in node.next_functions)


def _is_of_parameter(node: Any) -> bool:
    """Whether a node is a leaf, or a view of one, such as the transposed weight of a linear layer."""
    inputs = [] if node is None else node.next_functions
    return node is not None and (not inputs or (len(inputs) == 1 and hasattr(inputs[0][0], "variable")))


def split_by_depth(losses: Iterable[Tensor]) -> tuple[list[set[int]], set[int]]:
    """Return the ids of the parameters of each last layer, such as a head, and of all others, before a backward."""
    nodes = _from_leaves_to([loss.grad_fn for loss in losses])
    variables = {node: getattr(node, "variable", None) for node in nodes}
    leaves = {node: id(one) for node, one in variables.items() if isinstance(one, nn.Parameter)}
    weights: set[Any] = set()  # nodes whose values are computed from parameters alone
    for node in nodes:
        inputs = [one for one, _ in node.next_functions]
        if node in leaves or (inputs and all(one in weights for one in inputs)):
            weights.add(node)
    last, earlier = [], set()
    behind: set[Any] = set()  # nodes that a path leads to through a layer
    for node in reversed(nodes):
        if node in weights:
            continue
        inputs = [one for one, _ in node.next_functions if one is not None]
        own = {leaves[one] for one in _from_leaves_to(one for one in inputs if one in weights) if one in leaves}
        if own and node in behind:
            earlier |= own
        elif own:
            last.append(own)
        if own or node in behind:
            behind.update(inputs)
    return last, earlier


def _from_leaves_to(roots: Iterable[Any]) -> list[Any]:
    """Return the nodes that lead to roots, each of them after its inputs."""
    in_order, seen = [], set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, has_all = waiting.pop()
        if has_all:
            in_order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(one, False) for one, _ in node.next_functions]
    return in_order
