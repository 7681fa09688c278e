"""Computes linear layers with norms, activations and dropouts between them by one function in C for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.kernels.linear import chain
from nano_loop.kernels.linear.chain import Activation, Buffers, Chain, Layer, Norm, compute
from nano_loop.patching.calls.calls import Call, CallInterceptor
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.torch_private import (
    calls_only_forward,
    has_global_module_hooks,
    in_forward_mode,
    in_functorch,
    in_mode,
    registered_children,
    registered_parameters,
)
from nano_loop.runtime.objects.straight_line import children_in_turn
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.kernel_step import KernelStep
from nano_loop.steps.step import SkipReason

#: Fewest linear layers of a chain: an autograd node in Python takes as long as two of torch's.
_FEWEST_LAYERS = 2
_LINEAR = F.linear
#: Modules of torch that are no container.
_LEAVES = (
    *(nn.Linear, nn.Dropout, nn.BatchNorm1d, nn.LayerNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU),
)


class FastChains(KernelStep):
    """Computes chains of small linear layers in calls of set-up models, each by one function in C, and its backward.

    A chain is in an `nn.Sequential`, or in a module whose `forward` only calls its children in turn. Whatever could
    see a difference gets torch's modules: hooks, modes, autocast, `torch.func`, classes of the user's, frozen weights.
    """

    name = "fast_chains"
    takes_fp32 = True
    kernel = chain.KERNEL
    says = "linear layers and what is between them in C, one function for all"
    calls_torchs_kernels = False
    finds_all = True

    @override
    def begin(self) -> None:
        super().begin()
        self._around: list[CallInterceptor] = []

    @property
    @override
    def enabled(self) -> bool:
        return self.required or (self.options.fast_chains == "auto" and self._is_in_fp32)

    @classmethod
    @override
    def is_for(cls, model: nn.Module) -> bool:
        return any(_line_of(module) is not None for module in model.modules())

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        return super().skip_reason(parts) if self._is_in_fp32 else SkipReason("not_fp32", "it is for fp32")

    @override
    def apply(self, parts: TrainingObjects) -> str:
        for model in parts.models:
            interceptor = self.interceptors.for_model(model, self.name)
            interceptor.around_modules(_line_of, self.name)
            self._around.append(interceptor)
        return super().apply(parts)

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        return [self._until_closed()]

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Have modules called as by torch when the context ends."""
        try:
            yield
        finally:
            for interceptor in self._around:
                interceptor.around_modules(lambda _: None, self.name)
            self._around.clear()


def _line_of(module: nn.Module) -> Call | None:
    """Return what is around the calls of a module, or None if there is no chain in it."""
    if type(module) in _LEAVES:
        return None
    line = Line(module)
    return line if line.has_chains else None


class _Part(NamedTuple):
    """A linear layer, with what is computed of its sums."""

    linear: nn.Linear
    norm: nn.BatchNorm1d | nn.LayerNorm | None
    activation: Activation
    dropout: nn.Dropout | None

    @property
    def statistics(self) -> Buffers:
        """Those that a batch norm updates."""
        if not isinstance(self.norm, nn.BatchNorm1d) or self.norm.running_mean is None:
            return None
        assert self.norm.running_var is not None
        return self.norm.running_mean, self.norm.running_var

    def layer(self, dropped: float) -> Layer:
        """Return what the function has to know, with the probability that a number is dropped."""
        linear, norm = self.linear, self.norm
        of_norm = None if norm is None else Norm.of(norm, linear.out_features)
        has_bias = registered_parameters(linear).get("bias") is not None
        return Layer(linear.in_features, linear.out_features, has_bias, of_norm or Norm(), self.activation, dropped)


