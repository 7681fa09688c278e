"""The sweep over layers measures each in fp32 and in bf16, and marks what is slower."""

import pytest

from benchmarks.layers import LAYERS
from benchmarks.shapes import Row, markdown


def test_slower_is_slower_by_the_fastest_and_by_the_medians():
    def row(fp32, bf16):
        return Row(LAYERS[0], "NCHW", {"fp32": [(each, 1.0) for each in fp32], "bf16": [(each, 1.0) for each in bf16]})

    assert row([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 1.0, 1.0], [1.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 2.0, 2.0], [2.0, 2.0, 2.0]).is_slower
    assert row([1.0], [2.0]).ratio(min) == pytest.approx(2 / 3)
    assert "**0.67**" in markdown([row([1.0], [2.0]).as_dict()])
