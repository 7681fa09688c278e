"""Finds the last layers before a loss, whose gradients are not affected by rounding in earlier layers.

In the autograd graph, a layer is an operation on parameters, or on values computed from parameters alone, such as a
transposed weight. It is a last one if no path from the loss leads to it through another layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def split_by_depth(losses: Iterable[Tensor]) -> tuple[list[set[int]], set[int]]:
    """Return the parameters of each last layer, such as the weight and the bias of a head, and those of all others.

    Parameters
    ----------
    losses : iterable of torch.Tensor
        The roots of a backward that has not run yet.

    Returns
    -------
    tuple of a list of set of int and a set of int
        The ids of the parameters. Parameters of a last layer may also be among the others, such as tied weights.
    """
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
