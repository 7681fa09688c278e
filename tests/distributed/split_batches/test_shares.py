import pytest

from nano_loop.distributed.comm.split_batches import Share, SplitBatches


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighted_means_of_shares_are_the_mean_of_the_batch(total, size):
    shares = [Share.of(total, rank, size) for rank in range(size)]
    samples = [float(number**2) for number in range(total)]
    means = [sum(samples[one.start : one.stop]) / one.count for one in shares]
    weighted = sum(one.weight * mean for one, mean in zip(shares, means, strict=True)) / size
    assert weighted == pytest.approx(sum(samples) / total, rel=1e-12)
    if total >= size:
        assert [number for one in shares for number in range(one.start, one.stop)] == [*range(total)]
        assert max(one.count for one in shares) - min(one.count for one in shares) <= 1
    assert all(one.is_whole for one in shares) == (total < size or size == 1)


@pytest.mark.parametrize(("total", "expected"), [(8, 2.0), (1, 1.0)])
def test_share_of_a_sum_weighs_as_many_times_as_there_are_ranks(total, expected):
    assert SplitBatches(Share.of(total, 0, 2), "sum").weight == expected
    assert SplitBatches().weight == 1.0
