"""In set-up models under bf16 autocast, layers that are faster in fp32 compute in fp32 and return autocast's dtype."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import disable_casts
from nano_loop.precision.policy import layers_in_fp32 as module
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.precision import Precision

NHWC = torch.channels_last


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def nhwc(*shape):
    return randn(*shape).contiguous(memory_format=NHWC)


# A layer and its input, or how the layer is called. The first of a pair is within a bound, the second is above it.
PAIRS = {
    "linear, rows": (
        (nn.Linear(512, 80), randn(32, 512)),
        (nn.Linear(512, 80), randn(33, 512)),
    ),
    "linear, weights": (
        (nn.Linear(128, 64, bias=False), randn(8, 128)),
        (nn.Linear(128, 63, bias=False), randn(8, 128)),
    ),
    "linear, few outputs": (
        (nn.Linear(256, 16), randn(512, 256)),
        (nn.Linear(256, 17), randn(512, 256)),
    ),
    "images of few channels": (
        (nn.Conv2d(3, 16, 3, 2, 1), randn(4, 3, 64, 64)),
        (nn.Conv2d(4, 16, 3, 2, 1), randn(4, 4, 64, 64)),
    ),
    "images of few channels, strides": (
        (nn.Conv2d(3, 16, 3, 2, 1), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 3, (1, 2), 1), randn(4, 3, 64, 64)),
    ),
    "images of few channels, kernels": (
        (nn.Conv2d(3, 16, 4, 2, 1), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 5, 2, 1), randn(4, 3, 64, 64)),
    ),
    "images of few channels, biases": (
        (nn.Conv2d(3, 16, 3, 2), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 3, 2, bias=False), randn(4, 3, 64, 64)),
    ),
    "multiplications": (
        (nn.Conv2d(3, 10, 3, 2, padding=1), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 9, 3, 2, padding=1), randn(4, 3, 64, 64)),
    ),
    "layouts": (
        (nn.Conv2d(3, 16, 3, 2), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 3, 2), nhwc(4, 3, 64, 64)),
    ),
    "layouts of weights": (
        (nn.Conv2d(3, 16, 3, 2), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 3, 2).to(memory_format=NHWC), randn(4, 3, 64, 64)),
    ),
    "few pixels": (
        (nn.Conv2d(128, 128, 3, 2, 1), randn(8, 128, 4, 4)),
        (nn.Conv2d(128, 128, 3, 2, 1), randn(9, 128, 4, 4)),
    ),
    "1x1 kernels into few channels": (
        (nn.Conv2d(64, 8, 1), randn(4, 64, 32, 32)),
        (nn.Conv2d(64, 9, 1), randn(4, 64, 32, 32)),
    ),
    "single pixels": (
        (nn.Conv2d(128, 256, 1), randn(64, 128, 1, 1)),
        (nn.Conv2d(128, 256, 1), randn(64, 128, 2, 1)),
    ),
    "zeros around": (
        (nn.Conv2d(3, 16, 3, 2, padding=1), randn(4, 3, 64, 64)),
        (nn.Conv2d(3, 16, 3, 2, padding=1, padding_mode="circular"), randn(4, 3, 64, 64)),
    ),
    "1-D": (
        (nn.Conv1d(256, 64, 3), randn(2, 256, 18)),
        (nn.Conv1d(256, 64, 3), randn(2, 256, 19)),
    ),
    "3-D": (
        (nn.Conv3d(64, 16, 3), randn(4, 64, 4, 4, 4)),
        (nn.Conv3d(64, 16, 3), randn(5, 64, 4, 4, 4)),
    ),
    "transposed, single pixels": (
        (nn.ConvTranspose2d(64, 8, 4), randn(4, 64, 1, 1)),
        (nn.ConvTranspose2d(64, 8, 4), randn(4, 64, 2, 2)),
    ),
    "transposed, depthwise": (
        (nn.ConvTranspose2d(32, 32, 4, 2, groups=32), randn(2, 32, 32, 32)),
        (nn.ConvTranspose2d(32, 32, 4, 2, groups=16), randn(2, 32, 32, 32)),
    ),
}
# Of an input in bf16, as inside a model.
NORMS = {
    "channels of a group": (
        (nn.GroupNorm(8, 120), nhwc(2, 120, 8, 8).bfloat16()),
        (nn.GroupNorm(8, 128), nhwc(2, 128, 8, 8).bfloat16()),
    ),
    "layouts": (
        (nn.GroupNorm(8, 64), nhwc(2, 64, 8, 8).bfloat16()),
        (nn.GroupNorm(8, 64), randn(2, 64, 8, 8).bfloat16()),
    ),
}
WITHIN = {name: pair[0] for name, pair in PAIRS.items()}
ABOVE = {name: pair[1] for name, pair in PAIRS.items()}


class Holding(nn.Module):
    """Keeps the output of its layer as it is, for the outputs of a model are cast."""

    def __init__(self, layer, recomputed=False):
        super().__init__()
        self.layer, self.recomputed = layer, recomputed

    def forward(self, *args):
        self.out = checkpoint(self.layer, *args, use_reentrant=False) if self.recomputed else self.layer(*args)
        return 0


@pytest.fixture
def set_up(step):
    def make(model):
        step(Precision, precision="bf16").apply(TrainingObjects([model]))
        return model

    return make


def computed(model, x):
    """Return the output of the layer and the gradients."""
    model.zero_grad()
    model(x)
    model.out.float().square().sum().backward()
    return [model.out.detach(), *(each.grad for each in model.parameters())]


def by_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return computed(Holding(copy.deepcopy(layer)), x)


@pytest.mark.parametrize("case", WITHIN)
def test_layers_within_a_bound_are_fp32s_in_autocasts_dtype(set_up, case):
    layer, x = WITHIN[case]
    exact = copy.deepcopy(layer)(x)
    out, *gradients = computed(set_up(Holding(layer)), x)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    assert {each.dtype for each in gradients} == {torch.float32}


@pytest.mark.parametrize("case", ABOVE)
def test_layers_above_a_bound_are_autocasts_to_the_bit(set_up, case):
    layer, x = ABOVE[case]
    theirs = by_autocast(layer, x)
    assert all(map(torch.equal, computed(set_up(Holding(layer)), x), theirs))


def fp32_groups(monkeypatch, set_up, layer, x):
    """Return the dtypes that a layer's inputs have when it computes."""
    seen, original = [], torch.nn.functional.group_norm
    noting = lambda x, *args: (seen.append(x.dtype), original(x, *args))[1]  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "group_norm", noting)
    out, *gradients = computed(set_up(Holding(layer)), x.clone().requires_grad_())
    assert out.dtype is torch.bfloat16
    assert {each.dtype for each in gradients} == {torch.float32}
    return seen


