"""`nano-loop run`: the script runs as under Python, with options and in the environment for training."""

import json
import os
import subprocess
import sys

import pytest
from option_values import TEXTS

from cli.loops import looped
from nano_loop.cli import SHAPE
from nano_loop.cli import script as module
from nano_loop.cli.main import main
from nano_loop.cli.script import flag_of
from nano_loop.config import option_checks as checks
from nano_loop.config.declarations import CHECKS
from nano_loop.config.environment import EXPORTS, may_be
from nano_loop.config.leftovers import REMOVED, REMOVED_OTHERS
from nano_loop.config.options import Options
from nano_loop.config.protocol import INSTALL
from nano_loop.cpu import read_machine
from nano_loop.cpu.glibc import is_glibc

NANO_LOOP = [sys.executable, "-m", "nano_loop", "run"]
SWITCHES = [name for name, check in CHECKS.items() if may_be(True, check)]


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / "project" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def ran(*arguments, given=b"", by=NANO_LOOP, folder=None, **variables):
    """Return the exit code, the standard output and the standard error of the command."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    command = [*by, *map(str, arguments)]
    done = subprocess.run(command, env=environ, cwd=folder, input=given, capture_output=True, timeout=100)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_exit_code_and_standard_streams_are_the_scripts(script):
    text = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1]); print('beside', file=sys.stderr)"
    path = script(text + "; sys.exit(7)")
    assert ran(path, given=b"a\nb\x01\x02") == (7, "\x02\x01b\na", "beside\n")


@pytest.mark.parametrize("name", ["-t.py", "--precision.py", "a b.py", os.fsdecode(b"n\xff.py")], ids=ascii)
def test_script_has_any_name(script, name):
    path = script("import sys; print(ascii(sys.argv))", name)
    code, out, err = ran("--", name, "argument", folder=path.parent)
    assert (code, out, err) == (0, ascii([name, "argument"]) + "\n", "")


def test_script_may_come_from_standard_input():
    given = b"import sys; print(sys.argv)"
    assert ran("-", "argument", given=given) == (0, "['-', 'argument']\n", "")


# --- options ---


@pytest.fixture
def shown(script, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = str(script(""))

    def shown(*arguments):
        assert main(["run", "--json", *arguments, path, "argument"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["version"], found["command"]) == (SHAPE, "run")
        assert found["arguments"] == [sys.executable, path, "argument"]
        return found["changes"]

    return shown


def test_json_shows_what_would_be_run_and_runs_nothing(shown, monkeypatch):
    monkeypatch.setattr(module.os, "execve", None)
    changes = shown("--precision", "bf16")
    assert changes["NANO_LOOP_PRECISION"] == "bf16"
    assert {"OMP_NUM_THREADS", EXPORTS} <= {*changes}
    assert [name for name in changes if name.startswith("NANO_LOOP_")] == [EXPORTS, INSTALL, "NANO_LOOP_PRECISION"]
    assert INSTALL not in shown("--only-environment")


CASES = [(name, *case) for name, check in CHECKS.items() for case in TEXTS[check]]
WITH_FLAGS = [each for each in CASES if CHECKS[each[0]] is not checks.worker_init]


@pytest.mark.parametrize(("name", "text", "expected"), WITH_FLAGS, ids=str)
def test_option_with_a_value_is_that_of_the_environment(shown, name, text, expected):
    for arguments in ([f"{flag_of(name)}={text}"], *([] if name in SWITCHES else [[flag_of(name), text]])):
        changes = shown(*arguments)
        assert changes[f"NANO_LOOP_{name.upper()}"] == text
        assert getattr(Options.from_call({}, changes), name) == expected


@pytest.mark.parametrize("name", SWITCHES)
def test_switch_is_on_or_off(shown, name):
    for flag, on in ((flag_of(name), True), ("--no-" + flag_of(name)[2:], False)):
        changes = shown(flag)
        assert getattr(Options.from_call({}, changes), name) is on


def test_what_follows_a_switch_is_never_its_value_and_what_follows_the_script_is_its_own(script, capsys):
    path, own = str(script("")), ["--channels-last", "--verbose=all", "--", "--no-exact"]
    for options, before in (
        (["--verbose", "--timeout", "9", "--no-compile", "--exact"], []),
        (["--log-casts"], ["--"]),
    ):
        assert main(["run", "--json", *options, *before, path, *own]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["arguments"] == [sys.executable, path, *own]
        names = {name for name in found["changes"] if name.startswith("NANO_LOOP_")} - {EXPORTS, INSTALL}
        flags = {option.removeprefix("--no-").removeprefix("--") for option in options if option.startswith("-")}
        assert names == {f"NANO_LOOP_{flag.upper().replace('-', '_')}" for flag in flags}
    assert main(["run", "--json", "--fast-norm=off", "--fast-norm", "--no-fast-norm", "--fast-norm=auto", path]) == 0
    assert json.loads(capsys.readouterr().out)["changes"]["NANO_LOOP_FAST_NORM"] == "auto"


def test_command_line_overrides_the_environment(script):
    path = script("import os; print(os.environ['NANO_LOOP_PRECISION'])")
    assert ran("--precision", "bf16", path, NANO_LOOP_PRECISION="32")[:2] == (0, "bf16\n")


@pytest.mark.parametrize("command", ["run", "tune", "profile"])
@pytest.mark.parametrize("name", REMOVED)
def test_removed_option_says_so_and_its_advice_works(command, name, capsys):
    flag = flag_of(name)
    for given in (flag, f"{flag}=1", f"--no-{flag[2:]}"):
        assert main([command, given, __file__]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"nano-loop: {given.removesuffix('=1')}: it was removed")
        assert err.endswith(". Omit it.\n")
    assert main(["run", "--json", __file__]) == 0


@pytest.mark.parametrize("name", [name for name in REMOVED_OTHERS if " --" in name])
def test_removed_flag_says_so_for_its_command_alone(name, capsys):
    command, flag = name.split()
    for given in ([flag], [f"{flag}=1"], [flag, "1"]):
        assert main([command, *given]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"nano-loop: {flag}: it was removed")
    assert main(["profile", flag, __file__]) == 2
    assert "No such option" in capsys.readouterr().err


def test_search_for_a_module_imports_nothing_and_leaves_the_path(script, monkeypatch):
    monkeypatch.chdir(script("raise ValueError('imported')", "job.py").parent)
    path = [*sys.path]
    assert module._is_module("job")
    assert sys.path == path
    assert "job" not in sys.modules


REPORTED = 'print(train.report.options["precision"], train.report["allocator"].detail)\n'
TRAINING = looped("torch.utils.data.DataLoader(torch.rand(16, 8), 4)", options="") + REPORTED


@pytest.mark.slow
@pytest.mark.skipif(not is_glibc(), reason="it is about glibc")
def test_plain_decorator_runs_in_another_precision_and_number_of_processes(script):
    arguments = ("--precision", "64", "--num-processes", "2", "--allocator", "--no-verify")
    code, out, err = ran(*arguments, script(TRAINING), OMP_WAIT_POLICY="passive")
    assert code == 0, err
    assert out == "64-true glibc keeps freed memory, as set by its environment variables\n"
    assert err.startswith("nano_loop ")
    threads = int(err.partition(" · 2 processes × ")[2].split()[0])
    assert threads <= max(len(os.sched_getaffinity(0)) // 2, 1)
    assert "from the environment: NANO_LOOP_ALLOCATOR=True" in err


# --- a script without a line of nano_loop ---

WITHOUT_A_LINE = """
import multiprocessing, sys, traceback
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.dtypes = set()

    def forward(self, x):
        out = self.layer(x)
        self.dtypes.add(str(out.dtype))
        return out

