"""Computes linear layers with norms, activations and dropouts between them by one function in C for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.kernels.linear import chain
from nano_loop.kernels.linear.chain import Chain, compute
from nano_loop.kernels.linear.chain_layers import Activation, ChainLayer, Norm
from nano_loop.patching.calls.calls import Call, CallInterceptor
from nano_loop.patching.calls.exports import is_exporting
from nano_loop.patching.torch_private import (
    calls_only_forward,
    has_global_module_hooks,
    in_functorch,
    in_mode,
    registered_children,
    registered_parameters,
)
from nano_loop.patching.torch_private_autograd import in_forward_mode
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
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.SiLU),
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
    """Return the wrapper of the calls of a module, or None if there is no chain in it."""
    if type(module) in _LEAVES:
        return None
    line = Line(module)
    return line if line.has_chains else None


class _Part(NamedTuple):
    """A linear layer, with what is computed of its sums. Modules are numbers of a line."""

    linear: int
    norm: int | None
    activation: Activation
    dropout: int | None

    def layer(self, modules: Sequence[Any], dropped: float) -> ChainLayer:
        """Return what the function has to know, with the probability that a number is dropped."""
        linear, norm = modules[self.linear], None if self.norm is None else modules[self.norm]
        of_norm = None if norm is None else Norm.of(norm, linear.out_features)
        has_bias = linear.bias is not None
        return ChainLayer(
            linear.in_features, linear.out_features, has_bias, of_norm or Norm(), self.activation, dropped
        )


class _Segment:
    """Modules of a line that are called one by one, or that one function computes if they are parts.

    Parameters
    ----------
    begin, end : int
        The numbers of the first module, and behind the last one.
    parts : sequence of _Part
        What they are together, or none.
    batch_norms : sequence of int or None
        Of each part, the number of its norm if that is a batch norm.
    """

    def __init__(
        self, begin: int, end: int, parts: Sequence[_Part] = (), batch_norms: Sequence[int | None] = ()
    ) -> None:
        self.modules = slice(begin, end)
        self.parts = tuple(parts)
        self._with_parameters = [at for part in parts for at in (part.linear, part.norm) if at is not None]
        self._dropouts = [part.dropout for part in parts]
        self._batch_norms = batch_norms
        self._has_batch_norms = any(at is not None for at in batch_norms)
        self._chains: dict[tuple[float, ...], Chain] = {}  # by the probabilities of the dropouts

    def __call__(self, modules: Sequence[Any], x: Any) -> Any:
        """Pass a value through the modules."""
        computed = self._computed(modules, x) if self.parts and type(x) is Tensor else None
        if computed is not None:
            return computed
        for module in modules[self.modules]:
            x = module(x)
        return x

    def _computed(self, modules: Sequence[Any], x: Tensor) -> Tensor | None:
        """Compute by the function, or return None where torch has to compute."""
        parameters: list[Tensor] = []
        is_trained = torch.is_grad_enabled()
        for at in self._with_parameters:
            for parameter in registered_parameters(modules[at]).values():
                if parameter is None:
                    continue
                if type(parameter) is not nn.Parameter or (is_trained and not parameter.requires_grad):
                    return None
                parameters.append(parameter)
        chain = self._chain(modules)
        if len(parameters) != len(chain.shapes):
            return None
        if not self._has_batch_norms:
            return compute(chain, x, parameters, ())
        norms = [None if at is None else modules[at] for at in self._batch_norms]
        if not all(norm.training for norm in norms if norm is not None):
            return None
        buffers = [
            None if norm is None or norm.running_mean is None else (norm.running_mean, norm.running_var)
            for norm in norms
        ]
        computed = compute(chain, x, parameters, buffers)
        for norm in norms:
            if computed is not None and norm is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
        return computed

    def _chain(self, modules: Sequence[Any]) -> Chain:
        """Return the layers with the dropouts that are in force now."""
        key = tuple([0.0 if at is None or not modules[at].training else modules[at].p for at in self._dropouts])
        chain = self._chains.get(key)
        if chain is None:
            layers = [part.layer(modules, dropped) for part, dropped in zip(self.parts, key, strict=True)]
            chain = self._chains[key] = Chain(layers)
        return chain


class Line:
    """The modules that a call passes its argument through, of which some make chains. It keeps none of them alive.

    Parameters
    ----------
    module : torch.nn.Module
        The module that calls them.
    """

    def __init__(self, module: nn.Module) -> None:
        containers: list[nn.Module] = []
        modules = [*_flattened(module, containers)]
        self._segments = tuple(_segments(modules))
        self._modules = [weakref.ref(module) for module in modules]
        self._containers = [
            (weakref.ref(container), [weakref.ref(child) for child in container.children()]) for container in containers
        ]
        called = [
            *containers,
            *(module for segment in self._segments if segment.parts for module in modules[segment.modules]),
        ]
        self._called = [weakref.ref(module) for module in dict.fromkeys(called)]
        self._forwards = {type(module): type(module).forward for module in called}

    @property
    def has_chains(self) -> bool:
        """Whether anything of it is computed by the function."""
        return any(segment.parts for segment in self._segments)

    def __call__(self, function: Call, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in a place of `CallInterceptor.around_modules`."""
        if kwargs or len(args) != 1 or not self._is_plain(args[0]):
            return function(module, *args, **kwargs)
        x, modules = args[0], [reference() for reference in self._modules]
        for segment in self._segments:
            x = segment(modules, x)
        return x

    def _is_plain(self, x: Any) -> bool:
        """Whether nothing sees a difference to torch: hooks, modes, transforms, other modules."""
        if type(x) is not Tensor or is_exporting() or in_functorch() or in_mode() or in_forward_mode():
            return False
        if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or has_global_module_hooks():
            return False
        if F.linear is not _LINEAR or any(kind.forward is not own for kind, own in self._forwards.items()):
            return False
        for reference in self._called:
            called = reference()
            if called is None or not calls_only_forward(called):
                return False
        for reference, children in self._containers:
            container = reference()
            if container is None or registered_children(container) != tuple([child() for child in children]):
                return False
        return True


