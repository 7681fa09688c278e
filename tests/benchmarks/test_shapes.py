"""The sweep over layers measures each in fp32 and in bf16, and marks what is slower."""

import json

import pytest
from command_line import run

from benchmarks.layers import LAYERS
from benchmarks.shapes import Row, markdown


def test_sweep_measures_layers_and_writes_both_tables(tmp_path):
    output = tmp_path / "found"
    done = run("benchmarks.shapes", "--quick", "--threads", 1, "--only", "VAE: Linear,GRU", "--output", output)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.with_suffix(".json").read_text())["layers"]
    assert [row["layer"].partition("(")[0] for row in rows] == ["Linear"] * 3 + ["GRU"]
    for row in rows:
        assert all(row[part][each]["min_ms"] > 0 for part in ("forward", "backward") for each in ("fp32", "bf16"))
    assert "| VAE | Linear(784, 400) | 128 × 784 |" in done.stdout


def test_slower_is_slower_by_the_fastest_and_by_the_medians():
    def row(fp32, bf16):
        return Row(LAYERS[0], "NCHW", {"fp32": [(each, 1.0) for each in fp32], "bf16": [(each, 1.0) for each in bf16]})

    assert row([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 1.0, 1.0], [1.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 2.0, 2.0], [2.0, 2.0, 2.0]).is_slower
    assert row([1.0], [2.0]).ratio(min) == pytest.approx(2 / 3)
    assert "**0.67**" in markdown([row([1.0], [2.0]).as_dict()])
