"""`nano-loop run` changes nothing in its Python process that a script can see before it trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.config.environment import EXPORTS
from nano_loop.config.protocol import INSTALL

# Everything here is compared with plain Python. Python runs the script itself, so its code looks as under Python, too.
SEEN = """
import gc, multiprocessing, os, signal, sys, threading
loaded_at_start = sorted(sys.modules)

def in_a_child(queue):
    main = sys.modules["__main__"]
    name = (__name__, main.__file__, main.__name__)
    queue.put((name, dict(os.environ), sys.path, "sitecustomize" in sys.modules))

def main():
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    from_child = queue.get()
    child.join()
    script, spec = sys.modules["__main__"], sys.modules["__main__"].__spec__
    streams = (sys.stdin, sys.stdout, sys.stderr)
    print(repr({
        "arguments": (sys.argv, sys.orig_argv, open("/proc/self/cmdline", "rb").read()),
        "path": sys.path,
        "options": (tuple(sys.flags), sys._xoptions, sys.warnoptions, sys.flags.dev_mode, __debug__),
        "importing": (sorted(sys.path_importer_cache), len(sys.path_hooks)),
        "finders": [type(each).__name__ for each in sys.meta_path],
        "name": (script.__name__, script.__file__, script.__package__, spec and (spec.name, spec.origin)),
        "modules": loaded_at_start,
        "hooks": (sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__),
        "state": (sys.gettrace(), sys.getrecursionlimit(), gc.get_threshold(), gc.isenabled()),
        "threads": threading.active_count(),
        "streams": [(each.name, each.encoding, each.errors, each.line_buffering) for each in streams],
        "files": sorted(os.listdir("/proc/self/fd")),
        "handlers": {each.name: str(signal.getsignal(each)) for each in signal.Signals},
        "mask": open("/proc/self/status").read().partition("SigBlk")[2][:60],
        "child": from_child,
        "prefix": (sys.prefix, sys.base_prefix, sys.executable, os.getcwd()),
        "parent": os.getppid(),
        "environment": dict(os.environ),
    }))

if __name__ == "__main__":
    main()
"""


def ended(folder, *arguments, command=(), pythonpath=None, **settings):
    """Return the finished process, run in a folder by Python or by a command."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    if pythonpath is not None:
        environ["PYTHONPATH"] = pythonpath
    program = [sys.executable, *command, *map(str, arguments)]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    return subprocess.run(program, env=environ, cwd=folder, text=True, timeout=100, **settings)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "my project"
    made.mkdir()
    return made


ROOT = str(Path(__file__).parents[2])
RUN_COMMAND = ("-m", "nano_loop", "run")
FOLDER = f"{ROOT}/nano_loop/cli/at_start"
# The command itself has to find nano_loop, even if it is not installed.
PATHS = [ROOT, f"{ROOT}{os.pathsep}", os.pathsep.join([ROOT, "relative", "/no/such/folder"])]


def seen(folder, *arguments, **settings):
    done = ended(folder, *arguments, **settings)
    assert (done.returncode, done.stderr) == (0, "")
    return eval(done.stdout)


def as_the_command_makes_it(environ):
    """Return an environment without the variables set by `nano-loop run`, which docs/cli.md lists."""
    own = {EXPORTS, INSTALL, "OMP_NUM_THREADS"}
    environ = {**environ, "PYTHONPATH": environ["PYTHONPATH"].removeprefix(f"{FOLDER}{os.pathsep}")}
    return {name: value for name, value in environ.items() if name not in own and not name.startswith("MALLOC_")}


@pytest.mark.parametrize(
    ("path", "as_module"),
    [(PATHS[0], False), (PATHS[2], True), *(pytest.param(path, True, marks=pytest.mark.slow) for path in PATHS[:2])],
    ids=["one entry", "several entries, module", "one entry, module", "an empty entry, module"],
)
def test_script_sees_what_it_sees_under_python(folder, path, as_module):
    accelerates = path == PATHS[0]  # it then sees the import hook for torch, and the variables for its children
    (folder / "train.py").write_text(SEEN)
    arguments = ["-m", "train", "a b", ""] if as_module else ["train.py", "a b", ""]
    command = RUN_COMMAND if accelerates else (*RUN_COMMAND, "--only-environment")
    expected = seen(folder, *arguments, pythonpath=path)
    found = seen(folder, *arguments, command=command, pythonpath=path)
    assert (INSTALL in found["environment"], found["finders"][0] == "_Finder") == (accelerates, accelerates)
    found["finders"] = [name for name in found["finders"] if name != "_Finder"]
    for each in (expected, found):
        each["environment"] = as_the_command_makes_it(each["environment"])
        name, environ, *others = each["child"]
        each["child"] = (name, as_the_command_makes_it(environ), *others)
    assert {name: each for name, each in found.items() if each != expected[name]} == {}


@pytest.mark.parametrize(
    ("customization", "expected"),
    [
        ("import atexit; mine = 1; atexit.register(print, 'the last')", "1 {}/sitecustomize.py\nthe last\n"),
        ("import no_such_module", ""),
    ],
)
def test_customization_of_the_site_is_imported_and_its_failure_shown_as_by_python(folder, customization, expected):
    (folder / "sitecustomize.py").write_text(customization)
    shown = "import sys; m = sys.modules.get('sitecustomize'); m and print(m.mine, m.__spec__.origin)"
    plain = ended(folder, "-c", shown, pythonpath=str(folder))
    under = ended(folder, "-c", shown, pythonpath=os.pathsep.join([FOLDER, str(folder)]))
    assert plain.stdout == expected.format(folder)
    assert ("no_such_module" in plain.stderr) == (not expected)
    assert (under.stdout, under.stderr) == (plain.stdout, plain.stderr)


# Uses a torch optimizer. Programs may first change what `nano-loop run` has set up.
TRAINS = "import sys, torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters()); print('nano_loop' in sys.modules)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("import sys; sys.path[:] = [path for path in sys.path if 'at_start' not in path]", "True"),
        (
            "import sys; sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != '_Finder']",
            "False",
        ),
        ("import sys\nclass Other:\n    find_spec = sys.meta_path[0].find_spec\nsys.meta_path[0] = Other", "True"),
        ("import os; os.environ['NANO_LOOP_ENV_BEFORE'] = 'damaged'", "True"),
    ],
)
def test_program_that_changes_what_waits_for_torch_imports_it_as_under_python(folder, before, expected):
    (folder / "train.py").write_text(f"{before}\n{TRAINS}")
    done = ended(folder, "--verbose=0", "train.py", command=RUN_COMMAND, pythonpath=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


# Python has no `site` in this case, until the program imports it.
LATE = "import sys; n = len(sys.path); import site; site.main(); print(n, len(sys.path), sys.path[:2])"


@pytest.mark.parametrize(
    "flags", [["-S", "-c", LATE], ["-I", "-c", LATE], ["-E", "-c", LATE]], ids=lambda each: each[0]
)
def test_python_that_leaves_out_site_or_the_environment_starts_as_without(folder, flags):
    program = f"import subprocess, sys; subprocess.run([sys.executable, *{flags!r}], check=True)"
    (folder / "starts.py").write_text(program)
    plain = ended(folder, "starts.py", pythonpath=ROOT)
    under = ended(folder, "starts.py", command=RUN_COMMAND, pythonpath=ROOT)
    own = "-S" in flags  # its path includes the folder until site.main runs
    assert (under.returncode, under.stderr) == (0, "")
    assert under.stdout.split()[own:] == plain.stdout.split()[own:]
