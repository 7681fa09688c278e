"""Importing nano_loop changes nothing: fresh interpreters are compared before and after the import."""

import ast
import gc
import importlib
import json
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nano_loop

# Runs in a separate interpreter: records the state of the process, runs the given code, and records the state again.
PROGRAM = """
import gc, json, logging, os, signal, sys, threading, warnings
from pathlib import Path
import torch

{before}

import locale, multiprocessing, random
import numpy
import torch._dynamo  # wraps torch.manual_seed when it is loaded, which optimizers do too
from torch import nn
from torch.utils.data import BatchSampler, DataLoader


def loggers():
    root = logging.getLogger()
    named = {{name: each for name, each in root.manager.loggerDict.items() if isinstance(each, logging.Logger)}}
    return {{
        name: [[repr(each) for each in log.handlers], log.level, log.propagate, log.disabled, len(log.filters)]
        for name, log in {{"root": root, **named}}.items()
    }}


def masks():
    try:
        return {{tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir("/proc/self/task")}}
    except (AttributeError, OSError):
        return None


def children():
    own = Path("/proc/self/task", str(os.getpid()), "children")
    return own.read_text() if own.exists() else None


def classes():
    owners = (nn.Module, torch.Tensor, DataLoader, BatchSampler, torch.optim.Optimizer, threading.Thread)
    return {{owner.__name__: {{k: id(v) for k, v in vars(owner).items()}} for owner in owners}}


def state():
    return {{
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "intra-op threads": torch.get_num_threads(),
        "inter-op threads": torch.get_num_interop_threads(),
        "affinity": masks(),
        "threads of Python": [each.name for each in threading.enumerate()],
        "children": children(),
        "loggers": loggers(),
        "raised logging level": logging.root.manager.disable,
        "logger class": logging.getLoggerClass(),
        "warnings filters": list(warnings.filters),
        "warnings hooks": (warnings.formatwarning, warnings.showwarning),
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available()),
        "flush denormal": float(torch.tensor(1e-40) * 1),
        "torch functions": {{k: id(v) for k, v in vars(torch).items() if callable(v)}},
        "functional": {{k: id(v) for k, v in vars(nn.functional).items() if callable(v)}},
        "classes": classes(),
        "process group": torch.distributed.is_initialized(),
        "random": (torch.get_rng_state().sum().item(), random.getstate(), str(numpy.random.get_state())),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "sharing strategy": torch.multiprocessing.get_sharing_strategy(),
        "signals": {{each: signal.getsignal(each) for each in signal.valid_signals()}},
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "meta path": list(map(repr, sys.meta_path)),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "locale": locale.setlocale(locale.LC_ALL),
        "umask": (mask := os.umask(0), os.umask(mask))[0],
        "streams": (sys.stdout, sys.stderr),
    }}


before = state()
{doing}
after = state()

# A logger that is new is nobody's loss, as long as it says and hears what any other does; torch's are torch's.
for name in set(after["loggers"]) - set(before["loggers"]):
    if name.startswith("torch.") or after["loggers"][name] == [[], logging.NOTSET, True, False, 0]:
        del after["loggers"][name]
# torch loads parts of itself when they are first asked for.
for group in ("torch functions", "functional"):
    after[group] = {{name: found for name, found in after[group].items() if name in before[group]}}


def difference(old, new):
    if isinstance(old, dict):
        keys = [key for key in {{*old, *new}} if old.get(key) != new.get(key)]
        return {{str(key): difference(old.get(key), new.get(key)) for key in keys}}
    return f"{{old!r}} before, {{new!r}} after"


changed = {{name: difference(before[name], after[name]) for name in before if before[name] != after[name]}}
json.dump(changed, open({result!r}, "w"))
"""

# Everything that a user may have set up before the import, and that must be unchanged.
BY_THE_USER = """
logging.basicConfig(level=logging.DEBUG, format="mine %(message)s", stream=sys.stdout)
log = logging.getLogger("lightning_fabric")
log.setLevel(logging.ERROR)
log.addHandler(logging.StreamHandler(sys.stdout))
log.propagate = False
warnings.simplefilter("error", FutureWarning)
warnings.formatwarning = lambda *_, **__: "mine"
signal.signal(signal.SIGTERM, lambda *_: None)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)
torch.manual_seed(7)
torch.compile = lambda *args, **kwargs: None
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", SLURM_NTASKS="2", OMP_NUM_THREADS="1")
os.environ.update(NANO_LOOP_PRECISION="fp8", NANO_LOOP_TYPO="1", CUDA_VISIBLE_DEVICES="")
"""
USERS = {"Fabric was imported": "import lightning_fabric", "all was set up": BY_THE_USER}


def run(folder, before, doing):
    """Return the finished process, and the state that `doing` has changed."""
    result = folder / "changed.json"
    program = PROGRAM.format(before=textwrap.dedent(before), doing=doing, result=str(result))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done, json.loads(result.read_text())


