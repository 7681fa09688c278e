"""A script of a library trains the same weights however it is started, with and without `install` at its top."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts.snippets import in_a_notebook

ROOT = Path(__file__).parents[2]
INSTALL = "import nano_loop\n\nnano_loop.install(exact=True)\n"
BEGIN = """
import sys

import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
x, y = make_classification(256, 32, n_informative=8, n_classes=3, random_state=0)
module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
estimator = NeuralNetClassifier(
    module, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, max_epochs=2, train_split=None, verbose=0
)
"""
END = """
torch.save([*estimator.module_.state_dict().values()], sys.argv[1])
"""
SCRIPTS = {
    "fit": f"{BEGIN}estimator.fit(x.astype('float32'), y){END}",
    "search": f"{BEGIN}search = GridSearchCV(estimator, {{'lr': [0.1, 1e-6]}}, cv=2, n_jobs=2)\n"
    f"search.fit(x.astype('float32'), y)\nestimator = search.best_estimator_{END}",
}
RUN = ("-m", "nano_loop", "run", "--exact")
STARTS = {
    "run": (*RUN, "train.py"),
    "run -m": (*RUN, "-m", "train"),
    "install": ("installed.py",),
    "install -m": ("-m", "installed"),
}


def started(folder, arguments):
    """Return the weights saved by a Python with these arguments, and its standard error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments, str(folder / "weights.pt")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "weights.pt"), done.stderr


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """By script, a folder with the script and a copy with `install` at its top, and the weights of the original."""
    made = {}
    for name, text in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(text)
        (folder / "installed.py").write_text(INSTALL + text)
        made[name] = folder, started(folder, ["train.py"])[0]
    return made


@pytest.mark.timeout(300)  # a search starts its own processes
@pytest.mark.parametrize(
    ("script", "start"),
    [*(("fit", start) for start in (*STARTS, "notebook")), ("search", "run"), ("search", "install")],
)
def test_weights_are_those_of_the_script_alone(script, start, scripts):
    folder, plain = scripts[script]
    if start == "notebook":
        arguments = f"import sys\nsys.argv = ['', {str(folder / 'weights.pt')!r}]"
        printed = "\n".join(in_a_notebook([arguments, INSTALL, (folder / "train.py").read_text()], folder))
        weights = torch.load(folder / "weights.pt")
    else:
        weights, printed = started(folder, STARTS[start])
    assert "Sequential, trained by Adam" in printed
    assert all(map(torch.equal, plain, weights))
