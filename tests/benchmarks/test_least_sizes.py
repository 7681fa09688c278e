"""Small models are timed in turn in three precisions, and single layers in two."""

import re

import pytest

from benchmarks import least_sizes


@pytest.mark.parametrize(("argv", "others"), [(["--only", "policy"], 2), (["--sizes", "--only", "LSTM 64"], 1)])
def test_a_row_has_the_median_of_the_ratios_of_each_round(monkeypatch, capsys, argv, others):
    monkeypatch.setattr("sys.argv", ["least_sizes", "--rounds", "3", "--seconds", "0.001", *argv])
    monkeypatch.setitem(least_sizes.MODELS, "a copy of policy", least_sizes.MODELS["policy"])
    least_sizes.main()
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    for row in rows:
        cells = row.strip("| ").split(" | ")
        assert len(cells) == len(heading.strip("| ").split(" | "))
        for ratio in cells[-others:]:
            median, least, largest = (float(number) for number in re.findall(r"[\d.]+", ratio))
            assert 0 < least <= median <= largest