@pytest.mark.slow  # the next test has a fresh process, where nothing was set up
@pytest.mark.parametrize("user", USERS)
def test_import_changes_nothing_and_says_nothing(tmp_path, user):
    doing = "import nano_loop; nano_loop.nano, nano_loop.verify, nano_loop.optim, nano_loop.is_global_zero"
    done, changed = run(tmp_path, USERS[user], doing)
    assert changed == {}
    assert (done.stdout, done.stderr) == ("", "")


def test_every_module_and_what_is_made_of_them_change_nothing(tmp_path):
    doing = """
import importlib, pkgutil, nano_loop
nano_loop.nano, nano_loop.verify, nano_loop.optim, nano_loop.is_global_zero
for module in pkgutil.walk_packages(nano_loop.__path__, "nano_loop."):
    # Lightning sets up loggers, and Ray is imported when a run needs it, which puts back what that changes.
    if not module.name.endswith(("__main__", "lightning")) and "ray" not in module.name.replace("_", ".").split("."):
        importlib.import_module(module.name)
nano_loop.TorchNano(precision="auto", channels_last=True)
@nano_loop.nano(precision="auto", compile=True)
def train(model): ...
"""
    done, changed = run(tmp_path, "", doing)
    assert changed == {}
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="children and masks are read from /proc")
def test_what_an_import_could_leave_is_seen(tmp_path):
    doing = """
os.environ["LEFT"] = "1"
torch.set_num_threads(torch.get_num_threads() + 1)
nn.Module.__call__ = lambda *_: None
torch.compile = None
warnings.simplefilter("ignore")
torch.rand(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
logging.getLogger("new").setLevel(1)
import subprocess
child = subprocess.Popen(["sleep", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
thread = threading.Thread(target=threading.Event().wait, name="left", daemon=True)
thread.start()
"""
    _, changed = run(tmp_path, "", doing)
    seen = {"environment", "intra-op threads", "classes", "torch functions", "warnings filters", "random", "signals"}
    assert set(changed) == seen | {"loggers", "children", "affinity", "threads of Python"}


def imports_only(statement, *unwanted):
    """Run a statement in a separate interpreter, and fail if one of the modules is imported afterwards."""
    program = f"import sys; {statement}; sys.exit(' '.join({{*{unwanted}}} & {{*sys.modules}}) or None)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_waits_for_no_torch_and_needs_no_library_of_the_command_line():
    imports_only(
        "import nano_loop; nano_loop.NanoError, dir(nano_loop)", "torch", "numpy", "lightning_fabric", "click", "ray"
    )


def test_options_are_read_without_torch():
    reading = "Options.from_call({}, {'NANO_LOOP_PRECISION': 'bf16'}).reduced_precision or 1 / 0"
    imports_only(f"from nano_loop.config.options import Options; {reading}", "torch")


def names_for_type_checkers():
    tree = ast.parse(Path(nano_loop.__file__).read_text())
    (block,) = (each for each in tree.body if isinstance(each, ast.If))
    return {alias.name: each.module for each in block.body for alias in each.names}


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_an_import_as_before_it(monkeypatch, collects):
    seen, before = [], gc.isenabled()
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append(gc.isenabled()) or nano_loop.errors)
    monkeypatch.setitem(nano_loop._HOMES, "NanoError", "errors")
    try:
        (gc.enable if collects else gc.disable)()
        nano_loop.__getattr__("NanoError")
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_public_names_are_those_of_type_checkers_and_each_is_that_of_its_module():
    declared = names_for_type_checkers()
    eager = {"NanoConfigError", "NanoError", "NanoMemoryError", "NanoWarning", "NanoWorkerError", "__version__"}
    assert {*declared} | eager == {*nano_loop.__all__} <= {*dir(nano_loop)}
    assert declared.pop("optim") == "nano_loop"
    assert nano_loop.optim is importlib.import_module("nano_loop.optim")
    for name, module in declared.items():
        assert getattr(nano_loop, name) is getattr(importlib.import_module(module), name)
        assert nano_loop.__getattr__(name) is getattr(nano_loop, name)
    names = {}
    exec("from nano_loop import *", names)
    assert {*names} - {"__builtins__"} == {*nano_loop.__all__}


def test_no_module_takes_the_place_of_a_public_name():
    modules = {each.name for each in pkgutil.iter_modules(nano_loop.__path__)}
    assert modules & {*nano_loop.__all__} == {"optim"}


def test_unknown_name_raises_what_python_raises():
    with pytest.raises(AttributeError, match="module 'nano_loop' has no attribute 'torchnano'"):
        nano_loop.torchnano  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'torchnano' from 'nano_loop'"):
        from nano_loop import torchnano  # noqa: F401
