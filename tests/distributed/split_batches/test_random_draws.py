"""Which random numbers are drawn for the whole batch, and what ranks that part are told."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.small import OPTIONS
from distributed.split_batches.loops import by_sgd, loader_of, mlp, needs_kernels, vectors
from nano_loop import TorchNano
from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.distributed.data_parallel.random_draws import RandomDraws, drawing, order_of
from nano_loop.errors import NanoError, NanoWorkerError

pytestmark = needs_kernels


def drawn(ranks, total, draw, in_witness=lambda number: None):
    """What a rank draws of a batch of so many samples, and the lines that are drawn alike."""
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


def test_sizes_of_unequal_shares_tell(team):
    def draw(count):
        flattened, heads = torch.randn(count * 3, 2), torch.rand(5, count, 2)
        alike = torch.randn(5), torch.randn(4, 3), nn.Linear(3, 5).weight, nn.init.orthogonal_(torch.empty(4, 4))
        return flattened, heads, alike, torch.get_rng_state()

    torch.manual_seed(5)
    flattened, heads, alike, state = draw(9)
    (first, lines), (second, _) = team(2)(drawn, 9, draw)
    assert torch.equal(torch.cat([first[0], second[0]]), flattened)
    assert torch.equal(torch.cat([first[1], second[1]], 1), heads)
    for one in first, second:
        assert all(torch.equal(*pair) for pair in zip(one[2], alike, strict=True))
        assert torch.equal(one[3], state)
    assert not lines


def test_equal_shares_are_divided_as_the_witness_draws(team):
    def draw(count):
        weight = torch.empty(count, 3).normal_()  # which is as large in the witness
        by_batch = torch.randn(count, 2), torch.rand(count * 3), torch.empty(5, count).bernoulli_(0.5)
        return by_batch, weight, torch.get_rng_state()

    def in_witness(number):
        shapes = [(4, 3), (8, 2), (24,), (5, 8)]
        return [[*shapes[number]], order_of(torch.empty(shapes[number]))] if number < 4 else None

    torch.manual_seed(5)
    alike = torch.empty(4, 3).normal_()
    expected, state = [torch.randn(8, 2), torch.rand(24), torch.empty(5, 8).bernoulli_(0.5)], torch.get_rng_state()
    (first, lines), (second, _) = team(2)(drawn, 8, draw, in_witness)
    for number, one in enumerate(expected):
        assert torch.equal(torch.cat([first[0][number], second[0][number]], number // 2), one)
    for rank in first, second:
        assert torch.equal(rank[1], alike)
        assert torch.equal(rank[2], state)
    assert not lines


@pytest.mark.parametrize("total", [8, 9])
def test_permutation_of_the_batch_is_an_error(team, total):
    """As of mixup: the samples to mix with are on other ranks. Others are the plain loop's."""

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


def test_sizes_that_are_no_shares_are_an_error(team):
    def refused(ranks):
        with pytest.raises(NanoError, match=r"\[5, 4\] samples.*\[\[3\], \[2\]\].*omit split_batches"):
            drawn(ranks, 9, lambda count: torch.rand(count - 2 + ranks.rank * 0))
        return True

    assert all(team(2)(refused))


IMPOSSIBLE = {
    "std": lambda: torch.normal(torch.ones(4), -torch.ones(4)),
    "p": lambda: torch.bernoulli(torch.full((4,), 2.0)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_parameters_are_torchs_error(team, name):
    draw = IMPOSSIBLE[name]

    def refused(ranks):
        with pytest.raises(RuntimeError, match=r"std|p_in"):
            drawn(ranks, 8, lambda count: draw())
        return True

    assert all(team(2)(refused))


class Parting(TorchNano):
    def train(self, rank):
        model = mlp(6, 1)
        optimizer = by_sgd(model)
        self.setup(model, optimizer)
        for number, (x, y) in enumerate(loader_of(*vectors(), batch_size=12)):
            noise = torch.randn(len(x), 1, dtype=torch.float64) if number else 0  # the witness has ended by then
            if self.global_rank == rank:
                torch.rand(1)
            F.mse_loss(model(x) + noise, y).backward()
            optimizer.step()


def test_rank_that_draws_alone_is_named_and_lines_drawn_alike_are_reported():
    run = Parting(**OPTIONS, split_batches=True)
    with pytest.raises(NanoWorkerError, match="torch's generator differ at step 0") as raised:
        run.train(1)
    assert raised.value.rank == 1
    run.train(-1)
    assert run.report["split_batches"].code == "drawn_alike"
    assert "test_random_draws.py:" in run.report["split_batches"].detail
