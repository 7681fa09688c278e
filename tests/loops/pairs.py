"""Runs one training loop plain, by hand and accelerated, and compares the results."""

import atexit
import contextlib
import functools
import importlib.metadata
import random
from dataclasses import dataclass, field, replace

import numpy
import pytest
import torch
from distributed.team import Team
from leaks import affinity_masks, changes, moved_threads
from torch import nn
from torch.utils.data import DataLoader

import nano_loop
from nano_loop.cpu import read_machine
from nano_loop.kernels import bernoulli, narrow_copies
from nano_loop.kernels.attention import attention
from nano_loop.kernels.convolution import gradient_plans
from nano_loop.kernels.linear import product
from nano_loop.patching.operators import gives_kernels
from nano_loop.policy import product_precision
from nano_loop.precision.autocast import frozen_weights
from nano_loop.precision.autocast.autocast import can_train_lstms
from nano_loop.steps import products

from .nested import differences, errors, largest, mapped, nodes
from .records import laid_otherwise, record, record_strides, surroundings
from .rounded import RoundedProducts

# Steps that reduced precision might enable by default, and steps that change the numerics.
SAME_NUMERICS = {"fast_dropout": False, "fast_attention": False, "fast_convolution": False, "fast_norm": False}


@dataclass(frozen=True)
class Config:
    """One way to accelerate a loop, and how close it must be to a loop that does the same by hand."""

    name: str
    options: dict = field(default_factory=dict)
    tolerance: float = 0.0  # relative to each tensor's largest value; 0 is bit for bit
    subclass: bool = False  # through TorchNano.setup if the arguments allow it, otherwise the decorator
    raises: bool = False  # the loop ends by raising, which must leave as little behind as returning
    within_spread: bool = False  # as close as the loop by hand is to itself; see `spread`
    spreads: float = 1.0  # factor of the spread, larger if so many values are compared that one is always an outlier

    @property
    def bf16(self):
        return self.options.get("precision") == "bf16"

    @property
    def autocast(self):
        return torch.bfloat16 if self.bf16 else None

    @property
    def products(self):
        """Dtype to which products round; None, so fp32, on CPUs without bf16 instructions and before torch 2.9."""
        asked_for = {"bf16-products": torch.bfloat16, 16: torch.float16}.get(self.options.get("precision"))
        is_possible = gives_kernels() and (asked_for is torch.float16 or read_machine().has_fast_bf16)
        return asked_for if is_possible else None

    @property
    def dtype(self):
        return torch.float64 if self.options.get("precision") == 64 else None

    @property
    def channels_last(self):
        return self.options.get("channels_last", False)


# Without the fused optimizers, no step changes the values under bf16 either. By hand, the weights and copies of the
# model are channels_last too; ours are not, and a different order of summation differs by 1e-7.
EXACT = Config("exact", {"exact": True})
FUSED = Config("fused", {}, tolerance=1e-5, subclass=True, raises=True)
BF16 = Config("bf16", {"precision": "bf16", "fused_optimizer": False, **SAME_NUMERICS}, raises=True)
# The defaults of precision="bf16": the fused optimizer, and kernels that sum in another order.
SHIPPED = Config("bf16-as-shipped", {"precision": "bf16"}, within_spread=True)
SHIPPED_NHWC = replace(SHIPPED, name="channels_last-as-shipped", options={"precision": "bf16", "channels_last": True})
# Rounds the inputs of every product.
PRODUCTS = Config("bf16-products", {"precision": "bf16-products"}, within_spread=True)
PRODUCTS_NHWC = replace(PRODUCTS, name="channels_last-products", options={**PRODUCTS.options, "channels_last": True})
FP64 = Config("fp64", {"precision": 64, "fused_optimizer": False})
FP16 = Config("fp16", {"precision": 16}, within_spread=True)
NHWC = Config("channels_last", {"channels_last": True, "fused_optimizer": False}, tolerance=1e-6)
NHWC_FUSED = replace(FUSED, name="channels_last-fused", options={"channels_last": True})
NHWC_BF16 = Config("channels_last-bf16", {**BF16.options, "channels_last": True}, tolerance=1e-6, subclass=True)

