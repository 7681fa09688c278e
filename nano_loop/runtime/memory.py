"""Measures the peak memory of training for the report, and raises an error in the first step if it would not fit.

The error prevents the kernel from killing the process without a message.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.config.options import Options
from nano_loop.cpu import memory_left, peak_memory, resident_memory
from nano_loop.cpu.tree import Tree
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, NanoMemoryError, error_message
from nano_loop.patching.calls.calls import Call, CallInterceptors
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import buffers_of, named_parameters_of
from nano_loop.patching.optimizers import around_closure, held_by
from nano_loop.patching.walk import find
from nano_loop.runtime.clock import StepClock
from nano_loop.runtime.objects.report import StepResult, size
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.runtime.state_sizes import bytes_of_coming_states, bytes_of_states, bytes_of_temporaries, bytes_of_tensor
from nano_loop.steps.allocator import give_back, trim

_NAME = "memory"
_FULL = 0.95  # fraction of the limit above which a first step is stopped
#: Fraction of the cgroup's limit. A heap that keeps freed memory grows to 1.6 times the memory in use, since glibc's
#: aligned blocks do not fit where such blocks were. If the prediction exceeds this fraction, freed large blocks are
#: returned to the system, which makes the prediction hold. With `memory_limit`, they always are.
_TIGHT = 0.5
_MUCH = 0.25  # fraction of the peak above which the report names its largest part
_SHOWN = 4  # number of the largest tensors that an error shows
_BEFORE, _ACTIVATIONS = "libraries and data", "activations"
_CGROUP = "the cgroup"
#: What to do about the largest part.
_HINTS = {
    "parameters": "Use a smaller model",
    "gradients": "Train fewer of the parameters",
    "states of optimizers": "Use an optimizer with fewer states, or train fewer of the parameters",
    _ACTIVATIONS: "Use a smaller batch, shorter sequences or activation checkpointing",
}


class MemoryUse(NamedTuple):
    """The memory of a process that has trained, in bytes: the peak so far, and its known parts.

    The peak is predicted in the first step, unless nothing limits the memory.
    """

    peak: int
    predicted: int | None
    parts: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return self._asdict()

    def __str__(self) -> str:
        return "\n".join(f"{size(count):>10}  {name}" for name, count in self.parts.items())


class _Limit(NamedTuple):
    """The maximum resident memory that this process may use, and the source of this limit."""

    most: float
    source: str


class MemoryWatch:
    """Observes the memory of one run: from a setup until each optimizer has stepped, if there is a limit.

    The resident memory is read after each call of a module in training, and before the backward of its outputs.
    """

    def __init__(self, options: Options, ranks: Ranks, clock: StepClock, interceptors: CallInterceptors) -> None:
        self._options, self._ranks = options, ranks
        self._clock, self._interceptors = clock, interceptors
        self._models: Any = WeakIdKeyDictionary()
        self._parts = dict.fromkeys((_BEFORE, *_HINTS), 0)
        self._tensors: dict[str, int] = {}  # the sizes of the largest ones in bytes
        self._outputs: dict[tuple[Any, ...], str] = {}  # names of modules, by dtype and shape of the output
        self._predicted: int | None = None
        self._limit: _Limit | None = None
        self._most = 0  # the maximum in the first step
        self._peak_before = 0
        self._stop: list[Callable[[], object]] = []  # ends the observation of the first step

    def add(self, parts: TrainingObjects) -> None:
        """Observe the first step of everything that one `setup` has set up."""
        for model in [model for model in parts.models if model not in self._models]:
            self._models[model] = None
            tensors = {name: bytes_of_tensor(tensor) for name, tensor in named_parameters_of(model)}
            self._tensors |= tensors
            self._parts["parameters"] += sum(tensors.values()) + sum(map(bytes_of_tensor, buffers_of(model)))
        self._tensors = dict(heapq.nlargest(_SHOWN, self._tensors.items(), key=lambda item: item[1]))
        if not parts.optimizers or not self._models:
            return
        self._limit = None if resident_memory() is None else self._read_limit()
        if self._limit is not None:
            trim()  # memory that was freed before, as by an earlier run, is available
        # A run may continue one that has left gradients and states.
        own = self._parts["parameters"] + self._gradients() + self._states()
        self._parts[_BEFORE] = self._parts[_BEFORE] or max((resident_memory() or 0) - own, 0)
        if not self._stop:
            self._stop.append(self._clock.before(self._before_step))
        self._clock.in_steps(len(parts.optimizers), self._end_first_step)
        if self._limit is not None:
            self._watch()

    def final_result(self) -> StepResult | None:
        """Return the peak of this process and its largest part; None if nothing has trained."""
        if not self._clock.steps:
            return None
        peak = peak_memory()
        known = sum(self._parts.values()) - self._parts[_ACTIVATIONS]
        self._parts[_ACTIVATIONS] = max(peak - known, 0)
        largest = max(self._parts, key=lambda name: self._parts[name])
        count = self._parts[largest]
        of_this = f", of which {size(count)} {largest}" if count > _MUCH * peak else ""
        return StepResult(
            _NAME, "measured", f"peak {size(peak)}{of_this}", MemoryUse(peak, self._predicted, {**self._parts})
        )

    def explain(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Raise a `NanoMemoryError` instead of torch's out-of-memory error. For `ExitStack.push`."""
        is_own = isinstance(error, NanoError)  # of another rank
        if isinstance(error, RuntimeError) and not is_own and "DefaultCPUAllocator" in str(error):
            raise self._error(" ".join(str(error).split()), self._read_limit()) from error

    # --- the first step ---

    def _watch(self) -> None:
        self._most = self._peak_before = 0
        for model in [*self._models]:
            names = {id(module): name for name, module in nn.Module.named_modules(model)}
            interceptor = self._interceptors.for_model(model, _NAME)
            interceptor.around_modules(partial(self._around, names), _NAME)
            self._stop.append(partial(interceptor.around_modules, lambda module: None, _NAME))
        self._stop.append(partial(self._interceptors.release, _NAME))

    def _around(self, names: dict[int, str], module: nn.Module) -> Call:
        """Return a wrapper for the calls of one module in the first step."""
        name = " ".join(filter(None, (names.get(id(module)), f"({class_name(module)})")))

        def asking(function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            is_training = module.training and torch.is_grad_enabled()
            if is_training and not self._peak_before:
                self._peak_before = peak_memory()
            outputs = function(module, *args, **kwargs)
            if is_training and self._stop:
                # Tensors of other classes, such as lazy logits, may have no memory.
                for tensor in [tensor for tensor in find(Tensor, outputs) if type(tensor) is Tensor]:
                    self._outputs.setdefault((tensor.dtype, *tensor.shape), name)
                    if tensor.grad_fn is not None:
                        tensor.grad_fn.register_prehook(partial(self._ask, f"the backward of {name}"))
                self._ask(f"the forward of {name}")
            return outputs

        return asking

    def _ask(self, where: str, *_: object) -> None:
        """Raise if the process uses nearly all the memory that it may. Also a hook of autograd nodes."""
        now = resident_memory()
        if not self._stop or now is None:
            return
        if self._limit is not None and now > _FULL * self._limit.most:
            trim()
            now = resident_memory() or now
            self._limit = self._read_limit()  # other processes may have ended since
            if self._limit is not None and now > _FULL * self._limit.most:
                raise self._error(f"{where} raises this process's memory to {size(now)} in the first step", self._limit)
        self._most = max(self._most, now)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Predict the peak once there are gradients: in a step with a closure, after the closure."""
        return around_closure(args, kwargs, lambda: None, self._predict)

    def _predict(self) -> None:
        """Predict the peak, which includes the optimizers' states that the first step creates."""
        self._parts["gradients"] = self._gradients()
        limit = self._limit and self._read_limit()
        # torch creates states in the dtype of the parameters, which is fp32 in steps that widen bf16 ones.
        are_widened = self._options.kind.parameters is torch.bfloat16 and self._options.optimizer_state != "bf16"
        dtype = torch.float32 if are_widened else None
        coming = sum(bytes_of_coming_states(optimizer, dtype) for optimizer in self._clock.optimizers)
        self._parts["states of optimizers"] = coming + self._states()
        now, peak = resident_memory(), peak_memory()
        if limit is None or now is None:
            return
        self._most = peak if peak > self._peak_before else max(self._most, now)
        if self._options.kind.parameters is torch.bfloat16:
            # At the end of the run, weights and gradients become fp32, and the rests of split weights are freed.
            self._most = max(self._most, now + self._parts["gradients"])
        # Measurements of the tuner need memory for one more result and its gradient.
        again = 2 * max(map(_bytes_of, self._outputs), default=0) if self._options.tune_operators else 0
        # A step's temporary tensors are in the memory of activations, which are freed by then, if there is enough.
        in_step = sum(self._parts.values())
        in_step += max(map(bytes_of_temporaries, self._clock.optimizers), default=0)
        self._predicted = max(self._most + coming + again, in_step)
        if self._predicted > limit.most:
            raise self._error(f"a training step is predicted to take {size(self._predicted)}", limit)

    def _end_first_step(self) -> None:
        """Stop observing the first step."""
        stop, self._stop = self._stop, []
        for function in stop:
            function()
        if self._limit is not None and self._predicted is not None:
            is_asked_for = self._options.memory_limit is not None
            if is_asked_for or self._predicted > _TIGHT * self._limit.most:
                give_back()
        self._outputs.clear()
        self._parts["states of optimizers"] = self._states()

    def _gradients(self) -> int:
        parameters = [parameter for optimizer in self._clock.optimizers for parameter in held_by(optimizer)]
        gradients = {id(parameter): parameter.grad for parameter in parameters}
        return sum(bytes_of_tensor(gradient) for gradient in gradients.values() if gradient is not None)

    def _states(self) -> int:
        return sum(map(bytes_of_states, self._clock.optimizers))

    # --- limits and words ---

    def _read_limit(self) -> _Limit | None:
        """Return the lower one of the option and the cgroup's limit, divided by the number of processes."""
        limits = []
        if self._options.memory_limit is not None:
            most: Any = self._options.memory_limit  # validated, so it is a number here
            limits.append(_Limit(most / self._ranks.size, self._options.as_written["memory_limit"]))
        left = memory_left(Tree("/")).get("the cgroup")
        if left is not None:
            limits.append(_Limit((resident_memory() or 0) + left / self._ranks.local_size, _CGROUP))
        return min(limits, default=None)

    def _error(self, got: str, limit: _Limit | None) -> NanoMemoryError:
        """Return the error, with the largest parts and tensors and with advice."""
        parts = self._parts | {"gradients": self._gradients(), _ACTIVATIONS: 0}
        parts[_ACTIVATIONS] = max((resident_memory() or 0) - sum(parts.values()), sum(map(_bytes_of, self._outputs)))
        outputs = {f"output of {name}": _bytes_of(kind) for kind, name in self._outputs.items()}
        tensors = heapq.nlargest(_SHOWN, (self._tensors | outputs).items(), key=lambda item: item[1])
        allowed = "no memory is left" if limit is None else f"{limit.source} allows this process {size(limit.most)}"
        if self._ranks.size > 1 and limit is not None:
            allowed += f", one of {self._ranks.size}"
        expected = f"{allowed}; the parts are {_listed(parts.items())}"
        expected += f"; the largest tensors are {_listed(tensors)}" if tensors else ""
        more = "give the process more memory" if limit is None or limit.source == _CGROUP else "raise memory_limit"
        is_too_low = limit is not None and parts[_BEFORE] > limit.most  # even without the model
        hint = more.capitalize() if is_too_low else f"{_HINTS[max(_HINTS, key=parts.__getitem__)]}, or {more}"
        self._most = self._peak_before = 0  # the program may try again with a smaller batch
        self._outputs.clear()
        return NanoMemoryError(error_message(got, expected, hint))


def _listed(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in sizes if count)


def _bytes_of(kind: tuple[Any, ...]) -> int:
    """Return the bytes of a tensor by its dtype and shape."""
    return bytes_of_tensor(torch.empty(kind[1:], dtype=kind[0], device="meta"))
