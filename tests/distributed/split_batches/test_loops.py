"""Ranks that share each batch end with the plain loop's weights and report its losses."""

import pytest
import torch

from distributed.data_parallel.averaged import Setup, make_step
from distributed.small import OPTIONS
from distributed.split_batches.loops import LOOPS, Plain, Shared, needs_kernels, trained
from nano_loop import NanoConfigError, TorchNano
from nano_loop.api.collectives import _of_tensors
from nano_loop.distributed.comm.split_batches import SplitBatches
from nano_loop.distributed.comm.tensor_collectives import reduced
from nano_loop.distributed.data_parallel.sync_batch_norm import norms_over_all_ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.sharding import Sharding

pytestmark = needs_kernels
#: Relative to the largest element.
TOLERANCES = {"adam": 1e-9, "lbfgs": 1e-6}


@pytest.fixture(scope="module")
def plain():
    return trained(Plain(), LOOPS)


def assert_equal(found, plain):
    wrong = []
    for name, expected in plain.items():
        for number, (one, other) in enumerate(zip(found[name], expected, strict=True)):
            off = float((one - other).abs().max() / other.abs().max())
            if not off <= TOLERANCES.get(name, 1e-12):
                wrong.append(f"{name}[{number}] is off by {off:.1e}")
    assert not wrong, wrong


def test_two_ranks_compute_what_one_process_computes(plain):
    run = Shared(**OPTIONS, split_batches=True)
    assert_equal(run.train([*LOOPS]), plain)
    assert run.report["loaders"].status == "applied"


def test_ranks_agree_after_a_step_in_which_one_of_them_had_no_gradient_of_a_layer(plain):
    """The only model of a run, so that its gradients are few enough to be posted before the ranks agree."""
    name = "experts"
    assert_equal(Shared(**OPTIONS, split_batches=True).train([name]), {name: plain[name]})


def test_fp32_is_as_near_to_fp64_as_one_process(plain):
    """Loops without random draws, which depend on the dtype."""
    names = ["sgd", "adam", "accumulation", "clipping", "padding", "norms"]
    run = Shared(**OPTIONS, split_batches=True, precision=32)
    ours, theirs = run.train(names, dtype=torch.float32), trained(Plain(), names, dtype=torch.float32)
    wrong = []
    for name in names:
        for number, (one, other, exact) in enumerate(zip(ours[name], theirs[name], plain[name], strict=True)):
            own, plains = (float((each.double() - exact).norm() / exact.double().norm()) for each in (one, other))
            if not own <= 2 * plains + 1e-7:
                wrong.append(f"{name}[{number}] is off by {own:.1e}, one process by {plains:.1e}")
    assert run.report["split_batches"].status == "applied"
    assert not wrong, wrong


class SetUp(TorchNano):
    def train(self, model):
        self.setup(model, torch.optim.SGD(model.parameters(), 0.1))


def test_torch_that_does_not_say_kernels_is_refused(monkeypatch):
    monkeypatch.setattr("nano_loop.distributed.data_parallel.drawing_operators.gives_kernels", lambda: False)
    with pytest.raises(NanoConfigError, match=r"2\.9 and later do\. Remove split_batches=True"):
        SetUp(**OPTIONS, split_batches=True).train(torch.nn.Linear(2, 1))


class OfTeam:
    """Passed to a loop by a team, which may have more ranks than this machine has cores."""

    def __init__(self, ranks):
        self.ranks, self.global_rank = ranks, ranks.rank
        ranks.context.split = SplitBatches()
        self.loaders = make_step(Sharding, ranks)[0]
        self.averaged = Setup(ranks)
        self.norms = norms_over_all_ranks(ranks)
        self.norms.__enter__()
        self.no_backward_sync = lambda model, enabled: self.averaged.paused(*[model] * enabled)

    def setup(self, model, optimizer):
        self.averaged.setup(model, optimizer)
        self.loaders.observe(TrainingObjects(models=[model], optimizers=[optimizer]))

    def all_reduce(self, data, reduce_op="mean"):
        return _of_tensors(lambda tensor: reduced(self.ranks, tensor, None, reduce_op), data)

    def share(self):
        return self.ranks.context.split.weight / self.ranks.size

    def close(self):
        self.norms.__exit__(None, None, None)
        self.averaged.close()
        self.loaders.undo()


def of_team(ranks, loop, *args):
    """Return the result of ``loop(run, *args)`` on one rank of a team."""
    run = OfTeam(ranks)
    try:
        return loop(run, *args)
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_compute_what_one_process_computes(team, plain, size):
    for found in team(size)(of_team, trained, [*LOOPS]):
        assert_equal(found, plain)
