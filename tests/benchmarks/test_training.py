import pytest
from command_line import run

from benchmarks.training import arguments, markdown

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --accumulate 1 --steps 3 --sample 1"


def test_a_row_a_mode_with_the_differences_seed_by_seed():
    rows = markdown({"digits": {"fp32": [0.90, 0.92], "bf16": [0.91, 0.92]}}).splitlines()
    assert rows[2] == "| digits | fp32 | 2 | accuracy 91.00% ± 1.41% |  |"
    assert rows[3] == "| digits | bf16 | 2 | accuracy 91.50% ± 0.71% | 0.50% ± 0.71% (0.00% to 1.00%) |"


def test_one_seed_has_no_spread():
    assert "loss 1.5000 ± – |" in markdown({"char_gpt": {"bf16": [1.5]}})


def test_an_example_is_trained_in_each_mode():
    process = run("benchmarks.training", "--only", "char_gpt", "--seeds", 1, f"--char-gpt={TINY}")
    assert process.returncode == 0, process.stderr
    assert "| char_gpt | fp32 | 1 | loss " in process.stdout
    assert "| char_gpt | bf16 | 1 | loss " in process.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "digit"], "'digit': there are digits, char_gpt"),
        (["--modes", "fp8"], "'fp8': there are plain, fp32, bf16"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(options, said, capsys):
    with pytest.raises(SystemExit) as left:
        arguments(options)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_an_example_that_fails_ends_the_run_with_its_message():
    process = run("benchmarks.training", "--only", "digits", "--seeds", 1, "--digits=--epochs many")
    assert process.returncode == 1
    assert "invalid int value: 'many'" in process.stderr
