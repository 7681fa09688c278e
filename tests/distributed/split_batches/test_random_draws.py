"""Which random numbers are drawn for the whole batch, and the errors of ranks that diverge."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.small import OPTIONS
from distributed.split_batches.loops import Plain, by_sgd, loader_of, mlp, needs_kernels, vectors, weights
from nano_loop import NanoWarning, TorchNano
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.data_parallel.drawing_operators import drawing
from nano_loop.distributed.data_parallel.random_draws import RandomDraws
from nano_loop.errors import NanoError, NanoWorkerError

pytestmark = needs_kernels


def drawn(ranks, total, draw, in_witness=lambda number: None):
    """Return a rank's draws for a batch of `total` samples, and the lines whose draws are equal on all ranks."""
    torch.manual_seed(5)
    split = ranks.context.split = SplitBatches()
    split.deliver(draw, share := Share.of(total, ranks.rank, ranks.size))
    draws = RandomDraws(ranks, in_witness)
    with drawing(draws.draw, ranks):
        return draw(share.samples), [*draws.drawn_alike]


def test_of_equal_shares_masks_and_noise_like_activations_are_the_batchs(team):
    def draw(count):
        x, weight = torch.zeros(count, 3), nn.Parameter(torch.ones(count, 3))
        by_batch = (
            *(F.dropout(x + 1), torch.randn_like(x), torch.rand_like(x[:, 0]), torch.randint_like(x, 7)),
            *(torch.bernoulli(x + 0.5), torch.empty_like(x).exponential_(), F.dropout(torch.ones(5, count, 2))),
            F.dropout2d(torch.ones(count, 3, 2, 2).contiguous(memory_format=torch.channels_last)),
            F.dropout(torch.ones(2, 3, count).permute(2, 0, 1)),
        )
        alike = F.dropout(weight), torch.randn_like(weight[:, :2]), torch.randn(count, 2), nn.Linear(3, count).weight
        return by_batch, alike, torch.get_rng_state()

    def expected():
        torch.manual_seed(5)
        return draw(8)[0]

    results = team(2)(drawn, 8, draw)
    whole = expected()
    for number, one in enumerate(whole):
        parts = [result[0][0][number] for result in results]
        assert torch.equal(torch.cat(parts, 1 if number == 6 else 0), one), number
    (first, lines), (second, _) = results
    assert all(torch.equal(*pair) for pair in zip(first[1], second[1], strict=True))
    assert torch.equal(first[2], second[2])
    assert len(lines) == 1
    assert lines[0].startswith("test_random_draws.py:")


class Dropping(nn.Sequential):
    def forward(self, x):
        return F.dropout(super().forward(x))


class Equal(Dropping):
    """Compares its settings, as a dataclass does, and has no hash."""

    def __eq__(self, other):
        return type(other) is Equal


@pytest.mark.parametrize(
    "make",
    [Dropping, lambda: Dropping(nn.Identity()), Equal],
    ids=["without layers", "with a layer", "equal to each other"],
)
def test_layout_is_learnt_by_model(team, make):
    """One function trains two models: of unequal shares with time first, and of equal ones with the batch first."""

    def trained(deliver):
        masks = []
        for total, batch_first in ((9, False), (8, True)):
            model, count = make(), deliver(total)
            masks.append(model(torch.ones((count, 4, 2) if batch_first else (4, count, 2))))
        return masks

    def of_rank(ranks):
        torch.manual_seed(5)
        ranks.context.split, draws = SplitBatches(), RandomDraws(ranks)

        def deliver(total):
            share = Share.of(total, ranks.rank, ranks.size)
            ranks.context.split.deliver(trained, share)
            return share.samples

        with drawing(draws.draw, ranks):
            return trained(deliver)

    parts = zip(*team(2)(of_rank), strict=True)
    torch.manual_seed(5)
    for one, other, dimension in zip(parts, trained(int), (1, 0), strict=True):
        assert torch.equal(torch.cat(one, dimension), other)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("total", [8, 9])
def test_slopes_of_an_rrelu_are_the_batchs(team, total, in_place):
    """How many it draws depends on the signs of all earlier samples."""

    def draw(share):
        rows = torch.linspace(-1, 1, 5 * total).reshape(total, 5)[share.start : share.stop].requires_grad_()
        made = F.rrelu(rows.sin() * -1, training=True, inplace=in_place)
        made.sum().backward()
        return made.detach(), rows.grad, F.rrelu(rows.detach(), training=False), torch.rand(2)

    def of_rank(ranks):
        return drawn(ranks, total, lambda count: draw(Share.of(total, ranks.rank, ranks.size)))[0]

    results = team(2)(of_rank)
    torch.manual_seed(5)
    *whole, after = draw(Share(0, total, total, 1))
    for number, one in enumerate(whole):
        assert torch.equal(torch.cat([result[number] for result in results]), one), number
    assert all(torch.equal(result[-1], after) for result in results)


