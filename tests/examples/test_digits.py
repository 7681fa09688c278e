import pytest
from running import results, run

SMALL = ("--width", 16, "--batch-size", 16, "--epochs", 4)


def test_plain_runs_where_there_is_no_nano_loop():
    assert run("digits.py", "--plain", "--width", 8, "--epochs", 1, nano_loop=False).returncode == 0


def test_accelerated_runs_with_nano_loop_alone():
    process = run("digits.py", "--width", 8, "--epochs", 1, nano_loop=False)
    assert process.returncode == 1
    assert "nano_loop was imported" in process.stderr


def test_an_epoch_reports_its_accuracy_and_the_run_what_was_applied():
    process = run("digits.py", "--width", 8, "--epochs", 2)
    assert process.returncode == 0, process.stderr
    assert "epoch 2: test accuracy" in process.stdout
    assert "channels_last" in process.stderr


def test_fp32_trains_as_plain_does(tmp_path):
    plain = results("digits.py", "--plain", *SMALL, folder=tmp_path)
    accelerated = results("digits.py", "--precision", 32, *SMALL, folder=tmp_path)
    assert accelerated["accuracy"] == pytest.approx(plain["accuracy"], abs=BAND)


def test_bf16_trains_as_plain_does(tmp_path):
    plain = results("digits.py", "--plain", *SMALL, folder=tmp_path)
    accelerated = results("digits.py", "--precision", "bf16", *SMALL, folder=tmp_path)
    assert accelerated["accuracy"] == pytest.approx(plain["accuracy"], abs=BAND)


def test_a_bad_precision_is_named():
    process = run("digits.py", "--precision", "fp7")
    assert process.returncode == 1
    assert "precision" in process.stderr
    assert "fp7" in process.stderr