@pytest.mark.parametrize("case", NORMS)
def test_group_norms_of_few_channels_in_nhwc_are_fp32s(set_up, monkeypatch, case):
    (layer, x), (other, y) = NORMS[case]
    exact = copy.deepcopy(layer)(x.float())
    model = set_up(Holding(layer))
    model(x)
    assert torch.equal(model.out, exact.bfloat16())
    assert fp32_groups(monkeypatch, set_up, layer, x) == [torch.float32]
    assert fp32_groups(monkeypatch, set_up, other, y) == [torch.bfloat16]
    y = y.requires_grad_()  # in NHWC torch's backward crashes without
    assert all(map(torch.equal, computed(set_up(Holding(other)), y), by_autocast(other, y)))


def test_a_listed_group_norm_runs_as_listed():
    layer, _ = NORMS["layouts"][0]
    around = module.UnlessListed(["group_norm"])
    assert around(layer) is None
    assert module.UnlessListed(["softmax"])(layer) is not None


def test_other_models_are_autocasts_to_the_bit(set_up):
    layer, x = WITHIN["linear, rows"]
    theirs = by_autocast(layer, x)
    set_up(Holding(nn.Linear(2, 2)))
    assert all(map(torch.equal, by_autocast(layer, x), theirs))


def test_a_layer_that_the_loop_calls_is_fp32_too(set_up):
    layer, x = WITHIN["linear, rows"]
    exact, model = copy.deepcopy(layer)(x), set_up(Holding(layer))
    assert torch.equal(model.layer(x), exact.bfloat16().float())


