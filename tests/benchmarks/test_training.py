import pytest
from command_line import run

from benchmarks.training import End, markdown

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --accumulate 1 --steps 3 --sample 1"


MEMORY = {"parameters": 2_000_000, "gradients": 1_000_000, "state": 4_000_000, "resident": 500_000_000}


def ends(*results):
    return [End(result, MEMORY) for result in results]


def test_a_row_a_mode_with_the_differences_seed_by_seed_and_the_memory():
    rows = markdown({"digits": {"fp32": ends(0.90, 0.92), "bf16": ends(0.91, 0.92)}}).splitlines()
    assert rows[2] == "| digits | fp32 | 2 | accuracy 91.00% ± 1.41% |  | 2 | 1 | 4 | 500 |"
    differences = "0.50% ± 0.71% (0.00% to 1.00%)"
    assert rows[3] == f"| digits | bf16 | 2 | accuracy 91.50% ± 0.71% | {differences} | 2 | 1 | 4 | 500 |"


def test_one_seed_has_no_spread():
    assert "loss 1.5000 ± – |" in markdown({"char_gpt": {"bf16": ends(1.5)}})


def test_an_example_is_trained_in_each_mode():
    process = run(
        "benchmarks.training", "--only", "char_gpt", "--seeds", 1, "--modes", "fp32,bf16-true", f"--char-gpt={TINY}"
    )
    assert process.returncode == 0, process.stderr
    full, half = (line.split(" | ") for line in process.stdout.splitlines()[2:])
    assert (full[0], full[1], half[1]) == ("| char_gpt", "fp32", "bf16-true")
    for part in (5, 6):  # parameters and gradients
        assert float(half[part]) == pytest.approx(float(full[part]) / 2, rel=0.01)


def test_an_example_that_fails_ends_the_run_with_its_message():
    process = run("benchmarks.training", "--only", "digits", "--seeds", 1, "--digits=--epochs many")
    assert process.returncode == 1
    assert "invalid int value: 'many'" in process.stderr