def _flattened(module: nn.Module, containers: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that a call goes through; add those that only call others in turn to `containers`."""
    children = None if type(module) in _LEAVES or module in containers else children_in_turn(module)
    if children is None or None in registered_children(module):
        yield module
        return
    containers.append(module)
    for child in children:
        yield from _flattened(child, containers)


def _segments(modules: Sequence[nn.Module]) -> Iterator[_Segment]:
    """Divide modules into those that make chains, and others."""
    at = begin = 0
    while at < len(modules):
        parts, end = _parts(modules, at)
        if len(parts) < _FEWEST_LAYERS:
            at += 1
            continue
        if begin < at:
            yield _Segment(begin, at)
        norms = [part.norm for part in parts]
        yield _Segment(at, end, parts, [at if at and type(modules[at]) is nn.BatchNorm1d else None for at in norms])
        at = begin = end
    if begin < at:
        yield _Segment(begin, at)


def _parts(modules: Sequence[nn.Module], at: int) -> tuple[list[_Part], int]:
    """Return the parts of the chain that begins at a place, and the place behind it."""
    parts: list[_Part] = []
    width: int | None = None
    while at < len(modules) and type(modules[at]) is nn.Linear:
        linear: Any = modules[at]
        if width not in (None, linear.in_features):
            break
        width, first = linear.out_features, at
        norm = at + 1 if at + 1 < len(modules) and Norm.of(modules[at + 1], linear.out_features) else None
        at += 1 if norm is None else 2
        activation = Activation.of(modules[at]) if at < len(modules) else None
        at += activation is not None
        dropout = at if at < len(modules) and type(modules[at]) is nn.Dropout else None
        at += dropout is not None
        parts.append(_Part(first, norm, activation or Activation(), dropout))
    return parts, at
