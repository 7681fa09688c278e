"""Runs one training loop plain, by hand and accelerated, and holds what comes out against each other."""

import atexit
import contextlib
import functools
import importlib.metadata
import random
import warnings
from dataclasses import dataclass, field, replace

import numpy
import pytest
import torch
from distributed.team import Team
from torch import nn
from torch.utils.data import DataLoader

import nano_loop

from .nested import differences, mapped
from .records import laid_otherwise, record, record_strides, surroundings

# What later versions may switch on by themselves with reduced precision, and what changes numerics then.
SAME_NUMERICS = {"fast_dropout": False, "fast_attention": False, "fast_convolution": False}


@dataclass(frozen=True)
class Config:
    """One way to accelerate a loop, and how near it must come to the loop that does the same by hand."""

    name: str
    options: dict = field(default_factory=dict)
    tolerance: float = 0.0  # relative to each tensor's largest value; 0 is bit for bit
    subclass: bool = False  # through TorchNano.setup where the arguments allow it, else the decorator
    raises: bool = False  # the loop ends by raising, which must leave as little behind as returning

    @property
    def bf16(self):
        return self.options.get("precision") == "bf16"

    @property
    def channels_last(self):
        return self.options.get("channels_last", False)


# Without the fused optimizers no step changes a number, so equality is exact, also under bf16. By hand, the weights
# are channels_last too, and so are copies of the model; ours are not, and a sum in another order differs by 1e-7.
EXACT = Config("exact", {"fused_optimizer": False})
FUSED = Config("fused", {}, tolerance=1e-5, subclass=True, raises=True)
BF16 = Config("bf16", {"precision": "bf16", "fused_optimizer": False, **SAME_NUMERICS}, raises=True)
NHWC = Config("channels_last", {"channels_last": True, "fused_optimizer": False}, tolerance=1e-6)
NHWC_FUSED = replace(FUSED, name="channels_last-fused", options={"channels_last": True})
NHWC_BF16 = Config("channels_last-bf16", {**BF16.options, "channels_last": True}, tolerance=1e-6, subclass=True)

# With IPEX the loop by hand runs its kernels too, for the accelerated loop is run first, and they stay registered. So
# it is also held against the loop by hand in a process without them, as near as sums in another order come.
IPEX = Config("ipex", {"use_ipex": True, "fused_optimizer": False}, raises=True)
IPEX_BF16 = Config("ipex-bf16", {**BF16.options, "use_ipex": True}, subclass=True)
IPEX_NHWC_BF16 = replace(NHWC_BF16, name="ipex-channels_last-bf16", options={**NHWC_BF16.options, "use_ipex": True})


def has_ipex():
    """Whether this is the environment that `make test-ipex` sets up."""
    names = {each.name for each in importlib.metadata.distributions()}
    return "intel-extension-for-pytorch" in {str(name).lower().replace("_", "-") for name in names}


WITH_IPEX = (IPEX, IPEX_BF16) if has_ipex() else ()
if WITH_IPEX:
    torch.compile(repr, backend="eager")  # wraps methods of optimizers, once, as importing IPEX does
ALL = (EXACT, FUSED, BF16, *WITH_IPEX)
CONVOLUTIONS = (*ALL, NHWC, NHWC_FUSED, NHWC_BF16, *((IPEX_NHWC_BF16,) if WITH_IPEX else ()))


OF_IPEX = {False: 1e-5, True: 0.02}  # relative to each tensor's largest value, in fp32 and in bf16


class FinishedError(Exception):
    """Raised at a loop's end, carrying its result."""


def untouched(call):
    """What the plain and the accelerated loop have around each call into the model: nothing."""
    return call


def written_by_hand(config):
    """What a person would write around each call into the model to have what `config` asks for."""

    def around(call):
        @functools.wraps(call)
        def run(*args, **kwargs):
            if config.channels_last:
                args, kwargs = mapped((args, kwargs), in_channels_last)
            bf16 = torch.autocast("cpu", torch.bfloat16) if config.bf16 else contextlib.nullcontext()
            with bf16:
                out = call(*args, **kwargs)
            return mapped(out, in_fp32) if config.bf16 else out

        return run if config.bf16 or config.channels_last else call

    return around


def in_channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def in_fp32(tensor):
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def pair(*builds, configs=ALL):
    """
    Turn a loop into a test that it does the same plain and accelerated.

    Each of `builds` gives a new dict of the loop's arguments, the same for the same seed. The loop takes them
    by name, and `by_hand`, which it puts around its calls into the model; it returns what is worth comparing.
    """
    cases = [pytest.param(build, config, id=case_id(build, config)) for build in builds for config in configs]

    def decorate(loop):
        @pytest.mark.parametrize(("build", "config"), cases)
        def test(build, config):
            check(build, loop, config)

        test.__name__ = loop.__name__
        test.__doc__ = loop.__doc__
        test.__module__ = loop.__module__
        return test

    return decorate


def case_id(build, config):
    return "-".join(filter(None, (getattr(build, "name", ""), config.name)))


