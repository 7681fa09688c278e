"""bf16 weights train bitwise as with a manual fp32 master; moments in bf16 train as those in fp32."""

import contextlib
import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nano_loop import NanoConfigError, accelerated, nano
from nano_loop.optimizers.split_steps import KERNEL

QUIET = {"verbose": False}
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 1))


def loss_of(model, step):
    rows = slice(step * 16 % 64, step * 16 % 64 + 16)
    return nn.functional.mse_loss(model(X[rows]), Y[rows])


def nearest(wide):
    """Round fp32 to bf16, with ties away from zero."""
    return ((wide.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class ByHand:
    """Keeps fp32 masters of a model's bf16 weights, written out by hand."""

    def __init__(self, model, make):
        self.weights = [*model.parameters()]
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
        self.inner = make(self.masters)
        self.param_groups, self.state_dict = self.inner.param_groups, self.inner.state_dict
        self._round()

    def _round(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data = nearest(master.detach())

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.inner.step()
        self._round()
        return loss

    def add_param_group(self, group):
        for weight in group["params"]:
            self.weights.append(weight)
            self.masters.append(nn.Parameter(weight.detach().float()))
        self.inner.add_param_group({**group, "params": self.masters[-len(group["params"]) :]})


class Narrow(nn.Module):
    """Keeps its weights in bf16, converted by hand."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getitem__(self, place):
        return self.model[place]

    def forward(self, x):
        return self.model(x.bfloat16()).float()


def plainly(model, optimizer):
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def accumulated(model, optimizer):
    for step in range(8):
        (loss_of(model, step) / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def with_missing_gradients(model, optimizer):
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model[2 * (step % 3)].weight.grad = None
        optimizer.step()


def with_closures(model, optimizer):
    for step in range(8):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def with_other_settings(model, optimizer):
    for step in range(8):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 / (step + 1), 0.1 * step
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def unfrozen(model, optimizer):
    for step in range(8):
        for weight in model[2].parameters():
            weight.requires_grad_(step > 3)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def with_a_group_added(model, optimizer):
    plainly(model, optimizer)
    torch.manual_seed(3)
    added = nn.Parameter(torch.randn(1).to(model[0].weight.dtype))
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    for step in range(8):
        optimizer.zero_grad()
        (loss_of(model, step) * added.float()).backward()
        optimizer.step()


LOOPS = (
    *(plainly, accumulated, with_closures),
    *(with_other_settings, with_missing_gradients, unfrozen, with_a_group_added),
)
OPTIMIZERS = {
    "adam": lambda each: ADAM(each, 0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda each: ADAM(each, 0.01, amsgrad=True, maximize=True, fused=True),
    "adamw": lambda each: ADAMW(each, 0.01, betas=(0.4, 0.99), fused=True),
    "adamw, rate in a tensor": lambda each: ADAMW(each, torch.tensor(0.01), fused=True),
    "sgd": lambda each: SGD(each, 0.01, fused=True),
    "momentum": lambda each: SGD(each, 0.01, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
    "nesterov": lambda each: SGD(each, 0.01, momentum=0.9, nesterov=True, fused=True),
    "one that is cast": lambda each: torch.optim.RMSprop(each, 0.001, momentum=0.5),
    "by torch's loop": lambda each: ADAM(each, 0.01, betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False),
}
STEPPED_IN_C = [*OPTIMIZERS][:7]


def states_in(state_dict):
    return [value for state in state_dict["state"].values() for value in state.values()]


def states_of(optimizer):
    return states_in(optimizer.state_dict())


def assert_equal(mine, others):
    assert len(mine) == len(others)
    for one, other in zip(mine, others, strict=True):
        assert one is other is None or (one.dtype is other.dtype and torch.equal(one, other))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_and_states_are_those_of_fp32_masters_to_the_bit(kind):
    # torch's fused SGD raises if only some momenta exist.
    for loop in LOOPS if kind == "adamw" else LOOPS[:3] if kind == "momentum" else LOOPS[:1]:
        plain = network()
        by_hand = ByHand(plain, OPTIMIZERS[kind])
        loop(Narrow(plain), by_hand)
        model = network()
        optimizer, calls = OPTIMIZERS[kind](model.parameters()), KERNEL.calls
        nano(precision="bf16-true", **QUIET)(loop)(model, optimizer)
        weights = [*model.parameters()]
        assert_equal(weights, by_hand.masters[: len(weights)])
        assert_equal(states_of(optimizer), states_of(by_hand))
        assert (KERNEL.calls > calls) is (kind in STEPPED_IN_C)


@pytest.mark.parametrize("options", [{"precision": "bf16-true"}, {}], ids=["split", "fp32"])
@pytest.mark.parametrize("moments", ["32", "bf16"])
@pytest.mark.parametrize("make", [ADAMW, lambda each: SGD(each, 0.01, momentum=0.9)], ids=["adamw", "momentum"])
def test_checkpoints_are_torch_s_and_load_on_both_sides(options, moments, make):
    saved = {}

    def save(model, optimizer):
        plainly(model, optimizer)
        saved["optimizer"] = copy.deepcopy(optimizer.state_dict())
        saved["model"] = copy.deepcopy(model.state_dict())

    def load(model, optimizer):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        saved["again"] = copy.deepcopy(optimizer.state_dict())
        plainly(model, optimizer)

    model = network()
    optimizer = make(model.parameters())
    ours = nano(**options, optimizer_state=moments, **QUIET)
    ours(save)(model, optimizer)
    assert {value.dtype for value in states_of(optimizer)} == {torch.float32}
    assert_equal(states_of(optimizer), states_in(saved["optimizer"]))
    ends = []
    for around in (ours, lambda function: function):
        other = network()
        another = make(other.parameters())
        around(load)(other, another)
        assert_equal(states_in(saved["again"]), states_of(optimizer))
        assert {value.dtype for value in states_of(another)} == {torch.float32}
        ends.append(nn.utils.parameters_to_vector(other.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=0, atol=0.05)
    optimizer.load_state_dict(saved["optimizer"])
    plainly(model, optimizer)  # plain torch continues with both
    with accelerated(model, optimizer, **options, optimizer_state=moments, **QUIET):
        plainly(model, optimizer)


def test_moments_are_bf16_in_the_run_and_seeds_give_equal_runs():
    def loop(model, optimizer):
        plainly(model, optimizer)
        return {value.dtype for state in optimizer.state.values() for name, value in state.items() if name != "step"}

    for precision in (32, "bf16-true"):
        ends = []
        for _ in range(2):
            model = network()
            before = torch.get_rng_state()
            optimizer = ADAMW(model.parameters(), 0.01)
            assert nano(precision=precision, optimizer_state="bf16", **QUIET)(loop)(model, optimizer) == {
                torch.bfloat16
            }
            assert torch.equal(before, torch.get_rng_state())
            ends.append([*model.parameters()])
        assert_equal(*ends)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_of_an_optimizer_have_torchs_states_and_steps(made):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with accelerated(model, optimizer, optimizer_state="bf16", verbose=False):
        plainly(model, optimizer)
        twin, of_twin = made((model, optimizer))
        assert {state.dtype for state in states_of(of_twin)} == {torch.float32}
        plainly(twin, of_twin)


def test_weights_that_the_program_writes_begin_anew():
    def loop(model, optimizer):
        plainly(model, optimizer)
        model[2].weight.data.mul_(0)  # a negative remainder of a zero would become NaN
        model[0].weight.data = model[0].weight.data * 2
        return model[0].weight.float(), model[2].weight.float()

    model = network()
    found = nano(precision="bf16-true", **QUIET)(loop)(model, ADAMW(model.parameters(), 0.01))
    assert_equal([model[0].weight, model[2].weight], [*found])


@pytest.mark.parametrize("made", ["passed", "before the run", "in the run"])
def test_averages_of_weights_move_as_in_fp32(made):
    def average_of(model):
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def loop(model, optimizer, average=None):
        average = average or (average_of(model) if made == "in the run" else before)
        for _ in range(20):
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            average.update_parameters(model)
        return average

    moves = []
    for run in (lambda function: function, nano(precision="bf16-true", **QUIET)):
        model = network()
        start, before = nn.utils.parameters_to_vector(model.parameters()).detach(), average_of(model)
        average = run(loop)(model, SGD(model.parameters(), 2.0**-10), *([before] if made == "passed" else []))
        moves.append(nn.utils.parameters_to_vector(p.float() for p in average.parameters()).detach() - start)
    bound = 0.1 if made == "in the run" else 1e-5  # such a copy is in bf16 after the run
    assert (moves[1] - moves[0]).norm() < bound * moves[0].norm()


class DecayingLater(SGD):
    """Changes weights after the step of its base class by less than bf16 can hold."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(1 - 1e-4)
        return loss


def test_what_a_class_does_after_the_step_of_its_base_is_not_lost():
    SGD(network().parameters(), 0)  # from now on, torch also calls the hooks in the step of the base class
    models = network(), network()
    plainly(models[0], DecayingLater(models[0].parameters(), 0.0))
    nano(precision="bf16-true", **QUIET)(plainly)(models[1], DecayingLater(models[1].parameters(), 0.0))
    assert_equal(*([*model.parameters()] for model in models))


def test_two_optimizers_of_one_weight_share_its_rest():
    def loop(model, *optimizers):
        for _, optimizer in itertools.product(range(50), optimizers):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    rate = 2.0**-12
    nano(precision="bf16-true", **QUIET)(loop)(model, SGD(model.parameters(), rate), SGD(model.parameters(), rate))
    assert model.weight.item() == 1 - 100 * rate


@pytest.mark.parametrize(
    ("options", "make", "given"),
    [
        ({"exact": True}, None, "exact"),
        ({"precision": 64}, None, "precision=64"),
        ({}, torch.optim.RMSprop, "RMSprop"),
        ({}, lambda each: ADAM(each, capturable=True), "Adam"),
        ({}, lambda each: ADAM(each, differentiable=True), "Adam"),
    ],
    ids=["exact", "64", "another optimizer", "capturable", "differentiable"],
)
def test_what_cannot_have_bf16_moments_is_an_error_of_three_parts(options, make, given):
    model = network()
    with pytest.raises(NanoConfigError, match=r"(Omit|Remove) ") as raised:
        nano(**options, optimizer_state="bf16", **QUIET)(plainly)(model, (make or ADAM)(model.parameters()))
    assert "optimizer_state='bf16'" in str(raised.value)
    assert given in str(raised.value)


def test_other_dtypes_and_sparse_gradients_are_errors_too():
    for model in (network().double(), network().bfloat16()):
        with pytest.raises(NanoConfigError, match="fp32"):
            nano(optimizer_state="bf16", **QUIET)(plainly)(model, ADAM(model.parameters()))
    table = nn.Embedding(10, 3, sparse=True)

    def loop(table, optimizer):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(NanoConfigError, match="dense"):
        nano(optimizer_state="bf16", **QUIET)(loop)(table, SGD(table.parameters(), 0.1, momentum=0.9))
    for momentum in (0, 0.9):  # a momentum is sparse, too
        table.zero_grad()
        plain = copy.deepcopy(table)
        loop(plain, SGD(plain.parameters(), 0.1, momentum=momentum))
        nano(precision="bf16-true", **QUIET)(loop)(table, SGD(table.parameters(), 0.1, momentum=momentum))
        torch.testing.assert_close(table.weight, plain.weight, rtol=0.01, atol=0.01)


def test_the_report_says_what_is_in_c():
    trainer = nano(precision="bf16-true", optimizer_state="bf16", **QUIET)(plainly)
    model = network()
    trainer(model, ADAMW(model.parameters()))
    assert trainer.report["optimizer_state"].status == "applied"
    assert "bf16" in trainer.report["optimizer_state"].detail
    assert trainer.report["fused_optimizer"].detail == "AdamW"
    trainer = nano(precision="bf16-true", **QUIET)(plainly)
    trainer(model, torch.optim.RMSprop(model.parameters()))
    assert "RMSprop is not SGD, Adam or AdamW" in trainer.report["optimizer_state"].detail
    trainer = nano(**QUIET)(plainly)
    trainer(model, ADAMW(model.parameters()))
    assert "optimizer_state" not in {*trainer.report.applied, *trainer.report.skipped}


def test_without_c_weights_keep_their_rests(monkeypatch):
    monkeypatch.setattr(KERNEL, "unavailable", "there are no C kernels")
    model = network()
    plain = network()
    by_hand = ByHand(plain, OPTIMIZERS["adamw"])
    plainly(Narrow(plain), by_hand)
    nano(precision="bf16-true", **QUIET)(plainly)(model, ADAMW(model.parameters(), 0.01, betas=(0.4, 0.99), fused=True))
    assert_equal([*model.parameters()], by_hand.masters)
    with pytest.raises(NanoConfigError, match="no C kernels"):
        nano(optimizer_state="bf16", **QUIET)(plainly)(model, ADAMW(model.parameters()))


class Failing(torch.optim.Adagrad):
    """Raises in every other step, before or after its update."""

    failure = "before"

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count % 2 and self.failure == "before":
            raise ArithmeticError
        super().step(closure)
        if self.count % 2:
            raise ArithmeticError


def with_failures(model, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with contextlib.suppress(ArithmeticError, RuntimeError):
            optimizer.step()
    return [weight.detach().clone().float() for weight in model.parameters()]


@pytest.mark.parametrize("failure", ["before", "after"])
def test_the_loop_may_go_on_after_a_step_that_raises(failure):
    def trained(run):
        model = network()
        optimizer = Failing(model.parameters(), 0.01)
        optimizer.failure = failure
        run(model, optimizer)
        return [weight.detach() for weight in model.parameters()]

    ours = trained(nano(precision="bf16-true", **QUIET)(with_failures))
    for found, expected in zip(ours, trained(with_failures), strict=True):
        assert (found - expected).abs().max() < 0.1


def test_steps_that_torch_refuses_change_no_weight():
    """torch refuses to step leaves differentiably."""
    model, before = network(), [*network().parameters()]
    nano(precision="bf16-true", **QUIET)(with_failures)(model, SGD(model.parameters(), 0.1, differentiable=True))
    for found, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gradient_is_zeroed_after_a_step_that_raises(set_to_none):
    model = network()

    def loop(model, optimizer):
        loss_of(model, 0).backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        optimizer.zero_grad(set_to_none)
        (model(X) * 0).sum().backward()
        return max(weight.grad.abs().max().item() for weight in model.parameters())

    optimizer = SGD(model.parameters(), 0.1, differentiable=True)
    assert nano(precision="bf16-true", **QUIET)(loop)(model, optimizer) == 0
