import pytest
from command_line import run

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --accumulate 1 --steps 3 --sample 1"


def test_an_example_is_trained_in_each_mode():
    process = run(
        "benchmarks.training", "--only", "char_gpt", "--seeds", 1, "--modes", "fp32,bf16-true", f"--char-gpt={TINY}"
    )
    assert process.returncode == 0, process.stderr
    full, half = (line.split(" | ") for line in process.stdout.splitlines()[2:])
    assert (full[0], full[1], half[1]) == ("| char_gpt", "fp32", "bf16-true")
    for part in (5, 6):  # parameters and gradients
        assert float(half[part]) == pytest.approx(float(full[part]) / 2, rel=0.01)
