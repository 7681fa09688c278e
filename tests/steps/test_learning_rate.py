"""Within a step the learning rate is scaled for the ranks; everywhere else it is the user's."""

import copy
import io

import pytest
import torch
from loops.test_schedulers import SCHEDULERS
from torch import nn
from watched import FusedCalls

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.split_batches import SplitBatches
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import learning_rate
from nano_loop.steps.fused_optimizer import FusedOptimizer
from nano_loop.steps.learning_rate import LearningRate


class Alike(Ranks):
    """One of several ranks with equal values, without the others."""

    def broadcast(self, value, source=0):
        return value


FOUR = Alike(0, 4)


@pytest.fixture
def of_four(step):
    """Apply the step to an optimizer on one of four ranks."""

    def apply(optimizer):
        made = step(LearningRate, ranks=FOUR)
        made.apply(TrainingObjects(optimizers=[optimizer]))
        return made

    return apply


def weight():
    return nn.Parameter(torch.zeros(()))


def moved(optimizer, parameter):
    """Take a step with a gradient of 1, and return the update by plain SGD: the effective learning rate."""
    before = float(parameter.detach())
    parameter.grad = torch.ones(())
    optimizer.step()
    return before - float(parameter.detach())


def at_step(optimizer, step):
    """Make the optimizer's count of steps `step`."""
    state = optimizer.state_dict()
    state["param_groups"][0]["auto_lr_step"] = step
    optimizer.load_state_dict(state)


@pytest.fixture
def ramped(of_four):
    """Make an optimizer of one of four ranks after some steps; return it, its weight and the step."""

    def make(taken=1000, lr=0.5, kind=torch.optim.SGD, **options):
        one = weight()
        optimizer = kind([one], lr=lr, **options)
        made = of_four(optimizer)
        if taken is not None:
            at_step(optimizer, taken)
        return optimizer, one, made

    return make


def test_it_is_for_several_ranks_that_want_it(step):
    assert step(LearningRate, ranks=FOUR).enabled
    assert not step(LearningRate, ranks=FOUR, auto_lr=False).enabled
    assert not step(LearningRate).enabled
    assert not step(LearningRate, ranks=FOUR).required


@pytest.mark.parametrize(("taken", "ratio"), [(0, 1), (1, 1.003), (500, 2.5), (999, 3.997), (1000, 4), (5000, 4)])
def test_ratio_grows_from_one_to_the_number_of_ranks(ramped, taken, ratio):
    optimizer, one, _ = ramped(taken)
    assert moved(optimizer, one) == pytest.approx(0.5 * ratio)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_first_step_is_the_users_to_the_bit_and_each_step_counts(ramped, monkeypatch):
    monkeypatch.setattr(learning_rate, "WARM_UP", 2)
    optimizer, one, made = ramped(None)
    made.apply(TrainingObjects(optimizers=[optimizer]))  # set up again: no second ramp
    assert [moved(optimizer, one) for _ in range(4)] == [0.5, 0.5 * 2.5, 2.0, 2.0]