class _Segment:
    """Modules of a line that are called one by one, or that one function computes if they are parts.

    Parameters
    ----------
    modules : sequence of torch.nn.Module
        The modules.
    parts : sequence of _Part
        What they are together, or none.
    """

    def __init__(self, modules: Sequence[nn.Module], parts: Sequence[_Part] = ()) -> None:
        self.modules = tuple(modules)
        self.parts = tuple(parts)
        self._with_parameters = [module for part in parts for module in (part.linear, part.norm) if module is not None]
        self._dropouts = [part.dropout for part in parts]
        self._batch_norms = [part.norm for part in parts if isinstance(part.norm, nn.BatchNorm1d)]
        self._chains: dict[tuple[float, ...], Chain] = {}  # by the probabilities of the dropouts

    def __call__(self, x: Any) -> Any:
        """Pass a value through the modules."""
        computed = self._computed(x) if self.parts and type(x) is Tensor else None
        if computed is not None:
            return computed
        for module in self.modules:
            x = module(x)
        return x

    def _computed(self, x: Tensor) -> Tensor | None:
        """Compute by the function, or return None where torch has to compute."""
        parameters: list[Tensor] = []
        is_trained = torch.is_grad_enabled()
        for module in self._with_parameters:
            for parameter in registered_parameters(module).values():
                if parameter is None:
                    continue
                if type(parameter) is not nn.Parameter or (is_trained and not parameter.requires_grad):
                    return None
                parameters.append(parameter)
        chain = self._chain()
        if len(parameters) != len(chain.shapes) or not all(norm.training for norm in self._batch_norms):
            return None
        buffers = [part.statistics for part in self.parts] if self._batch_norms else ()
        computed = compute(chain, x, parameters, buffers)
        if computed is not None:
            for norm in self._batch_norms:
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
        return computed

    def _chain(self) -> Chain:
        """Return the layers with the dropouts that are in force now."""
        key = tuple([0.0 if dropout is None or not dropout.training else dropout.p for dropout in self._dropouts])
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = Chain(tuple(map(_Part.layer, self.parts, key)))
        return chain


class Line:
    """The modules that a call passes its argument through, of which some make chains.

    Parameters
    ----------
    module : torch.nn.Module
        The module that calls them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._children: dict[nn.Module, tuple[nn.Module | None, ...]] = {}
        self._segments = tuple(_segments([*self._flattened(module)]))
        chained = [module for segment in self._segments if segment.parts for module in segment.modules]
        self._called = (*self._children, *dict.fromkeys(chained))
        self._forwards = {type(module): type(module).forward for module in self._called}

    @property
    def has_chains(self) -> bool:
        """Whether anything of it is computed by the function."""
        return any(segment.parts for segment in self._segments)

    def __call__(self, function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in a place of `CallInterceptor.around_modules`."""
        if kwargs or len(args) != 1 or not self._is_plain(args[0]):
            return function(module, *args, **kwargs)
        x = args[0]
        for segment in self._segments:
            x = segment(x)
        return x

    def _flattened(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules; for those that only call others in turn, the others."""
        children = None if type(module) in _LEAVES or module in self._children else children_in_turn(module)
        if children is None:
            yield module
            return
        self._children[module] = registered_children(module)
        for child in children:
            yield from self._flattened(child)

    def _is_plain(self, x: Any) -> bool:
        """Whether nothing sees a difference to torch: hooks, modes, transforms, other modules."""
        if type(x) is not Tensor or is_exporting() or in_functorch() or in_mode() or in_forward_mode():
            return False
        if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or has_global_module_hooks():
            return False
        if F.linear is not _LINEAR or any(kind.forward is not own for kind, own in self._forwards.items()):
            return False
        if not all(map(calls_only_forward, self._called)):
            return False
        return all([registered_children(module) == children for module, children in self._children.items()])


def _segments(modules: Sequence[nn.Module]) -> Iterator[_Segment]:
    """Divide modules into those that make chains, and others."""
    others: list[nn.Module] = []
    at = 0
    while at < len(modules):
        parts, end = _parts(modules, at)
        if len(parts) < _FEWEST_LAYERS:
            others.append(modules[at])
            at += 1
            continue
        if others:
            yield _Segment(others)
        others = []
        yield _Segment(modules[at:end], parts)
        at = end
    if others:
        yield _Segment(others)


def _parts(modules: Sequence[nn.Module], at: int) -> tuple[list[_Part], int]:
    """Return the parts of the chain that begins at a place, and the place behind it."""
    parts: list[_Part] = []
    while at < len(modules) and type(modules[at]) is nn.Linear:
        linear: Any = modules[at]
        if parts and parts[-1].linear.out_features != linear.in_features:
            break
        norm, activation, dropout, at = _behind(modules, at + 1, linear.out_features)
        parts.append(_Part(linear, norm, activation, dropout))
    return parts, at


def _behind(modules: Sequence[nn.Module], at: int, size: int) -> tuple[Any, Activation, Any, int]:
    """Return the norm, the activation and the dropout that begin at a place, and the place behind them."""
    norm: Any = modules[at] if at < len(modules) and Norm.of(modules[at], size) else None
    at += norm is not None
    activation = Activation.of(modules[at]) if at < len(modules) else None
    at += activation is not None
    dropout: Any = modules[at] if at < len(modules) and type(modules[at]) is nn.Dropout else None
    return norm, activation or Activation(), dropout, at + (dropout is not None)
