"""Wherever a run starts, the loop finds its objects in each process and trains the caller's model."""

import os
import signal
import sys
import textwrap
import threading
import time

import psutil
import pytest
from torch import nn

from distributed.launch.started import LOOP, run_cells, run_python

pytestmark = pytest.mark.usefixtures("nothing_left")


SCRIPT = """
with open("ran", "a") as file:
    file.write("x")

class Project:
    rate = 3
    @staticmethod
    @nano(**OPTIONS)
    def train(model, optimizer, loader):
        return fit(model, optimizer, loader), everywhere(Project.rate)

class Trainer(TorchNano):
    def train(self, model, optimizer, loader):
        return fit(*self.setup(model, optimizer, loader)), everywhere(torch.get_num_threads())

net, opt, batches = parts(4)

@nano(**OPTIONS)
def over_globals(epoch):
    return fit(net, opt, batches)

torch.set_num_threads(1)
decorated, subclassed = parts(4), parts(4)
found = Project.train(*decorated), Trainer(**OPTIONS).train(*subclassed), over_globals(0), torch.get_num_threads()
print(json.dumps([found, *map(weights, (decorated[0], subclassed[0], net)), alone()]))
"""


@pytest.mark.slow
def test_script_without_a_main_guard_runs_once_and_its_own_classes_and_variables_travel(tmp_path):
    (tmp_path / "train.py").write_text(LOOP + SCRIPT)
    (found, decorated, subclassed, by_globals, alone), stderr = run_python("train.py", folder=tmp_path)
    assert found == [[2, [3, 3]], [2, [1, 1]], 2, 1]
    assert decorated == subclassed == by_globals == pytest.approx(alone, abs=2e-6)
    assert (tmp_path / "ran").read_text() == "x"
    assert stderr == ""


CHOSEN = """
import warnings
warnings.filterwarnings("ignore", "told to nobody")

@nano(**OPTIONS)
def train(model, optimizer, loader):
    warnings.warn("told to nobody")
    warned = []
    try:
        warnings.warn("as an error?", UserWarning)
    except UserWarning:
        warned.append("raised")
    mine = sys.flags.optimize, sys.flags.dev_mode, warned, torch.get_num_threads()
    return fit(model, optimizer, loader), everywhere(mine)

ours = parts(4)
print(json.dumps([train(*ours), weights(ours[0]), alone(), torch.get_num_threads()]))
"""


@pytest.mark.slow
def test_options_threads_and_warnings_that_the_user_has_chosen_hold_in_workers_of_a_script_on_standard_input(tmp_path):
    (tmp_path / "json.py").write_text("raise ImportError('of the working folder')")  # a folder that is not on the path
    script = "import sys; del sys.path[0]" + LOOP + CHOSEN
    flags = ("-O", "-W", "error", "-X", "dev", "-")
    found, stderr = run_python(*flags, folder=tmp_path, stdin=script, OMP_NUM_THREADS=2)
    (size, everywhere), ours, alone, threads = found
    assert (size, threads) == (2, 2)
    assert everywhere == [[1, True, ["raised"], 2]] * 2
    assert ours == pytest.approx(alone, abs=2e-6)
    assert stderr == ""


@pytest.mark.slow
def test_functions_typed_at_a_prompt_train_and_the_prompt_goes_on(tmp_path):
    typed = LOOP.replace("\n\n", "\n\n\n") + (
        "ours = parts(4); size = nano(**OPTIONS)(fit)(*ours)\n"
        "print(json.dumps([size, weights(ours[0]) == alone(), 1 + 1]))\n"
    )
    variables = {"PYTHON_BASIC_REPL": 1, "PYTHONSTARTUP": None, "PYTHON_HISTORY": os.devnull}
    found, _ = run_python("-i", "-q", folder=tmp_path, stdin=typed, **variables)
    assert found == [2, True, 2]


NOTEBOOK_LOOP = """
@nano(**OPTIONS | {"verbose": True})
def train(model, optimizer, loader):
    print("trained by", torch.distributed.get_rank())
    return fit(model, optimizer, loader)

ours = parts(4)
"""
INTERRUPTED = """
@nano(**OPTIONS)
def stay(model):
    everywhere(0)
    if torch.distributed.get_rank() == 0:
        with open("pid", "w") as file:
            print(os.getpid(), file=file)
    while True:
        everywhere(0)

stay(ours[0])
"""
LEFT = "import psutil; print([each.cmdline() for each in psutil.Process().children()])"


@pytest.mark.slow
def test_cells_of_a_notebook_train_its_model_and_can_be_interrupted(tmp_path):
    cells = [LOOP + NOTEBOOK_LOOP, "train(*ours)", "train(*ours)", "weights(ours[0])", INTERRUPTED, LEFT]
    interrupting = threading.Thread(target=interrupt_when_there, args=(tmp_path / "pid",))
    interrupting.start()
    try:
        outputs = run_cells(cells, tmp_path)
    finally:
        interrupting.join()
    assert outputs[0] == {}
    for first_or_second, reports in zip(outputs[1:3], (1, 0), strict=True):
        assert "trained by 0" in first_or_second["stdout"].splitlines()
        assert first_or_second["stdout"].count("gradient_averaging") == reports
        assert "stderr" not in first_or_second  # standard error is shown in red
        assert first_or_second["result"] == "2"
    assert outputs[4]["error"] == "KeyboardInterrupt"
    assert outputs[5]["stdout"] == "[]\n"
    expected = {}
    exec(LOOP + "\nargs.epochs = 4\nexpected = alone()", expected)
    assert eval(outputs[3]["result"]) == pytest.approx(expected["expected"], abs=2e-6)


def interrupt_when_there(file):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if file.exists() and file.read_text().endswith("\n"):
            psutil.Process(int(file.read_text())).send_signal(signal.SIGINT)
            return
        time.sleep(0.1)


PACKAGE = {
    "__init__.py": "",
    "rates.py": "RATE = 0.25",
    "loops.py": """
        import ctypes, os, torch
        from nano_loop import nano

        with open("imported", "a") as file:
            print(os.getpid(), file=file)
        with open("imported") as file:
            IMPORTED = ctypes.c_char_p(file.read().encode())  # what C holds stays the worker's own

        class Line(torch.nn.Linear):
            pass

        @nano(num_processes=2, auto_lr=False, verbose=False)
        def train(model):
            from .rates import RATE
            loss = model(torch.ones(1, 1)).sum() * RATE
            loss.backward()
            with torch.no_grad():
                model.weight -= model.weight.grad
            found = [None, None]
            imported = IMPORTED.value.decode()
            mine = type(model) is Line, train.__wrapped__.__globals__ is globals(), os.getcwd(), os.getpid(), imported
            torch.distributed.all_gather_object(found, mine)
            return found
    """,
}


@pytest.mark.slow
def test_decorated_function_of_a_module_is_imported_in_workers_wherever_they_stand(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "of_this_test"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("packages")  # only this process can find it
    from of_this_test import loops

    try:
        model = loops.Line(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        found = loops.train(model)
        assert [each[:3] for each in found] == [(True, True, str(tmp_path))] * 2
        assert model.weight.item() == 0.75
        processes = [str(each[3]) for each in found]
        assert [each[4].split() for each in found] == [processes[:1], processes]
        assert (tmp_path / "imported").read_text().split() == processes[:1]
    finally:
        for name in ("of_this_test", "of_this_test.rates", "of_this_test.loops"):
            sys.modules.pop(name, None)
