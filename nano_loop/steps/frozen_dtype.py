"""Stores frozen weights, such as those beside an adapter, only in bf16: ``frozen_dtype="bf16"``."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.kernels.narrow_weight import NarrowWeight, Scratch, can_be_narrowed, made_plain, narrowed
from nano_loop.patching.calls.calls import Call, CallWrapper
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.members import parameters_of
from nano_loop.precision.autocast.frozen_weights import FEWEST, is_frozen
from nano_loop.runtime.objects.report import size
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.allocator import give_back, trim
from nano_loop.steps.step import Step


class FrozenDtype(Step):
    """Frees the fp32 values of frozen weights, one by one. After the run they have the rounded values in fp32.

    Weights with shared memory are unchanged. One that the program writes to is fp32 from then on, unless bf16
    represents it.
    """

    name = "frozen_dtype"

    @override
    def begin(self) -> None:
        self._is_used = False

    @property
    @override
    def enabled(self) -> bool:
        return self.options.frozen_dtype == "bf16"

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self.options.use_ipex or self.options.compile or self.options.kind.parameters is not None:
            expected = "it needs weights in fp32 that neither IPEX nor torch.compile reads"
            raise self._error(expected, 'pass precision="auto" without these')
        freed, left, scratch = 0, 0, Scratch()
        for model in parts.models:
            # Start with the smallest, so that the largest is copied after memory was freed.
            frozen = sorted(filter(is_frozen, parameters_of(model)), key=lambda weight: weight.numel())
            self._is_used |= bool(frozen) or any(isinstance(weight, NarrowWeight) for weight in parameters_of(model))
            narrow: list[nn.Parameter] = []
            undone_with(model, self.undoing).callback(_restore, narrow)
            for weight in frozen:
                if can_be_narrowed(weight) and narrowed(weight, scratch):
                    narrow.append(weight)
                else:
                    left += 1
            freed += sum(weight.numel() for weight in narrow) * 2
            self.interceptors.add(model, self.name, _narrow_again(narrow))
        if not self._is_used:
            names = ", ".join(map(class_name, parts.models))
            expected = f"no weight of {names} is fp32, has {FEWEST:,} elements or more, and requires_grad=False"
            raise self._error(expected, "freeze weights before the setup")
        trim()
        # Undone first, so that the activations' memory is returned before weights become fp32.
        self.undoing.callback(trim)
        self.undoing.callback(give_back)
        others = f"; {left} others unchanged, since their memory is shared" if left else ""
        return f"frozen weights in bf16, {size(freed)} freed{others}"

    def _error(self, expected: str, hint: str) -> NanoConfigError:
        got = self.options.as_written[self.name]
        return NanoConfigError(error_message(got, expected, f'Omit it, which means "32", or {hint}'))


def _restore(weights: list[nn.Parameter]) -> None:
    while weights:  # so that each is freed, if unreferenced, before the next is in fp32
        weight = weights.pop()
        if isinstance(weight, NarrowWeight):
            made_plain(weight)


def _narrow_again(weights: list[nn.Parameter]) -> CallWrapper:
    """Return a wrapper around calls of a model that first replaces fp32 values that were only read by bf16 ones."""

    def layer(call: Call) -> Call:
        def with_narrow(function: Call, /, *args: object, **kwargs: object) -> object:
            for weight in weights:
                if isinstance(weight, NarrowWeight):
                    weight.numbers.narrow_again()
            return call(function, *args, **kwargs)

        return with_narrow

    return layer