def test_groups_keep_their_ratio_and_one_without_lr_is_left_alone(of_four):
    class Mine(torch.optim.Optimizer):
        seen = ()

        def step(self):
            self.seen = [group.get("lr") for group in self.param_groups]

    optimizer = Mine(
        [{"params": [weight()], "lr": 0.5}, {"params": [weight()]}, {"params": [weight()], "lr": None}], {}
    )
    of_four(optimizer)
    at_step(optimizer, 1000)
    optimizer.step()
    assert optimizer.seen == [2.0, None, None]
    assert [group.get("lr", "none") for group in optimizer.param_groups] == [0.5, "none", None]


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own call
@pytest.mark.parametrize("built_first", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_see_what_they_would_see_without_it(of_four, name, built_first):
    rates, steps = [], []
    for accelerated in (False, True):
        one = weight()
        optimizer = torch.optim.SGD([one], lr=0.5, momentum=0.5)
        scheduler = SCHEDULERS[name](optimizer) if built_first else None
        if accelerated:
            of_four(optimizer)
            at_step(optimizer, 1000)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        momentum = [optimizer.param_groups[0]["momentum"]]
        for _ in range(8):
            optimizer.param_groups[0]["momentum"] = 0
            steps.append((accelerated, moved(optimizer, one)))
            optimizer.param_groups[0]["momentum"] = momentum[-1]
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
            rates.append((accelerated, optimizer.param_groups[0]["lr"]))
    assert [each for accelerated, each in rates if accelerated] == [each for on, each in rates if not on]
    plain = [each for accelerated, each in steps if not accelerated]
    assert [each for accelerated, each in steps if accelerated] == pytest.approx([4 * each for each in plain], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_tensor_stays_the_same_object_and_value(ramped, options):
    optimizer, one, _ = ramped(lr=torch.tensor(0.5), kind=torch.optim.Adam, **options)
    lr = optimizer.param_groups[0]["lr"]  # load_state_dict copies it
    assert moved(optimizer, one) == pytest.approx(2.0, rel=1e-5)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.5


def test_fused_kernels_take_the_scaled_rate(step, of_four):
    one = weight()
    optimizer = torch.optim.SGD([one], lr=0.5)
    step(FusedOptimizer, fused_optimizer=True).apply(TrainingObjects(optimizers=[optimizer]))
    of_four(optimizer)
    at_step(optimizer, 1000)
    with FusedCalls() as calls:
        assert moved(optimizer, one) == 2.0
    assert calls.names == ["_fused_sgd_"]


def test_closure_sees_the_users_rate_and_one_that_it_sets_is_scaled_and_stays(ramped):
    optimizer, one, _ = ramped()
    rates = [0.5, 0.5, 0.25]

    def closure():
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = rates[len(seen) - 1]
        one.grad = torch.ones(())
        return 7.0

    seen = []
    assert optimizer.step(closure) == 7.0
    assert optimizer.step(closure=closure) == 7.0
    assert one.item() == -4.0
    optimizer.step(closure)
    assert one.item() == -5.0
    assert seen == [0.5, 0.5, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_rate_that_the_step_itself_sets_stays(ramped):
    class Decays(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] = 0.25

    optimizer, *_ = ramped(kind=Decays)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


class Fails(torch.optim.SGD):
    """Raises in its step, once."""

    failed = False

    def step(self, closure=None):
        if not self.failed:
            self.failed = True
            raise ValueError("in the step")
        return super().step(closure)


def test_step_that_raises_neither_counts_nor_scales_twice(ramped, monkeypatch):
    monkeypatch.setattr(learning_rate, "WARM_UP", 1)
    optimizer, one, made = ramped(1, kind=Fails)

    def fail():
        optimizer.failed = False
        with pytest.raises(ValueError, match="in the step"):
            optimizer.step()

    fail()
    group = optimizer.state_dict()["param_groups"][0]
    assert (group["lr"], group["auto_lr_step"]) == (0.5, 1)
    fail()
    assert moved(optimizer, one) == 2.0
    fail()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    made.undo()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_left_alone(step, line_search):
    made = step(LearningRate, ranks=FOUR)
    one = weight()
    lbfgs = torch.optim.LBFGS([one], line_search_fn=line_search)
    assert made.skip_reason(TrainingObjects(optimizers=[lbfgs])).code == "lbfgs"
    detail = made.apply(TrainingObjects(optimizers=[lbfgs, torch.optim.SGD([weight()], lr=0.5)]))
    assert detail == "ramps to 4× over 1,000 steps (auto_lr); LBFGS searches its own step length"
    rates = []
    one.grad = torch.ones(())
    for _ in range(2):  # the ratio of the first step is 1
        lbfgs.step(lambda: rates.append(lbfgs.param_groups[0]["lr"]) or 0.0)
    lbfgs.register_step_pre_hook(lambda *_: rates.append(lbfgs.param_groups[0]["lr"]))
    lbfgs.step(lambda: 0.0)
    assert {*rates} == {1}


def test_steps_are_in_the_checkpoint_and_never_in_the_groups(ramped, monkeypatch):
    monkeypatch.setattr(learning_rate, "WARM_UP", 10)
    optimizer, one, _ = ramped(None)
    for _ in range(5):
        moved(optimizer, one)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    assert state["param_groups"][0]["auto_lr_step"] == 5
    assert "auto_lr_step" not in optimizer.param_groups[0]
    resumed, other, _ = ramped(None, lr=0.1)
    resumed.load_state_dict(state)
    assert state["param_groups"][0]["auto_lr_step"] == 5
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert moved(resumed, other) == pytest.approx(0.5 * 2.5)


def test_copies_and_what_is_left_are_plain(ramped):
    optimizer, one, made = ramped()
    twin = copy.deepcopy(optimizer)
    assert moved(twin, twin.param_groups[0]["params"][0]) == 0.5
    made.undo()
    assert moved(optimizer, one) == 0.5
    assert "auto_lr_step" not in optimizer.state_dict()["param_groups"][0]


def test_ramp_goes_on_in_the_next_run_of_the_optimizer(of_four, ramped, monkeypatch):
    monkeypatch.setattr(learning_rate, "WARM_UP", 4)
    one = weight()
    optimizer, steps = torch.optim.SGD([one], lr=1.0), []
    for _ in range(3):
        made = of_four(optimizer)
        steps += [moved(optimizer, one), moved(optimizer, one)]
        made.undo()
    assert steps == pytest.approx([1, 1.75, 2.5, 3.25, 4, 4])
    another, other, _ = ramped(None, lr=1.0)
    assert moved(another, other) == 1.0, "the next optimizer begins anew"


@pytest.mark.parametrize("taken", [None, 2])
def test_checkpoint_that_was_loaded_between_two_runs_counts(of_four, ramped, monkeypatch, taken):
    monkeypatch.setattr(learning_rate, "WARM_UP", 4)
    checkpoint = torch.optim.SGD([weight()], lr=1.0).state_dict()
    if taken is not None:
        checkpoint["param_groups"][0]["auto_lr_step"] = taken
    optimizer, one, made = ramped(lr=1.0)
    made.undo()
    optimizer.load_state_dict(checkpoint)
    assert moved(optimizer, one) == 1.0, "outside a run, nothing is scaled"
    of_four(optimizer)
    assert "auto_lr_step" not in optimizer.param_groups[0]
    assert moved(optimizer, one) == (1.0 if taken is None else 2.5)


def test_rate_of_the_users_own_ddp_is_left_alone(step, monkeypatch):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)

    class Ddp(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    monkeypatch.setattr(learning_rate, "DistributedDataParallel", Ddp)  # torch's needs a process group
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, other)]
    made = step(LearningRate, ranks=FOUR)
    parts = TrainingObjects([Ddp(model)], optimizers[:1])
    made.observe(parts)
    assert made.skip_reason(parts).code == "users_ddp"
    made.observe(TrainingObjects([other], optimizers))
    assert made.apply(TrainingObjects([other], optimizers)).startswith(
        "ramps to 4× over 1,000 steps (auto_lr); the model is your"
    )
    at_step(optimizers[1], 1000)
    for optimizer, rate in zip(optimizers, (1, 4), strict=True):
        _, bias = optimizer.param_groups[0]["params"]
        before, bias.grad = bias.detach().clone(), torch.ones(1)
        optimizer.step()
        torch.testing.assert_close(before - bias.detach(), torch.full((1,), float(rate)))


def test_ramp_stands_still_while_all_ranks_compute_the_same(step):
    one, ranks = weight(), Alike(0, 4)
    optimizer = torch.optim.SGD([one], lr=0.5)
    made = step(LearningRate, ranks=ranks)
    made.apply(TrainingObjects(optimizers=[optimizer]))
    at_step(optimizer, 500)
    ranks.context.sharding.undivided = True
    assert moved(optimizer, one) == 0.5
    assert made.final_result().code == "same_batches"
    ranks.context.sharding.undivided = False
    assert moved(optimizer, one) == pytest.approx(0.5 * 2.5)
    assert made.final_result() is None
    assert optimizer.state_dict()["param_groups"][0]["auto_lr_step"] == 501


def test_ranks_that_share_each_batch_keep_the_rate(step):
    ranks = Alike(0, 4)
    ranks.context.split = SplitBatches()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    made = step(LearningRate, ranks=ranks)
    assert made.skip_reason(TrainingObjects(optimizers=[optimizer])).code == "split_batches"
