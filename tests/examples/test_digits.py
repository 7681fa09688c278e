import pytest

from .running import results

# Over seeds, runs end between 98.6% and 99.4%, plain and in bf16. With 360 test images, the difference of two runs at
# 99% has a standard error of 0.7%; the test allows three of these.
BAND = 0.022
SMALL = ("--width", 16, "--batch-size", 16, "--epochs", 4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The results of the loop without nano_loop."""
    return results("digits.py", "--plain", *SMALL, folder=tmp_path_factory.mktemp("plain"), nano_loop=False)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_it_trains_as_plain_does_and_says_how(precision, plain, tmp_path):
    accelerated = results("digits.py", "--precision", precision, *SMALL, folder=tmp_path)
    assert accelerated["accuracy"] == pytest.approx(plain["accuracy"], abs=BAND)
    assert "epoch 2: test accuracy" in accelerated["stdout"]
    assert "channels_last" in accelerated["stderr"]