def fit():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(torch.rand(16, 8), 4):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [net.layer.weight.tolist(), sorted(net.dtypes)]

if __name__ == "__main__":
    results = []
    for method in ("fork", "spawn"):  # before this process has threads of OpenMP, which a forked one waits for
        with multiprocessing.get_context(method).Pool(1) as pool:
            results.append(pool.apply(fit))
    print([fit(), *results])
    raise SystemExit(len(sys.argv) - 1)
"""


@pytest.mark.slow
def test_script_without_a_line_is_accelerated_with_its_children(script):
    path = script(WITHOUT_A_LINE)
    code, plain, err = ran(path, "argument", by=[sys.executable])
    assert (code, err) == (1, "")
    for options in (["--exact"], ["--precision", "bf16"]):
        code, out, err = ran(*options, path, "argument")
        assert code == 1, err
        assert err.count("Net, trained by SGD") == 3
        results = json.loads(out.replace("'", '"'))
        assert results == [results[0]] * 3
        is_exact = options == ["--exact"]
        assert (results == json.loads(plain.replace("'", '"'))) == is_exact
        assert results[0][1] == (["torch.float32"] if is_exact else ["torch.bfloat16"])
    code, out, err = ran("--precision", "bf16", "--only-environment", path)
    assert (code, out) == (0, plain)
    assert "the script's own runs" in err
    code, out, err = ran(path, NANO_LOOP_EXACT="1", NANO_LOOP_PRECISION="bf16")
    assert (code, out) == (0, plain), "the script goes on without nano_loop"
    assert err.startswith("nano-loop: NANO_LOOP_PRECISION=bf16 with NANO_LOOP_EXACT=1"), (
        "also where it has had children"
    )
    code, out, err = ran("--num-processes", "2", "-m", "train", folder=path.parent)
    assert (code, out) == (0, plain)
    assert err.startswith("nano-loop: NANO_LOOP_NUM_PROCESSES=2: install runs in one process. ")
    assert err.endswith("@nano_loop.nano(num_processes=...).\n")


# `install` in a script whose children train; joblib's children do not execute the script.
INSTALLED = (
    WITHOUT_A_LINE.partition('if __name__ == "__main__":')[0]
    + """