# With IPEX, the loop by hand uses IPEX's kernels too, which stay registered after the accelerated loop. So results are
# also compared with a loop by hand in a process without IPEX, within a tolerance for the order of summation.
IPEX = Config("ipex", {"use_ipex": True, "fused_optimizer": False}, raises=True)
IPEX_BF16 = Config("ipex-bf16", {**BF16.options, "use_ipex": True}, subclass=True)
IPEX_NHWC_BF16 = replace(NHWC_BF16, name="ipex-channels_last-bf16", options={**NHWC_BF16.options, "use_ipex": True})


def has_ipex():
    """Whether this is the environment that `make test-ipex` creates."""
    names = {each.name for each in importlib.metadata.distributions()}
    return "intel-extension-for-pytorch" in {str(name).lower().replace("_", "-") for name in names}


WITH_IPEX = (IPEX, IPEX_BF16) if has_ipex() else ()
if WITH_IPEX:
    torch.compile(repr, backend="eager")  # wraps methods of optimizers, once, as importing IPEX does
ALL = (EXACT, FUSED, BF16, SHIPPED, PRODUCTS, FP64, FP16, *WITH_IPEX)
CONVOLUTIONS = (
    *ALL,
    NHWC,
    NHWC_FUSED,
    NHWC_BF16,
    SHIPPED_NHWC,
    PRODUCTS_NHWC,
    *((IPEX_NHWC_BF16,) if WITH_IPEX else ()),
)

OF_IPEX = {False: 1e-5, True: 0.02}  # relative to each tensor's largest value, in fp32 and in bf16


class FinishedError(Exception):
    """Raised at the end of a loop, carrying its result."""


def untouched(call):
    """Return the call unchanged, as the plain and the accelerated loop use it."""
    return call


def written_by_hand(config, caches_casts=True):
    """Return the wrapper that a person would write around each call into the model to get the effect of `config`."""

    def around(call):
        @functools.wraps(call)
        def run(*args, **kwargs):
            if config.channels_last:
                args, kwargs = mapped((args, kwargs), in_channels_last)
            if config.dtype:
                args, kwargs = mapped((args, kwargs), lambda each: each.to(config.dtype) if is_real(each) else each)
            autocast = contextlib.nullcontext()
            if config.autocast:
                autocast = torch.autocast("cpu", config.autocast, cache_enabled=caches_casts)
            with autocast, RoundedProducts(config.products) if config.products else contextlib.nullcontext():
                out = call(*args, **kwargs)
            if config.dtype:
                return mapped(out, from_fp64)
            return mapped(out, in_fp32) if config.autocast else out

        is_plain = not (config.autocast or config.dtype or config.channels_last or config.products)
        return call if is_plain else run

    return around


def in_channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def is_real(tensor):
    return tensor.is_floating_point()


def in_fp32(tensor):
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def from_fp64(tensor):
    return tensor.float() if tensor.dtype == torch.float64 and not isinstance(tensor, nn.Parameter) else tensor


# Autocast has the same effect on a model whichever optimizer trains it, in fp32.
OF_MODELS = (BF16, NHWC_BF16, SHIPPED, SHIPPED_NHWC)
WRAPPED_TWICE = "timm_lookahead"  # its inner optimizer has separate state, which fp64 by hand does not convert
ROUNDED = (PRODUCTS, PRODUCTS_NHWC, FP16)


def pair(
    *builds, configs=ALL, without=(), trains_lstms=False, repeats_weights=False, repeats=(), kernels_in_bf16=False
):
    """
    Turn a loop into a test that it computes the same plain and accelerated.

    Each of `builds` returns a new dict of the loop's arguments, equal for the same seed. The loop accepts them by name,
    plus `by_hand`, which it applies to its calls into the model; it returns the values to compare.

    `without` has the configs for which `written_by_hand` is not equivalent. In fp64, calls of submodules in the loop,
    and of the model in a method that the loop calls, have fp32 outputs by hand, and vice versa. `RoundedProducts` does
    not see products in recomputed, composed and transformed code, or in second derivatives. On some CPUs torch cannot
    train LSTMs in bf16. If the model uses a weight several times per call, its gradients are added in fp32 without
    autocast's cache.

    `repeats` has the configs that add no coverage for this loop. They, and autocast for a model of an earlier build,
    run in `make test-all` only. So does `EXACT` if `BF16` is compared bit for bit, too, and `SHIPPED`, which adds only
    kernels in bf16 to `FUSED` and `BF16`, except for loops over images and with `kernels_in_bf16`.
    """
    models = [getattr(build, "model", build) for build in builds]

    def is_possible(build, config):
        return (
            config not in without
            and (not config.channels_last or takes_images(build))
            and (not trains_lstms or config.autocast is None or can_train_lstms(config.autocast))
            and (not config.dtype or getattr(build, "name", "") != WRAPPED_TWICE)
        )

    def is_slow(build, config, others):
        is_first = models.index(getattr(build, "model", build)) == builds.index(build)
        if config in ROUNDED or config in repeats or (config in OF_MODELS and not is_first):
            return True
        if config is EXACT:
            return is_first and BF16 in others and BF16 not in repeats
        return config is SHIPPED and not kernels_in_bf16 and not any(each.channels_last for each in configs)

    def decorate(loop):
        cases = []
        for build in builds:
            possible = [config for config in configs if is_possible(build, config)]
            cases += [
                pytest.param(
                    build, each, id=case_id(build, each), marks=[pytest.mark.slow] * is_slow(build, each, possible)
                )
                for each in possible
            ]

        @pytest.mark.parametrize(("build", "config"), cases)
        def test(build, config):
            check(build, loop, config, caches_casts=not repeats_weights)

        test.__name__ = loop.__name__
        test.__doc__ = loop.__doc__
        test.__module__ = loop.__module__
        return test

    return decorate