def test_a_layer_that_is_added_during_the_run_is_fp32_too(set_up):
    layer, x = WITHIN["linear, rows"]
    model = set_up(Holding(nn.Linear(2, 2)))
    exact = layer(x)
    model.layer = layer
    assert torch.equal(computed(model, x)[0], exact.bfloat16())


def _with_hook(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


class _Subclass(nn.Linear):
    pass


UNTOUCHED = {
    "with a hook": lambda: _with_hook(nn.Linear(512, 80)),
    "of a subclass": lambda: _Subclass(512, 80),
    "parametrized": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(512, 80)),
    "in bf16": lambda: nn.Linear(512, 80).bfloat16(),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_layers_that_may_compute_something_else_are_autocasts(set_up, kind):
    layer, x = UNTOUCHED[kind](), randn(32, 512)
    theirs = by_autocast(layer, x)
    model = Holding(layer)
    model.other = nn.Linear(2, 2)  # or nothing of a model in bf16 would be cast
    set_up(model)(x)
    assert torch.equal(model.out, theirs[0])


def test_casts_that_the_model_disables_stay_disabled(set_up):
    class Careful(Holding):
        def forward(self, x):
            with disable_casts():
                return super().forward(x)

    layer, x = WITHIN["linear, rows"]
    model = set_up(Careful(layer))
    model(x)
    assert model.out.dtype is torch.float32


def test_an_image_without_a_batch_dimension_is_autocasts(set_up):
    layer, x = nn.Conv2d(3, 16, 3, 2), randn(3, 128, 128)
    theirs = by_autocast(layer, x)
    assert all(map(torch.equal, computed(set_up(Holding(layer)), x), theirs))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
def test_small_recurrences_keep_the_dtypes_of_autocast(set_up, monkeypatch, kind, dtype, state):
    monkeypatch.setattr(module, "WEIGHTS_WORTH_IT", 1)
    layer, args = kind(4, 5, num_layers=2, bidirectional=True), [randn(3, 2, 4).to(dtype)]
    if state is not None:
        args.append(randn(4, 2, 5).to(state))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = layer(*args)
    exact = layer(*[each.float() for each in args])
    model = set_up(Holding(layer))
    model(*args)
    for mine, other, reference in zip(model.out, theirs, exact, strict=True):
        assert mine.dtype is other.dtype
        assert torch.equal(mine, reference.to(mine.dtype))


def test_recurrences_above_the_bound_are_autocasts(set_up, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS_WORTH_IT", 1)
    monkeypatch.setattr(module, "FEW_MULTIPLICATIONS", 2 * 75 - 1)
    layer, x = nn.GRU(4, 5), randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = layer(x)
    model = set_up(Holding(layer))
    model(x)
    assert torch.equal(model.out[0], theirs[0])


def test_a_checkpoint_recomputes_in_the_dtype_of_its_forward(set_up):
    layer, x = nn.Sequential(nn.Linear(512, 80), nn.ReLU()), randn(32, 512).requires_grad_()
    plain = computed(set_up(Holding(copy.deepcopy(layer))), x)
    recomputed = computed(set_up(Holding(layer, recomputed=True)), x)
    assert all(map(torch.equal, recomputed, plain))


@pytest.mark.usefixtures("compiles_anew")
def test_compiled_models_are_autocasts_and_one_graph(set_up):
    layer, x = WITHIN["linear, rows"]
    theirs = by_autocast(layer, x)
    model = Holding(layer)
    compiled = set_up(torch.compile(model, backend="eager", fullgraph=True))
    compiled(x)
    assert torch.equal(model.out, theirs[0])


@pytest.mark.usefixtures("compiles_anew")
def test_a_compiled_part_of_a_model_is_autocasts_and_one_graph(set_up):
    layer, x = WITHIN["linear, rows"]
    theirs = by_autocast(layer, x)
    model = set_up(Holding(torch.compile(layer, backend="eager", fullgraph=True)))
    assert torch.equal(computed(model, x)[0], theirs[0])