import joblib, nano_loop

if __name__ == "__main__":
    nano_loop.install(precision="bf16", verbose=False, worker_init=int)
    results = [joblib.Parallel(n_jobs=2)(joblib.delayed(fit)() for _ in range(2))[0]]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results.append(pool.apply(fit))
    nano_loop.uninstall()
    print(results)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("variable", [None, "0"])
def test_children_of_a_process_that_installs_are_accelerated(script, variable):
    path = script(INSTALLED)
    variables = {"NANO_LOOP_INSTALL": variable} if variable else {}
    if not read_machine().has_fast_bf16:
        variables["PYTHONWARNINGS"] = "ignore"  # about the missing instructions
    code, out, err = ran(path, by=[sys.executable], **variables)
    assert (code, err) == (0, "")
    dtypes = [dtypes for _, dtypes in json.loads(out.replace("'", '"'))]
    assert dtypes == [["torch.bfloat16" if variable is None else "torch.float32"]] * 2


DIVIDED = """
import os, torch, joblib

def threads(number):
    return os.environ.get("OMP_NUM_THREADS")

print(joblib.Parallel(n_jobs=2)(joblib.delayed(threads)(number) for number in range(2)), torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"OMP_NUM_THREADS": "3"}], ids=str)
def test_workers_of_joblib_share_the_cores_as_without_the_command(script, own):
    path = script(DIVIDED)
    code, plain, _ = ran(path, by=[sys.executable], **own)
    assert code == 0
    assert ran(path, **own)[:2] == (0, plain)


@pytest.mark.slow
def test_variables_of_env_install_in_each_python(script):
    path = script(
        "import torch, sys; torch.optim.SGD(torch.nn.Linear(1, 1).parameters()); print('nano_loop' in sys.modules)"
    )
    done = subprocess.run([*NANO_LOOP[:3], "env", "--install", "--json"], capture_output=True, check=True)
    changes = json.loads(done.stdout)["changes"]
    assert ran(path, by=[sys.executable], **changes) == (0, "True\n", "")
    assert ran(path, by=[sys.executable], **{**changes, "NANO_LOOP_INSTALL": "0"}) == (0, "False\n", "")


@pytest.mark.parametrize("arguments", [["--num-processes", "4096"], ["--cpu-for-each-process", "4096"]], ids=str)
def test_more_processes_than_cores_are_refused_before_the_script_starts(capsys, tmp_path, arguments):
    (tmp_path / "train.py").touch()
    line = ["--json", "--num-processes=1", *arguments, str(tmp_path / "train.py")]
    for command in ("run", "profile", "tune"):
        assert main([command, *line]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "num_processes=" in err
        assert "physical cores" in err
        assert "--distributed-backend ray" in err
    assert main(["run", "--distributed-backend=ray", *line]) == 0  # other hosts may have them
