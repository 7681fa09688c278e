"""Conversion of gradients to the tensors that are averaged, in the order of their parameters' memory, and back.

They are averaged before the program clips them: a mean that is clipped in place is kept, and so is a clipped tensor
that replaces it (`AveragedGradients.replaced`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.patching.optimizers import is_dense, laid_out_as

#: What has arrived for a parameter since the last averaging.
NOTHING, DENSE, SPARSE = range(3)


def kind_of(gradient: torch.Tensor | None) -> int:
    """Return the kind of `gradient` for the other ranks: NOTHING, DENSE or SPARSE."""
    if gradient is None:
        return NOTHING
    return DENSE if gradient.layout is torch.strided else SPARSE


def are_all_dense(arrived: Sequence[bytes]) -> bool:
    """Whether all parameters, possibly thousands, have a dense gradient on all ranks."""
    return all(kinds.count(DENSE) == len(kinds) for kinds in arrived)


def by_kind(parameters: list[torch.Tensor], arrived: Sequence[bytes]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters with a dense gradient on any rank, and those with only sparse ones, by `kind_of`."""
    if are_all_dense(arrived):
        return parameters, []
    dense: list[torch.Tensor] = []
    sparse: list[torch.Tensor] = []
    for parameter, kinds in zip(parameters, zip(*arrived, strict=True), strict=True):
        if any(kinds):
            (dense if DENSE in kinds else sparse).append(parameter)
    return dense, sparse


class DenseGradients:
    """The gradients of some parameters as they are averaged, and their destinations; a missing one counts as zero.

    `tensors` are contiguous, of the parameter's dtype (complex ones as pairs), and in the order of its memory.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or not is_plain(gradient, parameter):
                gradient = _copy(gradient, parameter)
                self._copies.append((parameter, gradient))
            self.tensors.append(in_memory_order(parameter, gradient))
        if not all(tensor.numel() for tensor in self.tensors):
            self.tensors = [tensor for tensor in self.tensors if tensor.numel()]

    def put_back(self) -> None:
        """Set the parameters' gradients to the means of copies; all other gradients have been averaged in place."""
        for parameter, mean in self._copies:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or _overlaps(gradient):
                parameter.grad = mean
            elif gradient.requires_grad:
                with torch.enable_grad():
                    parameter.grad = _Mean.apply(gradient, mean)  # type: ignore[no-untyped-call]
            else:
                gradient.copy_(mean)


class AveragedGradients:
    """The gradients that are means over the ranks. They are not kept alive."""

    def __init__(self) -> None:
        self._means: dict[int, weakref.ref[Any]] = {}  # of their memory, by parameter id

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record that the gradients of `parameters` are currently the same on all ranks."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._means[id(parameter)] = weakref.ref(_memory_of(parameter.grad))

    def keep(self, ids: set[int]) -> None:
        """Forget all parameters except those with these ids, because ids may be reused."""
        self._means = {key: mean for key, mean in self._means.items() if key in ids}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of a parameter was ever averaged."""
        return id(parameter) in self._means

    def replaced(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose mean the loop has replaced, for example by a sum of clipped gradients."""
        pairs = [(one, one.grad, self._means.get(id(one))) for one in parameters]
        known = ((one, grad, mean and mean()) for one, grad, mean in pairs if grad is not None)
        return [one for one, grad, memory in known if memory is not _memory_of(grad)]


def _memory_of(gradient: torch.Tensor) -> Any:
    """Return an object that identifies a gradient: `torch.utils.swap_tensors` rejects weak references to it."""
    return gradient.untyped_storage() if gradient.layout is torch.strided else gradient


class _Mean(torch.autograd.Function):
    """A mean with the graph of this rank's gradient: the mean of second derivatives is the derivative of the mean."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


def is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a gradient can be averaged in place: it has the parameter's dtype and memory order."""
    if gradient.layout is not torch.strided or gradient.requires_grad or gradient.dtype is not parameter.dtype:
        return False
    if gradient.is_neg() or gradient.is_conj():
        return False
    if gradient.is_contiguous() and parameter.is_contiguous():
        return True
    return gradient.stride() == parameter.stride() and is_dense(parameter)


def in_memory_order(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a plain gradient as it is sent: contiguous, in memory order, complex elements as pairs."""
    elements = gradient if parameter.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))
    return torch.view_as_real(elements) if elements.is_complex() else elements


def _copy(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None or gradient.layout is not torch.strided:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return zeros if gradient is None else zeros.add_(gradient.detach())
    return laid_out_as(parameter, gradient.detach()).to(parameter.dtype)


def _overlaps(gradient: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))


def average_sparse(parameters: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Set gradients, sparse or missing, to the coalesced mean of all ranks' sparse ones. Collective."""
    if not parameters:
        return
    own = [None if parameter.grad is None else parameter.grad.detach().coalesce() for parameter in parameters]
    gathered = ranks.gather(own)
    for parameter, *by_rank in zip(parameters, *gathered, strict=True):
        parts = [gradient for gradient in by_rank if gradient is not None]
        indices = torch.cat([gradient.indices() for gradient in parts], dim=1)
        values = torch.cat([gradient.values() for gradient in parts]) / ranks.size
        # Every rank adds the same values in the same order.
        total = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)  # or torch warns
        parameter.grad = total.coalesce()
