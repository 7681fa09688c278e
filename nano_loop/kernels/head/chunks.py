"""Functions of rows of logits, computed in chunks with their gradient: losses, and reductions of a vocabulary.

Each chunk of logits is computed, used and freed. If the result is a scalar, such as the mean of a loss, its gradient is
computed along with it, so logits are computed once, unless too many such gradients wait for their backward pass. In all
other cases, the backward pass computes logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.double_backward import gradients_of, is_followed
from nano_loop.kernels.head.head import Gradients, Head
from nano_loop.kernels.memory import empty
from nano_loop.patching.torch_private import as_plain_tensors, below_autocast
from nano_loop.patching.torch_private_autograd import has_tensor_hooks, reaches

#: Maps rows of logits, of shape (R, V), to rows of the same shape. Each row depends on its own input only.
Elementwise = Callable[[Tensor], Tensor]

_LEAF = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)  # its gradient stays None


class RowFunction:
    """A function of rows of logits. It returns tensors with one entry per row. Only the first one has a gradient.

    `compute` takes rows that `before` returns and their places, and returns the tensors. It calls operators of torch.
    `before` is a function that is applied to the logits first, or None. `places` are the rows to compute, in order, or
    None for all rows. The others are 0. `is_exact` is whether programs may compare results with logits, such as the
    largest ones: then the logits are those of the real tensor, bit-identical.
    """

    places: Tensor | None = None

    def __init__(
        self,
        compute: Callable[[Tensor, slice | Tensor], tuple[Tensor, ...]],
        before: Elementwise | None,
        is_exact: bool = False,
    ) -> None:
        self.compute, self.before, self.is_exact = compute, before, is_exact

    def outputs(self, logits: Tensor, places: slice | Tensor, has_gradient: bool = False) -> tuple[Tensor, ...]:
        """Return the results of rows, whose logits are of shape (R, V). Their gradient may be requested next."""
        with torch.no_grad(), below_autocast():
            return self.compute(logits if self.before is None else self.before(logits), places)

    def gradient(self, logits: Tensor, places: slice | Tensor, factors: Tensor) -> Tensor:
        """Return the gradient of the rows' logits from that of the first output. It may share the logits' memory."""
        with torch.enable_grad(), below_autocast():
            leaf = logits.detach().requires_grad_()
            output = self.compute(leaf if self.before is None else self.before(leaf), places)[0]
            return torch.autograd.grad(output, leaf, factors.to(output.dtype), materialize_grads=True)[0]

    def of_tensor(self, rows: Tensor) -> Tensor:
        """Return the first output of all rows, given the rows of the lazy tensor itself: after `before`, in a graph."""
        return self.compute(rows, slice(None))[0]


class Plan:
    """A computation in chunks.

    `rows` has one dimension: the rows of the head's input that belong to each result. If `divisor` is None, the result
    is all outputs of the function. Otherwise, it is the sum of the first output, divided by `divisor`. `dim` is the
    dimension of the vocabulary in the tensor to which the function is applied.
    """

    def __init__(self, rows: Tensor, function: RowFunction, divisor: Tensor | None = None, dim: int = -1) -> None:
        self.rows, self.function, self.divisor, self.dim = rows, function, divisor, dim
        self.has_gradient = torch.is_grad_enabled()
        # Most losses use all rows in order. Slices of them need no copy.
        self._is_whole = torch.equal(rows, torch.arange(len(rows), dtype=torch.int64, device="cpu"))

    def chunks(self, size: int, places: Tensor | None) -> Iterator[tuple[slice | Tensor, slice | Tensor]]:
        """Yield chunks of the given places, or of all places, and the input's rows of each chunk."""
        count = len(self.rows) if places is None else len(places)
        if count == len(self.rows):
            places = None
        for start in range(0, count, size):
            span = slice(start, min(start + size, count))
            if places is None:
                yield span, span if self._is_whole else self.rows[span]
            else:
                yield places[span], self.rows[places[span]]

    def parts(self, head: Head, places: Tensor | None) -> Iterator[tuple[slice | Tensor, slice | Tensor, Tensor]]:
        """Yield places, the input's rows, and their logits, by the real tensor's products if the function is exact."""
        is_whole = self._is_whole and (places is None or len(places) == len(self.rows))
        if is_whole or not self.function.is_exact:
            for chosen, rows in self.chunks(head.chunk, places):
                yield chosen, rows, head.logits(rows)
            return
        places = torch.arange(len(self.rows), dtype=torch.int64, device="cpu") if places is None else places
        of_places = self.rows[places]
        for start in range(0, len(head.hidden), head.chunk):
            end = start + head.chunk
            inside = ((of_places >= start) & (of_places < end)).nonzero().squeeze(1)
            if len(inside):
                rows = of_places[inside]
                yield places[inside], rows, head.logits(slice(start, end))[rows - start]

    def compute(self, head: Head, needs: tuple[bool, bool, bool]) -> tuple[tuple[Tensor, ...], Gradients | None]:
        """Return the results, and the gradients if any is needed and the result is a scalar."""
        function, divisor, results = self.function, self.divisor, None
        gradients = None
        if divisor is not None and self.has_gradient and any(needs):
            gradients = Gradients.in_forward(head, needs, len(self.rows))
        for places, rows, logits in self.parts(head, function.places):
            outputs = function.outputs(logits, places, gradients is not None)
            if results is None:
                results = tuple(output.new_zeros((len(self.rows), *output.shape[1:])) for output in outputs)
            for whole, output in zip(results, outputs, strict=True):
                whole[places] = output
            if gradients is not None and divisor is not None:
                factors = divisor.reciprocal().expand(len(outputs[0])).contiguous()
                gradients.add(rows, function.gradient(logits, places, factors))
            del logits
        if results is None:
            results = (empty(len(self.rows)).zero_(),)
        return (results if divisor is None else (results[0].sum() / divisor,)), gradients

    def gradients_of(self, head: Head, gradient: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
        """Compute the gradients. The logits of rows that have a gradient are computed again."""
        gradients = Gradients(head, needs, len(self.rows))
        if self.divisor is not None:
            gradient = (gradient / self.divisor).expand(len(self.rows))
        has_one = gradient.ne(0).view(len(gradient), -1).any(1)
        if self.function.places is not None:
            has_one &= torch.zeros_like(has_one).index_fill_(0, self.function.places, True)
        for places, rows, logits in self.parts(head, has_one.nonzero().squeeze(1)):
            gradients.add(rows, self.function.gradient(logits, places, gradient[places].contiguous()))
            del logits
        return gradients

    def by_torch(self, logits: Tensor) -> Tensor:
        """Compute the result from the whole tensor of logits."""
        rows = logits.movedim(self.dim, -1)
        output = self.function.of_tensor(rows.reshape(-1, rows.size(-1)))
        return output if self.divisor is None else output.sum() / self.divisor


class _Chunked(torch.autograd.Function):
    """Applies a plan to lazy logits. The gradient goes directly to their layer, unless a hook may see the logits'."""

    @staticmethod
    def forward(
        ctx: Any, logits: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, leaf: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[1:4]
        outputs, ctx.made = plan.compute(logits.head, (of_hidden, of_weight, of_bias))
        ctx.plan = plan
        # Like torch's layer: save no input if the weight has no gradient, and never the bias.
        ctx.save_for_backward(logits, hidden if of_weight else None, weight if of_hidden else None)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, ctx.needs_input_grad
        logits, *_ = ctx.saved_tensors  # raises as torch does, in a second backward or after a write
        if gradient is None:
            return (None,) * len(needs)
        if is_followed(gradient) or not _is_plain(ctx) or any(map(_is_watched, logits.chain())):
            return gradients_of(ctx, (logits.computed_again(),), (gradient,), lambda: None, plan.by_torch)
        made, ctx.made = ctx.made, None
        if made is None:
            return (None, *plan.gradients_of(logits.head, gradient, needs[1:4]).scaled(None), None, None)
        return (None, *made.scaled(gradient), None, None)


def _is_plain(ctx: Any) -> bool:
    """Whether the running backward pass was started by ``backward()`` without ``inputs``, which returns no gradients.

    `torch.autograd.grad` and ``backward(inputs=...)`` may return the gradient of logits. They reach only leaves that
    they name, and no program can name the extra leaf of each result.
    """
    return reaches(ctx.next_functions[-1][0])


def _is_watched(tensor: Any) -> bool:
    """Whether the program may see the gradient of a tensor, through hooks of the tensor or its node."""
    with as_plain_tensors():
        return tensor.is_watched or tensor.retains_grad or has_tensor_hooks(tensor)


def in_chunks(logits: Any, plan: Plan) -> tuple[Tensor, ...]:
    """Return the results of a plan for lazy logits, in the graph of their layer's input, weight and bias, if any."""
    if not logits.sources:
        return plan.compute(logits.head, (False, False, False))[0]
    return _Chunked.apply(logits, *logits.sources, plan, _LEAF)  # type: ignore[no-any-return, no-untyped-call]
