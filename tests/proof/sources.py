"""The four sources of cases: torch's databases of modules, operators and optimizers, and architectures of transformers.

Each yields families by name, with a function that returns samples, and one that makes a program from a sample.
"""

import zlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from proof.program import Program, in_fp64_too, seed
from proof.stepping import SCENARIOS, Stepping


class Case(NamedTuple):
    """A sample with its name, which starts with its source and its family, and a function that builds its program."""

    name: str
    build: Callable[[], Program]


def hash_of(name):
    """Return a hash that is the same in every process."""
    return zlib.crc32(name.encode())


def families(source):
    """Yield the families of a source by name, each with a function that yields its cases."""
    for name, samples, program in SOURCES[source]():
        yield f"{source}/{name}", partial(_cases, f"{source}/{name}", samples, program)


def _cases(family, samples, program):
    seed(hash_of(family))
    for number, sample in enumerate(samples()):
        yield Case(f"{family}/{number}", partial(_seeded, program, sample))


def _seeded(program, sample):
    seed(0)
    return program(sample)


def _modules():
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            settings = {"requires_grad": True, "training": training}
            samples = partial(info.module_inputs_func, info, "cpu", torch.float32, **settings)
            yield info.name + ("" if training else ".eval"), samples, partial(_module, info, training)


def _module(info, training, sample):
    made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    program = Program(made, tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
    if info.is_lazy:
        with torch.no_grad():
            made(*program.inputs[0], **program.inputs[1])
    return program


class Operator(nn.Module):
    """Calls an operator with the arguments of its sample; tensors that require gradients become parameters."""

    def __init__(self, function, processed, arguments):
        super().__init__()
        self.function, self.processed = function, processed
        self.arguments = tree_map(self._held, arguments)

    def _held(self, value):
        if not torch.is_tensor(value) or not value.requires_grad:
            return value
        self.register_parameter(f"held_{len(self._parameters)}", nn.Parameter(value.detach().clone()))
        return _Held(len(self._parameters) - 1)

    def forward(self):
        """Return the operator's results that get gradients."""
        held = [*self.parameters()]
        given = tree_map(lambda each: held[each] if isinstance(each, _Held) else each, self.arguments)
        return self.processed(self.function(given[0], *given[1], **given[2]))

    def double(self):
        """Convert to double precision, including complex tensors."""
        self.arguments = tree_map(in_fp64_too, self.arguments)
        for name, value in [*self._parameters.items()]:
            setattr(self, name, nn.Parameter(in_fp64_too(value.detach())))
        return self

    def __deepcopy__(self, memo):
        held = [*self.parameters()]  # `arguments` refers to them by index
        copied = tree_map(lambda each: each.clone() if torch.is_tensor(each) else each, self.arguments)
        given = tree_map(lambda each: held[each] if isinstance(each, _Held) else each, copied)
        return Operator(self.function, self.processed, given)


class _Held(int):
    """The index of a parameter."""


def _operators():
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if torch.float32 in info.supported_dtypes("cpu"):
            has_gradients = torch.float32 in info.supported_backward_dtypes("cpu")
            samples = partial(info.sample_inputs, "cpu", torch.float32, requires_grad=has_gradients)
            yield f"{info.name}.{info.variant_test_name}".rstrip("."), samples, partial(_operator, info)


def _operator(info, sample):
    arguments = sample.input, tuple(sample.args), dict(sample.kwargs)
    return Program(Operator(info.op, sample.output_process_fn_grad, arguments))


def _optimizers():
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for flag in ("", *sorted({"foreach", "fused"} & {*info.supported_impls})):
            for scenario in SCENARIOS:
                name = f"{info.optim_cls.__name__}.{scenario}.{flag}".rstrip(".")
                yield name, partial(info.optim_inputs_func, device="cpu"), partial(_stepping, info, flag, scenario)


def _stepping(info, flag, scenario, sample):
    return Stepping(info, {**sample.kwargs, **({flag: True} if flag else {})}, scenario)


def _architectures():
    if find_spec("transformers"):
        from proof.architectures import KINDS, build

        for kind in KINDS:
            yield kind, lambda kind=kind: [kind], build


SOURCES = {
    "modules": _modules,
    "optimizers": _optimizers,
    "operators": _operators,
    "architectures": _architectures,
}
