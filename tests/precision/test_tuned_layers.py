"""Layers compute in fp32 where that was measured to be faster, and a measurement changes nothing that the loop sees."""

import copy
import threading

import pytest
import torch
from autotune.time_for import TimeFor
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop.autotune import decisions
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Tuner
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.precision.autocast.autocast import cpu_autocast
from nano_loop.precision.policy import tuned_layers
from nano_loop.precision.policy.tuned_layers import TunedLayers

GROUPS = torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "linear": (nn.Linear(24, 8), torch.randn(5, 24)),
    "linear without bias, sequences": (nn.Linear(24, 8, bias=False), torch.randn(5, 3, 24)),
    "convolution": (nn.Conv2d(16, 4, 3), GROUPS),
    "convolution 1d": (nn.Conv1d(16, 4, 3, padding=1), GROUPS[:, :, 0]),
    "convolution, same": (nn.Conv2d(16, 4, 3, padding="same", padding_mode="reflect"), GROUPS),
    "transposed convolution": (nn.ConvTranspose2d(16, 4, 3, stride=2), GROUPS),
    "group norm": (nn.GroupNorm(4, 16), GROUPS.bfloat16().contiguous(memory_format=torch.channels_last)),
}


class Deciding(Tuner):
    """A tuner that measures, as the real one, and decides for a way that a test names."""

    def __init__(self, way, times=1000):
        self.budget = TimeFor(float("inf"))
        super().__init__(Choices(None), self.budget)
        self.way, self.times = way, times

    @property
    def turn(self):
        """A new one at each question, unless a test sets it."""
        return len(self.budget.asked) if self.own_turn is None else self.own_turn

    own_turn = None

    def choose(self, key, guess, ways):
        self.budget.seconds = float("inf") if len(self.new_choices) < self.times else -1
        return super().choose(key, guess, ways)

    def _measure(self, key, guess, ways):
        choice = super()._measure(key, guess, ways)
        if choice is None:
            return None
        choice = choice._replace(algorithm=self.way)
        self.choices.put(key, choice)
        return choice


@pytest.fixture
def interceptors():
    opened = CallInterceptors()
    yield opened
    opened.close()


@pytest.fixture
def tuned(interceptors):
    """Let a model be called under autocast, with its layers tuned, as the steps do it."""

    def tune(model, tuner, listed=()):
        def layer(call):
            def under_autocast(*args, **kwargs):
                with cpu_autocast(torch.bfloat16):
                    return call(*args, **kwargs)

            return under_autocast

        interceptors.add(model, "autocast", layer).around_modules(TunedLayers(tuner, listed).around, "dtypes")
        return model

    return tune