@functools.cache
def takes_images(build):
    """Whether a model of the loop is one to which channels_last=True applies."""
    models = [value for value in build().values() if isinstance(value, nn.Module)]
    return any(parameter.dim() in (4, 5) for model in models for parameter in model.parameters())


def case_id(build, config):
    return "-".join(filter(None, (getattr(build, "name", ""), config.name)))


def check(build, loop, config, caches_casts=True):
    """Fail with every difference between the accelerated loop and the loop by hand."""

    def run_by_hand():
        return run_plain(build, loop, written_by_hand(config, caches_casts), config.channels_last, config.dtype)

    if config.dtype and raises_about_dtypes(run_by_hand):
        raises_about_dtypes(lambda: run_accelerated(build, loop, config))  # may pass: modules cast their inputs
        return
    actual, threads = run_accelerated(build, loop, config)
    with computing_with(threads):
        expected = run_by_hand()
        plain = run_plain(build, loop) if config.channels_last else expected
    if config.within_spread:
        with computing_with(threads):
            compared = beyond_spread(build, loop, config, actual["seen"], expected["seen"])
    else:
        compared = differences(actual["seen"], expected["seen"], config.tolerance)
    found = [
        *compared,
        *without_ipex(actual["seen"], build, loop, config, threads),
        *differences(actual["strides"], plain["strides"], path="strides"),
        *(f"state laid out unlike its parameter: {place}" for place in actual["unlike"] - plain["unlike"]),
        *differences(actual["random"], expected["random"], path="random"),
    ]
    assert not found, "\n".join(found)


def raises_about_dtypes(run):
    try:
        run()
    except RuntimeError as error:
        return "dtype" in str(error) or "type" in str(error)
    return False


# bf16 has 8 significant bits, so it rounds a weight by a factor of up to 2⁻⁹. Two loops whose initial weights differ by
# less are the same loop as far as bf16 can tell, and so are two that sum in different orders.
ROUNDING, VARIANTS = 2.0**-9, 64


def beyond_spread(build, loop, config, actual, expected):
    """Return a line for each value that is farther from the loop by hand than the spread; see `spread`.

    On CPUs without bf16 instructions, torch's bf16 convolutions accumulate in bf16 and ours in fp32, so they differ by
    torch's error. There, a value also passes if it is no farther from the same loop in fp32 than the variants are.
    """

    def variants():
        for seed in range(VARIANTS):
            yield run_plain(moved(build, seed), loop, written_by_hand(config), config.channels_last)["seen"]

    allowed, many = {}, []
    found = beyond(allowed, actual, expected, config.spreads)
    for variant in variants():
        if not found:  # more variants could only allow more
            break
        many.append(variant)
        allowed = spread([variant], expected, allowed)
        found = beyond(allowed, actual, expected, config.spreads)
    if found and not config.products and not read_machine().has_fast_bf16:
        exact = run_plain(build, loop, untouched, config.channels_last)["seen"]
        allowed = spread([expected, *many], exact)
        farther = beyond(allowed, actual, exact, config.spreads)
        # None: types or shapes differ, so the spread is unknown.
        found = {place: line for place, line in found.items() if place in farther or allowed.get(place, 0) is None}
    return [*found.values()]


