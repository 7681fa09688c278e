import re

import pytest

from .running import run

SMALL = ("--width", 8, "--epochs", 2)


def accuracy(*options):
    process = run("lightning_digits.py", *SMALL, *options)
    assert process.returncode == 0, process.stderr
    return float(re.search(r"test accuracy ([\d.]+)%", process.stdout)[1]), process.stderr


@pytest.mark.slow  # tests/integrations/lightning covers a module in one process and in two
def test_it_trains_as_lightnings_trainer_does_in_one_process_and_in_two():
    plain, _ = accuracy("--plain")
    one, said = accuracy("--precision", 32)
    assert one == pytest.approx(plain, abs=0.5)  # same steps, other rounding in NHWC
    assert "channels_last" in said
    two, said = accuracy("--precision", "bf16", "--num-processes", 2)
    assert two > 60
    assert "gradient_averaging" in said