def computed(model, x):
    """Return the output and all gradients of a call."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(each.grad for each in model.parameters())]


def by_hand(layer, x, dtype):
    layer, x = copy.deepcopy(layer), x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = layer(x if dtype is torch.bfloat16 else x.float()).bfloat16()
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(each.grad for each in layer.parameters())]


def test_group_norm_of_fp32_stays_in_fp32_and_is_not_measured(tuned):
    tuner = Deciding("fp32")
    out, *_ = computed(tuned(nn.GroupNorm(4, 16), tuner), GROUPS)
    assert out.dtype is torch.float32
    assert not tuner.measured


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["bf16", "fp32"])
def test_call_computes_in_the_chosen_way_to_the_bit(tuned, name, way):
    layer, x = LAYERS[name]
    layer = copy.deepcopy(layer)
    expected = by_hand(layer, x, {"bf16": torch.bfloat16, "fp32": torch.float32}[way])
    tuner = Deciding(way)
    found = computed(tuned(layer, tuner), x)
    assert tuner.measured == 1
    assert len(tuner.new_choices[0].milliseconds) == 2  # both were as exact, and timed
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_measurement_changes_nothing_that_the_loop_sees(tuned):
    layer, x = nn.Linear(24, 8), torch.randn(5, 24, requires_grad=True)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient))
    layer.bias.grad = torch.ones(8)
    x.register_hook(lambda gradient: seen.append(gradient))
    tuner, state = Deciding("fp32"), torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        tuned(layer, tuner)(x)
    assert tuner.measured == 1
    assert len(seen) == 2  # the input and the weight that the call has saved, and none of a measurement's
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.weight.grad is None
    assert x.grad is None
    assert torch.equal(layer.bias.grad, torch.ones(8))
    assert not torch.is_autocast_enabled("cpu")


def test_layer_with_hooks_is_called_as_it_is(tuned):
    layer, tuner = nn.Linear(24, 8), Deciding("fp32")
    layer.register_forward_hook(lambda *_: None)
    computed(tuned(layer, tuner), torch.randn(5, 24))
    assert not tuner.measured


def test_evaluation_is_measured_apart_and_without_gradients(tuned):
    layer, tuner = nn.Linear(24, 8), Deciding("fp32")
    tuned(layer, tuner)
    for training in (True, False):
        layer.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                layer(torch.randn(5, 24))
    with torch.inference_mode():
        layer(torch.randn(50, 24))
    assert [key.split()[-1] for key in tuner.choices.all()] == ["train", "eval"]


def test_frozen_layer_is_measured_apart(tuned):
    layer, tuner = nn.Linear(24, 8), Deciding("fp32")
    tuned(layer, tuner)
    for _ in range(2):
        layer(torch.randn(5, 24))
        layer.requires_grad_(False)
    assert tuner.measured == 2


class Twice(nn.Module):
    """Calls one layer under an activation checkpoint, and then again without."""

    def __init__(self, reentrant, tuner):
        super().__init__()
        self.layer = nn.Linear(24, 24)
        self.reentrant, self.tuner = reentrant, tuner

    def forward(self, x):
        first = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        self.tuner.times, self.tuner.own_turn = 1000, 1  # what was not measured is now
        return first + self.layer(x)


@pytest.mark.parametrize("first", ["measured", "known", "not known"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_as_its_forward_did_whenever_a_choice_is_made(tuned, reentrant, first):
    """torch raises where the dtypes of a recomputation differ from those of the forward."""
    tuner = Deciding("fp32", times={"measured": 1000, "known": 1000, "not known": 0}[first])
    tuner.own_turn = 0
    net = tuned(Twice(reentrant, tuner), tuner)
    if first == "known":
        computed(net, torch.randn(5, 24))
    taken = []
    choose = tuner.choose

    def choosing(*given):
        taken.append(choose(*given))
        return taken[-1]

    tuner.choose = choosing
    computed(net, torch.randn(5, 24))
    expected = {"measured": ["fp32"], "known": [], "not known": [None, "fp32"]}[first]
    assert taken == expected


def test_shape_that_is_forgotten_until_the_recomputation_computes_as_before(tuned, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    tuner = Deciding("fp32")
    layer = nn.Linear(24, 24)
    net = tuned(layer, tuner)
    x = torch.randn(5, 24, requires_grad=True)
    out = tuned(Checkpointed(net), tuner)(x)
    net(torch.randn(50, 24))
    out.float().sum().backward()
    assert x.grad is not None


class Checkpointed(nn.Module):
    """Calls a module under an activation checkpoint."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_listed_operators_are_not_measured(tuned):
    tuner = Deciding("fp32")
    computed(tuned(nn.Linear(24, 8), tuner, ["linear"]), torch.randn(5, 24))
    assert not tuner.measured


def test_what_bf16_computes_faster_on_every_cpu_is_not_measured(tuned):
    tuner = Deciding("fp32")
    computed(tuned(nn.Linear(1024, 1024), tuner), torch.randn(2048, 1024))
    computed(tuned(nn.Conv2d(128, 128, 3), tuner), torch.randn(4, 128, 16, 16))
    assert not tuner.measured
    computed(tuned(nn.Linear(1024, 1024), tuner), torch.randn(64, 1024))  # whose weights are as large
    computed(tuned(nn.Conv2d(128, 8, 1), tuner), torch.randn(4, 128, 16, 16))
    computed(tuned(nn.ConvTranspose2d(32, 8, 2, stride=2), tuner), torch.randn(4, 32, 8, 8))
    assert tuner.measured == 3


