"""Chains of linear layers are computed in C as by torch's modules, and by these where anything is not plain."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from nano_loop import TorchNano, accelerated
from nano_loop.kernels import fp32
from nano_loop.kernels.linear import chain
from nano_loop.patching.ownership import call_state
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fast_chains import FastChains
from nano_loop.steps.kernels.kernel_step import LOOKS_FROM

pytestmark = pytest.mark.skipif(chain.KERNEL.unavailable is not None, reason=str(chain.KERNEL.unavailable))


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.activation, self.dropout = nn.Linear(inputs, outputs), nn.Sigmoid(), nn.Dropout(0.2)

    def forward(self, x):
        return self.dropout(self.activation(self.linear(x)))


class Blocks(nn.Module):
    """Modules in turn, of modules in turn."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 3))
        self.blocks = nn.Sequential(Block(8, 24), Block(24, 16))

    def forward(self, x):
        x = self.blocks(x)
        return self.head(x)


class Normalized(nn.Module):
    """Blocks with norms, as an autoencoder has."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2))
        self.decoder = nn.Sequential(nn.Linear(24, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Towers(nn.Module):
    """Two chains, in a module that does more than call them in turn."""

    def __init__(self):
        super().__init__()
        self.left, self.right = sequential(), sequential()

    def forward(self, x):
        return self.left(x) + self.right(x).tanh()


def sequential():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def after_others():
    """A chain between modules that are none."""
    others = nn.BatchNorm1d(8), nn.Flatten()
    return nn.Sequential(*others, *sequential(), nn.Softplus(), nn.Linear(3, 3))


MODELS = {
    "sequential": sequential,
    "blocks": Blocks,
    "towers": Towers,
    "after others": after_others,
    "norms": Normalized,
}
CHAINS = {"sequential": 1, "blocks": 1, "towers": 2, "after others": 1, "norms": 1}
X = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_ones_are_computed_in_c(monkeypatch):
    monkeypatch.setattr(chain, "LEAST", 0)
    monkeypatch.setattr(fp32, "_guess", lambda: fp32.COMPILED)


@pytest.fixture
def computed(monkeypatch):
    """The names of the functions that were called."""
    names, call = [], chain.KERNEL.__class__.__call__

    def noting(self, function, *arguments):
        if self is chain.KERNEL:
            names.append(function)
        return call(self, function, *arguments)

    monkeypatch.setattr(chain.KERNEL.__class__, "__call__", noting)
    return names


def trained(model, steps=3, **options):
    """Return the losses and the parameters of a loop."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with accelerated(model, optimizer, verbose=False, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values()], torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_by_torch_and_draws_the_same_numbers(computed, name):
    torch.manual_seed(1)
    model = MODELS[name]()
    plain, state = trained(copy.deepcopy(model), fast_chains=False)
    assert not computed
    found, own_state = trained(model)
    assert computed == [*["chain_forward"] * CHAINS[name], *["chain_backward"] * CHAINS[name]] * 3
    assert torch.equal(own_state, state)
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"exact": True}, {"fast_chains": False}])
def test_without_it_bits_are_torchs(computed, options):
    model = sequential()
    plain = copy.deepcopy(model)
    with accelerated(model, verbose=False, **options):
        assert torch.equal(model(X), plain(X))
    assert not computed


def hooked(model):
    model[3].register_forward_hook(lambda *_: None)


def frozen(model):
    model[0].weight.requires_grad_(False)


def parametrized(model):
    parametrize.register_parametrization(model[2], "weight", nn.Identity())


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.5)


def replaced_forward(model):
    model[1].forward = torch.relu


def replaced_layer(model):
    model[1] = nn.Softplus()


def in_fp64(model):
    model.double()


def longer(model):
    model.append(nn.Linear(3, 2))


def transposed(model):
    model[2].weight.data = model[2].weight.data.t()


CHANGES = [hooked, frozen, parametrized, pruned, replaced_forward, replaced_layer, longer, transposed]


#: What leaves a chain of other modules, if it is done before.
STILL_CHAINS = (replaced_layer, longer)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "during"])
def test_model_that_is_not_plain_is_torchs(computed, change, when):
    torch.manual_seed(0)
    model = sequential()
    plain = copy.deepcopy(model)
    x = X.double() if change is in_fp64 else X
    if when == "before":
        change(model)
    with accelerated(model, verbose=False):
        if when == "during":
            model(X)
            assert computed
            computed.clear()
            change(model)
        torch.manual_seed(1)
        found = model(x)
    assert bool(computed) == (when == "before" and change in STILL_CHAINS)
    change(plain)
    if change is longer:
        plain[5].load_state_dict(model[5].state_dict())
    torch.testing.assert_close(found, plain(x))


