"""The charts' bars are the given ratios, with their range over the rounds."""

import pytest

from benchmarks.chart import speed_up_figure

SPEED_UPS = {
    "BERT": {"plain": (1.0, 1.0, 1.0), "peer": (2.0, 1.5, 2.5), "nano_loop": (3.0, 2.75, 3.5)},
    "MLP": {"plain": (1.0, 1.0, 1.0), "peer": (1.5, 1.25, 1.75), "nano_loop": (1.25, 1.0, 2.0)},
}
MLPS = {"MLP": SPEED_UPS["MLP"]}


def test_bars_of_the_picture_have_the_heights_and_errors_of_the_numbers():
    axes = speed_up_figure([MLPS, SPEED_UPS]).axes[1]
    bars = [each for each in axes.containers if hasattr(each, "patches")]
    assert [each.get_label() for each in bars] == ["plain", "peer", "nano_loop"]
    for each in bars:
        expected = [numbers[each.get_label()] for numbers in SPEED_UPS.values()]
        assert [patch.get_height() for patch in each.patches] == [median for median, _, _ in expected]
        (lines,) = each.errorbar.lines[2]
        ends = [(low, high) for (_, low), (_, high) in lines.get_segments()]
        assert ends == [pytest.approx(bounds) for _, *bounds in expected]
