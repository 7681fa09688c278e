"""Models that were compiled before the loop, and models that nano_loop compiles."""

import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import dropout, relu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nano_loop import nano

from .nested import differences
from .pairs import BF16, EXACT, FUSED, WITH_IPEX, Config, pair, run_accelerated, run_plain, untouched
from .tasks import ADAMW, Net, Normed, fit, job, vectors


@pytest.fixture(scope="module")
def dynamo():
    """Load Dynamo before the loops: it loads lazily and starts a thread, which would count as a trace of a loop."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()
    return torch._dynamo


@pytest.fixture(autouse=True)
def nothing_compiled_yet(dynamo):
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture(scope="module")
def inductor(dynamo):
    """Load Inductor, which starts threads too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own use of torch.jit
        torch.compile(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


def inductors(test):
    """Mark a test that compiles with Inductor, which needs a C++ compiler and half a minute."""
    needed = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    return pytest.mark.slow(needed(pytest.mark.usefixtures("inductor")(test)))


def full_batches():
    return vectors(size=24, shuffle=False)


def compiled(backend, model=Net):
    def build():
        return torch.compile(model(), backend=backend)

    return job(f"{backend}-{model.__name__}", model=build, optimizer=ADAMW, loader=full_batches)


def train(model, optimizer, loader, by_hand=untouched):
    losses = fit(model, optimizer, loader, by_hand, epochs=1)
    model.eval()
    with torch.no_grad():
        return losses, by_hand(model)(torch.ones(8, 6))


BACKENDS = compiled("eager"), compiled("aot_eager", Normed)
test_a_model_compiled_before = pair(*BACKENDS, configs=[EXACT, FUSED, BF16, *WITH_IPEX], repeats=[EXACT])(train)


def compiled_in_place():
    arguments = job(optimizer=ADAMW, loader=full_batches)()
    arguments["model"].compile(backend="eager")
    return arguments


test_a_model_compiled_in_place = pair(compiled_in_place, configs=[EXACT, BF16, *WITH_IPEX])(train)


@pair(job(optimizer=ADAMW, loader=full_batches), configs=[EXACT, BF16, *WITH_IPEX])
def test_a_model_compiled_inside_the_loop(model, optimizer, loader, by_hand=untouched):
    return train(torch.compile(model, backend="eager"), optimizer, loader, by_hand)


EAGER = {"compile": {"backend": "eager"}}
COMPILED = [
    Config("fp32", {"fused_optimizer": False, **EAGER}),
    Config("bf16", {**BF16.options, **EAGER}, subclass=True, raises=True),
    *(replace(each, options={**each.options, **EAGER}) for each in WITH_IPEX),
]


#: The backend only traces and changes no values, and the last batch is smaller.
IN_PARTS = job(optimizer=ADAMW, loader=lambda: vectors(shuffle=False))
test_a_model_that_nano_loop_compiles = pair(IN_PARTS, configs=COMPILED)(train)
test_a_model_compiled_by_inductor_before = inductors(pair(compiled("inductor"), configs=[FUSED])(train))


class Attending(torch.nn.Module):
    """A block with attention and dropout, which stay whole. If `checkpointed`, it is recomputed in the backward."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.inputs, self.outputs = torch.nn.LayerNorm(64), torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(self.attended, x, use_reentrant=False) if self.checkpointed else self.attended(x)

    def attended(self, x):
        query, key, value = self.inputs(self.norm(x)).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + dropout(relu(self.outputs(found.transpose(1, 2).flatten(2))), 0.2, self.training)


class Dropping(torch.nn.Module):
    """A block with dropout that is recomputed in the backward: Inductor of torch 2.8 has no fp64 attention."""

    def __init__(self):
        super().__init__()
        self.outputs = torch.nn.Linear(64, 64)

    def forward(self, x):
        return x + checkpoint(lambda x: dropout(relu(self.outputs(x)), 0.2), x, use_reentrant=False)


class Convolving(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing, self.norm = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return x + relu(self.norm(self.mixing(x)), inplace=True)


class Blocks(torch.nn.Module):
    """Three equal blocks between an embedding of 6 features and a head of 3 classes."""

    def __init__(self, block, shape):
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Linear(6, math.prod(shape))
        self.blocks = torch.nn.ModuleList(block() for _ in range(3))
        self.head = torch.nn.Linear(math.prod(shape), 3)

    def forward(self, x):
        x = self.embedding(x).unflatten(1, self.shape)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


BLOCKS = {
    "attention": lambda: Blocks(Attending, (64, 64)),
    "checkpoints": lambda: Blocks(lambda: Attending(checkpointed=True), (64, 64)),
    "convolutions": lambda: Blocks(Convolving, (8, 5, 5)),
}
COMPILED_IN_BLOCKS = [
    Config("fp32", {"compile": True}, tolerance=1e-4),
    Config("whole", {"compile": "whole"}, tolerance=1e-4),
    Config("channels_last", {"compile": True, "channels_last": True}, tolerance=1e-4),
    Config("torchs dropout", {"compile": True, "fast_dropout": False}, tolerance=1e-4),
]


# With checkpoints inside a compiled model, torch may draw the masks in another order. Layouts are for images.
IN_ORDER = [
    (model, config)
    for model in BLOCKS
    for config in COMPILED_IN_BLOCKS
    if (model, config.name) != ("checkpoints", "whole") and (config.name != "channels_last" or model == "convolutions")
]


def assert_near(actual, expected):
    found = [*differences(actual["seen"], expected["seen"], 1e-4)]
    assert not found, "\n".join(found)


@inductors
@pytest.mark.parametrize(("model", "config"), IN_ORDER, ids=lambda each: getattr(each, "name", each))
def test_blocks_that_inductor_compiles_draw_and_compute_what_the_plain_loop_does(model, config):
    """The last batch is smaller, and dropout's masks are those of the plain loop."""
    build = job(model=BLOCKS[model], loader=lambda: vectors(size=20, shuffle=False))
    actual, _ = run_accelerated(build, train, config)
    plain = run_plain(build, train)
    assert_near(actual, plain)
    assert not [*differences(actual["random"], plain["random"])]


@inductors
def test_a_checkpoint_inside_of_a_compiled_model_computes_again_with_the_masks_of_its_forward():
    """Otherwise the gradient would not match the loss."""
    torch.manual_seed(0)
    model, x = Blocks(Dropping, (64, 64)), torch.randn(8, 6, dtype=torch.float64)

    def slopes(model):
        parameters = list(model.parameters())
        directions = [torch.randn_like(each) for each in parameters]

        def loss(step):
            with torch.no_grad():
                for each, direction in zip(parameters, directions, strict=True):
                    each.add_(direction, alpha=step)
            torch.manual_seed(7)
            return model(x).square().mean()

        loss(0).backward()
        gradient = sum((each.grad * direction).sum() for each, direction in zip(parameters, directions, strict=True))
        ahead = loss(1e-6).item()
        return gradient.item(), (ahead - loss(-2e-6).item()) / 2e-6

    gradient, slope = nano(compile="whole", precision=64, verbose=False)(slopes)(model)
    assert gradient == pytest.approx(slope, rel=1e-3)


@inductors
def test_two_ranks_compute_with_compiled_blocks_what_they_compute_without():
    build = job(model=BLOCKS["attention"], loader=lambda: vectors(size=16, shuffle=False))
    eager, compiled = (
        run_accelerated(build, train, Config("two ranks", {"num_processes": 2, **more}))[0]
        for more in ({}, {"compile": True})
    )
    assert_near(compiled, eager)


def distance(actual, expected):
    """Return the distance of all parameters from each other, relative to their norm."""
    one, other = (
        torch.cat([each["value"].flatten() for each in seen["model"]["parameters"].values()])
        for seen in (actual, expected)
    )
    return ((one - other).norm() / other.norm()).item()


@inductors
@pytest.mark.parametrize(
    ("model", "options"), [*((model, {}) for model in BLOCKS), ("convolutions", {"channels_last": True})]
)
def test_compiled_blocks_in_bf16_are_as_near_to_fp32_as_those_that_are_not(model, options):
    build = job(model=BLOCKS[model], loader=lambda: vectors(size=20, shuffle=False))
    plain = run_plain(build, train)["seen"]
    eager, compiled = (
        run_accelerated(build, train, Config("bf16", {"precision": "bf16", **options, **more}))[0]["seen"]
        for more in ({}, {"compile": True})
    )
    assert 0 < distance(compiled, plain) < 1.5 * distance(eager, plain)
