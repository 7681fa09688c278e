import pytest
import torch

from nano_loop.distributed.comm.split_batches import Share, SplitBatches
from nano_loop.errors import NanoError


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighted_means_of_shares_are_the_mean_of_the_batch(total, size):
    shares = [Share.of(total, rank, size) for rank in range(size)]
    samples = [float(number**2) for number in range(total)]
    means = [sum(samples[one.start : one.stop]) / one.samples for one in shares]
    weighted = sum(one.weight * mean for one, mean in zip(shares, means, strict=True)) / size
    assert weighted == pytest.approx(sum(samples) / total, rel=1e-12)
    if total >= size:
        assert [number for one in shares for number in range(one.start, one.stop)] == [*range(total)]
        assert max(one.samples for one in shares) - min(one.samples for one in shares) <= 1
    assert all(one.is_whole for one in shares) == (total < size or size == 1)


class Iteration:
    """A placeholder for a loader's iteration."""


@pytest.mark.parametrize(("other", "differs"), [(5, False), (7, True), (4, True), (1, True)])
def test_batches_of_different_shares_for_one_backward_are_an_error(other, differs):
    split, first, second = SplitBatches(), Iteration(), Iteration()
    split.deliver(first, Share.of(7, 0, 2))
    split.deliver(first, Share.of(5, 0, 2))
    split.deliver(second, Share.of(other, 0, 2))
    if differs:
        with pytest.raises(NanoError, match=r"3 of 5, .* samples.*in the same ratio.*multiples of 2"):
            split.begin_backward()
    else:
        assert split.begin_backward() == 1.2


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_batches_that_the_loop_reads_ahead_are_known_and_groups_of_different_shares_are_an_error(reads_ahead):
    split, iteration, full, short = SplitBatches(), Iteration(), Share.of(5, 0, 2), Share.of(4, 0, 2)
    batches = [torch.ones(3), torch.ones(3), torch.ones(2)]
    split.deliver(iteration, full, batches[0])
    if not reads_ahead:
        assert split.begin_backward() == 1.2
    split.deliver(iteration, full, batches[1])
    if reads_ahead:
        split.note_call(batches[0].view(1, 3), trains=True)
        assert split.begin_backward() == 1.2
    split.deliver(iteration, short, batches[2])
    split.note_call(batches[1], trains=True)
    if not reads_ahead:
        with pytest.raises(NanoError, match=r"3 of 5, 2 of 4 samples"):
            split.begin_backward()
        return
    assert split.begin_backward() == 1.2
    split.note_call(batches[2] + 1, trains=True)
    assert split.begin_backward() == 1.0
    split.note_call(batches[1], trains=True)  # used again
    assert split.begin_backward() == 1.2


def test_each_backward_and_the_end_of_an_iteration_make_room_for_another_share():
    split, first, second = SplitBatches(), Iteration(), Iteration()
    split.deliver(first, Share.of(5, 0, 2))
    assert split.begin_backward() == 1.2
    split.deliver(second, Share.of(7, 0, 2))
    assert split.begin_backward() == 8 / 7
    split.deliver(first, Share.of(5, 0, 2))
    del first
    split.deliver(second, Share.of(8, 0, 2))
    assert split.begin_backward() == 1.0
