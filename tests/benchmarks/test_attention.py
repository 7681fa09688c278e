"""The benchmark of attention measures each way that fits a shape."""

from command_line import run

from benchmarks.attention import BLOCKS, TORCH, Shape, measure, row


def test_it_measures_and_writes_a_table():
    done = run("benchmarks.attention", "--rounds", 1, "--shapes", "2,2,32,16,dropout", "1,2,64,32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 4
    assert "| 2, 2, 32, 16, dropout |" in done.stdout


def test_wrong_shape_is_refused():
    for text in ("8,12,128", "8,12,128,64,random"):
        done = run("benchmarks.attention", "--shapes", text)
        assert done.returncode == 2
        assert text in done.stderr


def test_ratio_is_torchs_time_over_that_of_a_way():
    found = {TORCH: [4.0, 6.0, 5.0], BLOCKS: [1.0, 1.0, 1.0]}
    assert row(Shape(1, 2, 3, 4), found) == ["1, 2, 3, 4", "5", "1", "5 (4 to 6)"]
    assert row(Shape(1, 2, 3, 4), {TORCH: [4.0]}) == ["1, 2, 3, 4", "4", "–", "–"]
    assert TORCH in measure(Shape(1, 2, 64, 16, "causal"), 2)
