import importlib.util
import shutil

import pytest
import torch
from loops.pairs import has_ipex

from .running import results, run

# torchvision is incompatible with the default environment's torch.
pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="torchvision is not installed"),
    pytest.mark.timeout(300),
]
needs_ipex = pytest.mark.skipif(not has_ipex(), reason="IPEX is not installed")
SMALL = ("--image-size", 32, "--epochs", 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder created by a plain run, and the run's results."""
    folder = tmp_path_factory.mktemp("made")
    found = results("finetune_bf16.py", "--plain", *SMALL, "--folder", folder, folder=folder, nano_loop=False)
    return folder, found


def finetuned(made, folder, *options):
    for name in ("resnet18.pt", "images"):
        shutil.copytree(made[0] / name, folder / name) if name == "images" else shutil.copy(made[0] / name, folder)
    return results("finetune_bf16.py", *options, *SMALL, "--folder", folder, folder=folder)


def test_plain_run_makes_its_own_folder_and_learns(made):
    folder, found = made
    assert len(list((folder / "images/train/7").glob("*.jpg"))) > 100
    assert found["accuracies"][-1] > 0.9
    assert {value.dtype for value in torch.load(folder / "finetuned.pt").values()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("options", [(), pytest.param(("--use-ipex",), marks=needs_ipex)], ids=["bf16", "bf16-ipex"])
def test_it_learns_in_bf16_as_it_does_plain(made, tmp_path, options):
    found = finetuned(made, tmp_path, *options)
    assert found["accuracies"][-1] == pytest.approx(made[1]["accuracies"][-1], abs=0.06)
    expected = torch.load(made[0] / "finetuned.pt")
    weights = torch.load(tmp_path / "finetuned.pt")
    assert {name: (value.dtype, value.shape) for name, value in weights.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }


def test_fp32_ends_as_plain_does(made, tmp_path):
    found = finetuned(made, tmp_path, "--precision", 32)
    assert found["accuracies"] == pytest.approx(made[1]["accuracies"], abs=0.03)


def test_ipex_without_nano_loop_is_refused(tmp_path):
    process = run("finetune_bf16.py", "--plain", "--use-ipex", "--folder", tmp_path)
    assert process.returncode == 2
    assert "--use-ipex" in process.stderr