def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(X).float()


def in_forward_mode(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


def by_vmap(model):
    return torch.func.vmap(model)(X)


def of_a_subclass(model):
    class Own(torch.Tensor):
        pass

    return model(X.as_subclass(Own)).as_subclass(torch.Tensor)


def in_a_mode(model):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        return model(X)


def child_alone(model):
    return model[4](model[3](model[2](model[1](model[0](X)))))


def with_global_hook(model):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return model(X)
    finally:
        handle.remove()


CALLS = [under_autocast, in_forward_mode, by_vmap, of_a_subclass, in_a_mode, child_alone, with_global_hook]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # in forward mode, by torch
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_call_that_is_not_plain_is_torchs(computed, call):
    model = sequential()
    expected = call(copy.deepcopy(model))
    with accelerated(model, verbose=False, channels_last=False):
        found = call(model)
    assert not computed
    torch.testing.assert_close(found, expected)


def test_patched_function_is_called(computed, monkeypatch):
    model, calls, linear = sequential(), [], F.linear
    with accelerated(model, verbose=False):
        monkeypatch.setattr(F, "linear", lambda *args: calls.append(args) or linear(*args))
        model(X)
    assert len(calls) == 3
    assert not computed


def test_wrong_shape_raises_torchs_error():
    model = sequential()
    with accelerated(model, verbose=False), pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(20, 7))


def test_gradients_of_frozen_chain_reach_its_input(computed):
    model = Towers()
    model.left.requires_grad_(False)
    with accelerated(model, verbose=False):
        x = X.clone().requires_grad_()
        model(x).sum().backward()
    expected = X.clone().requires_grad_()
    copy.deepcopy(model)(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
    assert computed == ["chain_forward", "chain_backward"]  # of the right one


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_computes_again_as_before(computed, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.chain = nn.Linear(8, 8), sequential()

        def forward(self, x):
            return checkpoint(self.chain, self.first(x), use_reentrant=use_reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    plain = copy.deepcopy(model)
    with accelerated(model, verbose=False):
        model(X).sum().backward()
    plain(X).sum().backward()
    assert computed == ["chain_forward", "chain_forward", "chain_backward"]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_layers_alone_are_torchs_before_they_are_measured(computed, monkeypatch):
    monkeypatch.setattr(chain, "LEAST", 1 << 30)
    for make, calls in ((sequential, []), (Normalized, ["chain_forward"])):
        model = make()
        with accelerated(model, verbose=False):
            model(X)
        assert computed == calls


def test_evaluation_is_computed_too_without_dropouts(computed):
    model = Blocks().eval()
    x = X.repeat(1, 2)[:, ::2]
    expected = model(x)
    with accelerated(model, verbose=False), torch.no_grad():
        found = model(x)
    assert computed == ["chain_forward"]
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_batch_norm_in_evaluation_is_torchs(computed):
    model = Normalized().eval()
    expected = model(X)
    with accelerated(model, verbose=False):
        assert torch.equal(model(X), expected)
    assert not computed


def test_step_is_for_fp32_and_for_models_with_chains(step):
    parts, others = TrainingObjects([sequential()]), TrainingObjects([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
    assert step(FastChains).is_relevant(parts)
    assert step(FastChains).skip_reason(parts) is None
    assert not step(FastChains).is_relevant(others)
    assert not step(FastChains, precision="bf16").enabled
    assert step(FastChains, precision="bf16", fast_chains=True).skip_reason(parts).code == "not_fp32"


def test_model_that_is_never_computed_is_torchs_again_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(fp32, "_guess", lambda: fp32.TORCH)
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Run(TorchNano):
        def train(self):
            own, stepped = self.setup(model, optimizer)
            for _ in range(LOOKS_FROM):
                own(X).sum().backward()
                stepped.step()
            assert not call_state.interceptors

    run = Run(verbose=False)
    run.train()
    assert run.report["fast_chains"].code == "too_small"


def test_model_is_freed_during_the_run(computed):
    class Run(TorchNano):
        def train(self):
            model = Blocks()
            self.setup(model, torch.optim.SGD(model.parameters(), 0.1))
            model(X)
            reference = weakref.ref(model)
            del model
            gc.collect()
            return reference()

    assert Run(verbose=False).train() is None
    assert computed