def test_without_time_a_call_asks_once_a_turn(tuned):
    tuner, layer = Deciding("fp32", times=0), nn.Linear(24, 8)
    tuned(layer, tuner)
    for turn in (1, 1, 2):
        tuner.own_turn = turn
        computed(layer, torch.randn(5, 24))
        assert len(tuner.budget.asked) == turn


def test_lengths_of_a_batch_share_choices_and_a_layer_remembers_few(tuned, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 8)
    chosen, around = [], tuned_layers._OfLayer
    monkeypatch.setattr(tuned_layers, "_OfLayer", lambda *given: chosen.append(around(*given)) or chosen[-1])
    tuner, layer = Deciding("fp32"), nn.Linear(24, 8)
    tuned(layer, tuner)
    for rows in range(33, 65):
        computed(layer, torch.randn(rows, 24))
    assert tuner.measured == 1
    assert len(chosen[0]._by_kind._known) <= 8


# --- what is called as it is ---


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_nested_and_sparse_inputs_compute_as_without_nano_loop(tuned):
    layer = nn.Linear(24, 8)
    nested = torch.nested.nested_tensor([torch.randn(2, 24), torch.randn(3, 24)])
    sparse = torch.randn(5, 24).relu().to_sparse_csr()
    net = tuned(nn.Sequential(layer), Deciding("fp32"))
    assert [each.shape for each in net(nested).unbind()] == [(2, 8), (3, 8)]
    assert not tuned_layers._OfLayer(Deciding("fp32"), layer).is_fp32(sparse)


def test_layer_with_a_forward_of_its_own_is_called_as_it_is(tuned):
    layer, tuner = nn.Linear(24, 8), Deciding("fp32")
    layer.forward = lambda x: {"out": nn.functional.linear(x, layer.weight)}
    out = tuned(layer, tuner)(torch.randn(5, 24))["out"]
    assert out.dtype is torch.bfloat16
    assert not tuner.measured


def test_modes_of_the_loop_see_no_measurement(tuned):
    class Counting(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    layer, tuner = tuned(nn.Linear(24, 8), Deciding("fp32")), Deciding("fp32")
    with Counting() as counting:
        layer(torch.randn(5, 24))
    assert not tuner.measured
    assert counting.seen < 20


def test_large_outputs_and_weights_are_not_measured(tuned, monkeypatch):
    monkeypatch.setattr(tuned_layers, "MOST_ELEMENTS", 1000)
    tuner = Deciding("fp32")
    computed(tuned(nn.Linear(24, 300), tuner), torch.randn(5, 24))  # its output
    computed(tuned(nn.Linear(60, 20), tuner), torch.randn(2, 60))  # its weight
    computed(tuned(nn.ConvTranspose2d(2, 2, 2, stride=8), tuner), torch.randn(1, 2, 4, 4))
    computed(tuned(nn.Linear(24, 8), tuner), torch.randn(60, 24))
    assert not tuner.measured
    computed(tuned(nn.Linear(24, 8), tuner), torch.randn(5, 24))
    assert tuner.measured == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_thread_with_fewer_nodes_recomputes_as_its_forward_did(tuned, reentrant):
    tuner = Deciding("fp32")
    tuner.own_turn = 0
    net = tuned(Twice(reentrant, tuner), tuner)
    for _ in range(3):
        computed(net, torch.randn(5, 24))
    failed = []

    def train():
        try:
            computed(net, torch.randn(5, 24))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not failed


def test_layer_of_two_models_has_one_decision(tuned, interceptors):
    tuner = Deciding("fp32")
    layers = TunedLayers(tuner)
    layer = nn.Linear(24, 8)
    first, second = layers.around(layer), layers.around(layer)
    assert first.__closure__ is not None
    with cpu_autocast(torch.bfloat16):
        for call in (first, second):
            call(nn.Module.__call__, layer, torch.randn(5, 24))
    assert len(layers._decisions) == 1
    assert tuner.measured == 1