@pytest.mark.parametrize("total", [8, 9])
def test_permutation_of_the_batch_is_an_error(team, total):
    """As in mixup: the samples to mix with are on other ranks. Other permutations equal the plain loop's."""

    def refused(ranks):
        shapes = [[20], [8]]
        with pytest.raises(NanoError, match=r"randperm of the [45] samples that this rank has of [89].*collate_fn"):
            drawn(
                ranks,
                total,
                lambda count: [torch.randperm(20), torch.randperm(count)],
                lambda number: [shapes[number], [0]],
            )
        return True

    assert all(team(2)(refused))


def test_permutation_that_nothing_is_known_of_is_named(team):
    (_, lines), _ = team(2)(drawn, 8, torch.randperm)
    assert len(lines) == 1


SELECTING = r"\[4, 4\] samples.*of the shapes \[\[.*select some of them after"


@pytest.mark.parametrize(
    ("total", "draw", "words"),
    [
        (9, lambda rank: torch.rand(3 - rank), r"\[5, 4\] samples.*\[\[3\], \[2\]\].*omit split_batches"),
        (8, lambda rank: torch.rand(5 + rank), SELECTING),
        (8, lambda rank: F.dropout(torch.ones(4 + rank, 7)), SELECTING),
    ],
    ids=["numbers", "numbers of equal shares", "a mask of packed words"],
)
def test_sizes_that_are_no_shares_are_an_error(team, total, draw, words):
    """As of labels that are drawn for the samples of a mask. One rank may have as many as samples."""

    def refused(ranks):
        with pytest.raises(NanoError, match=words):
            drawn(ranks, total, lambda count: draw(ranks.rank))
        return True

    assert all(team(2)(refused))


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.normal(torch.ones(4), -torch.ones(4)), lambda: torch.bernoulli(torch.full((4,), 2.0))],
    ids=["std", "p"],
)
def test_impossible_parameters_are_torchs_error(team, draw):
    def refused(ranks):
        with pytest.raises(RuntimeError, match=r"std|p_in"):
            drawn(ranks, 8, lambda count: draw())
        return True

    assert all(team(2)(refused))


class Parting(TorchNano):
    def train(self, rank, step=0, part=lambda: torch.rand(1)):
        model = mlp(6, 1)
        optimizer = by_sgd(model)
        self.setup(model, optimizer)
        for number, (x, y) in enumerate(loader_of(*vectors(), batch_size=12)):
            noise = torch.randn(len(x), 1, dtype=torch.float64) if number > 1 else 0  # the witness has ended by then
            if (self.global_rank, number) == (rank, step):
                part()
            F.mse_loss(model(x) + noise, y).backward()
            optimizer.step()


def test_rank_that_draws_alone_is_named_and_lines_drawn_alike_are_reported():
    run = Parting(**OPTIONS, split_batches=True)
    named = r"test_random_draws\.py:\d+ draws random numbers of the shape \[6, 1\]"
    differs = pytest.raises(NanoWorkerError, match="torch's generator differ at step 2")
    with pytest.warns(NanoWarning, match=named), differs as raised:
        run.train(1, step=2, part=functools.partial(torch.manual_seed, 7))  # after the common draws
    assert raised.value.rank == 1
    for step in range(2):
        with pytest.raises(NanoError, match=r"(?s)rank [01] is in a collective.*rank 1:\n.*torch\.rand\(1\)"):
            run.train(1, step)
    with pytest.warns(NanoWarning, match=named):
        run.train(-1)
    assert run.report["split_batches"].code == "drawn_alike"
    assert "test_random_draws.py:" in run.report["split_batches"].detail


def evaluating(run, draws):
    """Train, while rank 0 alone evaluates after each step, and draws random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(mlp(6, 8), nn.Dropout(0.5) if draws else nn.Tanh(), nn.Linear(8, 1).double())
    optimizer, held_out = by_sgd(model), loader_of(*vectors(9), shuffle=False)
    run.setup(model, optimizer)
    for x, y in loader_of(*vectors()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if getattr(run, "global_rank", 0) == 0:
            with torch.no_grad():
                for batch, _ in held_out:
                    model(batch + torch.rand(6, dtype=torch.float64))
    return weights(model), torch.get_rng_state()


class Evaluating(TorchNano):
    def train(self, draws):
        return evaluating(self, draws)


@pytest.mark.parametrize("draws", [True, False])
def test_what_rank_0_draws_alone_after_a_step_leaves_the_ranks_together(draws):
    """All ranks continue from its state, as the plain loop does."""
    own, state = Evaluating(**OPTIONS, split_batches=True).train(draws)
    expected, plain_state = evaluating(Plain(), draws)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(state, plain_state)  # the other rank receives it with the next batch