def check(build, loop, config):
    """Fail with every difference between the loop accelerated and the loop by hand."""
    actual, threads = run_accelerated(build, loop, config)
    with computing_with(threads):
        expected = run_plain(build, loop, written_by_hand(config), config.channels_last)
        plain = run_plain(build, loop) if config.channels_last else expected
    found = [
        *differences(actual["seen"], expected["seen"], config.tolerance),
        *without_ipex(actual["seen"], build, loop, config, threads),
        *differences(actual["strides"], plain["strides"], path="strides"),
        *(f"state laid out unlike its parameter: {place}" for place in actual["unlike"] - plain["unlike"]),
        *differences(actual["random"], expected["random"], path="random"),
    ]
    assert not found, "\n".join(found)


def without_ipex(actual, build, loop, config, threads):
    """Differences to the loop by hand in a process that never imports IPEX."""
    if not config.options.get("use_ipex"):
        return
    (expected,) = process_without_ipex()(seen_there, build, loop, config, threads)
    yield from differences(actual, expected, OF_IPEX[config.bf16], path="without IPEX")


def seen_there(_, build, loop, config, threads):
    with computing_with(threads):
        return run_plain(build, loop, written_by_hand(config), config.channels_last)["seen"]


@functools.cache
def process_without_ipex():
    team = Team(1)
    atexit.register(team.close)
    return team


def run_plain(build, loop, by_hand=untouched, channels_last=False):
    arguments = built(build)
    for model in filter(is_model, arguments.values()):
        if channels_last:
            model.to(memory_format=torch.channels_last)
    return outcome(arguments, loop(**arguments, by_hand=by_hand))


def run_accelerated(build, loop, config):
    """The outcome, and the number of threads the loop had. Fails when the run left anything behind."""
    arguments = built(build)
    threads = []

    @functools.wraps(loop)
    def watched(*args, **kwargs):
        threads.append(torch.get_num_threads())
        result = loop(*args, **kwargs)
        if config.raises:
            raise FinishedError(result)
        return result

    by_setup = config.subclass and can_be_set_up(arguments)
    launch = accelerated_by_setup if by_setup else accelerated_by_decorator
    with slow_bf16_is_fine(), left_as_found():
        try:
            result = launch(watched, dict(arguments), {"verbose": False, **config.options})
            assert not config.raises, "an exception of the loop was swallowed"
        except FinishedError as finished:
            result = finished.args[0]
    return outcome(arguments, result), threads[0]


def accelerated_by_decorator(loop, arguments, options):
    return nano_loop.nano(**options)(loop)(**arguments)


def accelerated_by_setup(loop, arguments, options):
    class Loop(nano_loop.TorchNano):
        def train(self):
            loaders = {k: v for k, v in arguments.items() if isinstance(v, DataLoader)}
            for model in filter(is_model, arguments.values()):
                optimizers = optimizers_of(model, arguments)
                optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
                same_model, same_optimizer, *rest = self.setup(model, optimizer, *loaders.values())
                assert same_model is model
                assert same_optimizer == optimizer
                arguments.update(zip(loaders, rest[0] if len(loaders) > 1 else rest, strict=True))
                loaders = {}
            return loop(**arguments)

    return Loop(**options).train()


def can_be_set_up(arguments):
    models = [a for a in arguments.values() if is_model(a)]
    return bool(models) and all(optimizers_of(model, arguments) for model in models)


def optimizers_of(model, arguments):
    own = set(model.parameters())
    optimizers = [a for a in arguments.values() if isinstance(a, torch.optim.Optimizer)]
    return [o for o in optimizers if any(p in own for group in o.param_groups for p in group["params"])]


def is_model(value):
    return isinstance(value, nn.Module) and any(True for _ in value.parameters())


def built(build):
    """New arguments; the random generators then stand where they always stand at a loop's start."""
    seed_all(0)
    arguments = build()
    seed_all(1)
    return arguments


def seed_all(seed):
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also notes the stack, for CUDA
    random.seed(seed)
    numpy.random.seed(seed)


def outcome(arguments, result):
    generators = [torch.get_rng_state(), repr(random.getstate()), numpy.random.get_state()[1].tobytes()]
    seen = {"result": result, **record(arguments)}
    layouts = {"strides": record_strides(arguments), "unlike": laid_otherwise(arguments)}
    return {"seen": seen, "random": generators, **layouts}


@contextlib.contextmanager
def computing_with(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def slow_bf16_is_fine():
    """On a CPU without bf16 instructions the run warns that it will be slow, rightly."""
    with warnings.catch_warnings():
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            warnings.simplefilter("ignore", nano_loop.NanoWarning)
        yield


@contextlib.contextmanager
def left_as_found():
    before = surroundings()
    yield
    found = [*differences(surroundings(), before, path="process")]
    assert not found, "\n".join(found)


def named(name, build):
    """`build` with the name that its tests carry."""
    named_build = functools.partial(build)
    named_build.name = name
    return named_build