def spread(variants, expected, before=()):
    """Return how far the loop by hand is from itself if its initial weights move by no more than bf16's rounding.

    For each path, the largest absolute error of several such loops, including those `before`; None if types or shapes
    differ.
    """
    found = dict(before)
    for variant in variants:
        for place, error in errors(dict(nodes(variant)), dict(nodes(expected))):
            found[place] = None if error is None or found.get(place, 0) is None else max(error, found.get(place, 0))
    return found


def moved(build, seed):
    """Return `build` with the parameters of its models moved by up to bf16's rounding error."""

    def build_and_move():
        arguments = build()
        generator = torch.Generator().manual_seed(seed)
        for model in filter(is_model, arguments.values()):
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
                    parameter.data.mul_(1 + ROUNDING * noise)
        return arguments

    return build_and_move


def beyond(allowed, actual, expected, spreads=1.0):
    """Return a line for each path where two values differ by more than the spread and the fused optimizers round."""
    values, found = dict(nodes(expected)), {}
    for place, error in errors(dict(nodes(actual)), values):
        most = allowed.get(place, 0.0)
        if most is not None and (error is None or error > spreads * most + FUSED.tolerance * largest(values[place])):
            found[place] = f"{place}: off by {error}, and the loop by hand by {most:.2e} from itself"
    return found


def without_ipex(actual, build, loop, config, threads):
    """Yield differences from the loop by hand in a process that never imports IPEX."""
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


def run_plain(build, loop, by_hand=untouched, channels_last=False, dtype=None):
    arguments = built(build)
    for model in filter(is_model, arguments.values()):
        if channels_last:
            model.to(memory_format=torch.channels_last)
    with converted(arguments, dtype):
        result = loop(**arguments, by_hand=by_hand)
    return outcome(arguments, result)


@contextlib.contextmanager
def converted(arguments, dtype):
    """Convert models and optimizer states as a person would, and back at the end."""
    if dtype is None:
        yield
        return
    convert_all(arguments, dtype)
    yield
    convert_all(arguments, torch.float32)


def convert_all(value, dtype):
    if isinstance(value, nn.Module):
        value.to(dtype)
    elif isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            state.update(mapped(state, lambda each: each.to(dtype) if is_real(each) and each.dim() else each))
    elif isinstance(value, dict):
        for each in sorted(value.values(), key=lambda each: isinstance(each, torch.optim.Optimizer)):
            convert_all(each, dtype)
    elif isinstance(value, (list, tuple)):
        for each in value:
            convert_all(each, dtype)


def run_accelerated(build, loop, config):
    """Return the outcome and the number of threads of the loop. Fail if the run left anything behind."""
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
    with every_size_worth_it(config), left_as_found():
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
    """Return new arguments, with the random generators in the state that every loop starts with."""
    seed_all(0)
    arguments = build()
    seed_all(1)
    return arguments


def seed_all(seed):
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also record the stack, for CUDA
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
def every_size_worth_it(config):
    """Lower nano_loop's size thresholds, because the models of these loops are small."""
    with pytest.MonkeyPatch.context() as patch:
        if config.within_spread:
            patch.setattr(attention, "MIN_SCORES", 1)
            patch.setattr(gradient_plans, "MIN_MULTIPLICATIONS", 1)
            patch.setattr(bernoulli, "MIN_ELEMENTS", 1)
        if config.products:
            rounding_every_product(patch)
        patch.setattr(frozen_weights, "FEWEST", 1)
        yield


def rounding_every_product(patch):
    """Let products of all sizes round their inputs."""
    for kind in product_precision.MIN_MULTIPLICATIONS:
        patch.setitem(product_precision.MIN_MULTIPLICATIONS, kind, 0)
    patch.setattr(product, "FEWEST", 1)
    patch.setattr(products, "SMALLEST_WEIGHT", 1)
    patch.setattr(narrow_copies, "MIN_ELEMENTS", 1)


@contextlib.contextmanager
def left_as_found():
    before, masks = surroundings(), affinity_masks()
    yield
    found = [*changes(before, surroundings()), *moved_threads(masks, affinity_masks())]
    assert not found, "\n".join(found)


def named(name, build, model=None):
    """Return `build` with the name for its tests, and the function that makes its model, if known."""
    named_build = functools.partial(build)
    named_build.name = name
    if model is not None:
        named_build.model = model
    return named_build
