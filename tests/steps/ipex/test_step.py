"""IPEX: the checks before its import, and the effects of the import; `tests/loops` covers the results of loops."""

import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from loops.pairs import has_ipex
from torch import nn

from nano_loop import NanoConfigError, NanoError, nano
from nano_loop.cpu import Machine
from nano_loop.integrations import ipex as ipex
from nano_loop.integrations.ipex import Ipex
from nano_loop.runtime.objects.training_objects import TrainingObjects

needs_ipex = pytest.mark.skipif(not has_ipex(), reason="IPEX is in the environment of `make test-ipex` alone")


@pytest.fixture
def installed(monkeypatch):
    """Fake the versions of torch and IPEX (None if not installed); importing IPEX is then an error."""

    def pretend(torch_version, ipex_version, raised=None):
        versions = {"torch": torch_version, "intel-extension-for-pytorch": ipex_version}

        def version(name):
            if versions.get(name) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        def import_module(name):
            raise raised or AssertionError(f"{name} was imported")

        monkeypatch.setattr(ipex.metadata, "version", version)
        monkeypatch.setattr(ipex, "import_module", import_module)
        monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)

    return pretend


def train(use_ipex=True, **options):
    """Run a loop that trains a linear model for one step."""
    model = nn.Linear(3, 1)

    @nano(use_ipex=use_ipex, verbose=False, **options)
    def loop(model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return loop.report


def cpu(name, architecture, *sets):
    return Machine(name, architecture, (), (), instruction_sets=frozenset(sets))


REQUEST, TO_28 = "^use_ipex=True: ", r", which replaces torch .* by 2\.8\.0\.$"
# The versions of torch and IPEX, the machine, and the message.
INSTALL = r"pip install torch==2\.8\.0 intel-extension-for-pytorch==2\.8\.0"
REFUSED = {
    "none": ("2.13.0", None, None, rf"{REQUEST}.*Omit it, or run {INSTALL}{TO_28}"),
    # The message must not suggest a torch that nano_loop refuses.
    "of another torch": ("2.8.0", "2.7.0", None, rf"{INSTALL}\.$"),
    **{
        f"with torch {version}": (
            *(version, "2.8.0", None),
            rf"{REQUEST}.*IPEX 2\.8 works with torch 2\.8 only, and this is torch {re.escape(version)}\..*{TO_28}",
        )
        for version in ("2.13.0", "2.80.0", "2.9.1+cpu", "3.8.0")
    },
    # Users of other CPUs are not advised to install it.
    "none, another CPU": ("2.13.0", None, cpu("Graviton", "aarch64", "bf16"), r"Graviton.*Omit it\.$"),
    **{
        architecture: (
            *("2.8.0", "2.8.0", cpu("Old CPU", architecture, *sets)),
            rf"{REQUEST}.*AVX2.*Old CPU.*Omit it\.$",
        )
        for architecture, sets in (("x86_64", ("avx", "sse4_2")), ("aarch64", ("bf16",)))
    },
}


@pytest.mark.parametrize(("torch_version", "ipex_version", "on", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_what_to_do(installed, step, torch_version, ipex_version, on, message):
    installed(torch_version, ipex_version)
    with pytest.raises(NanoConfigError if ipex_version or on else ImportError, match=message):
        step(Ipex, on=on, use_ipex=True).skip_reason(TrainingObjects())


def test_what_asked_for_it_is_named(installed, monkeypatch):
    installed("2.13.0", None)
    monkeypatch.setenv("NANO_LOOP_USE_IPEX", "true")
    with pytest.raises(ImportError, match=r"^NANO_LOOP_USE_IPEX=true: IPEX is not installed"):
        train(use_ipex=False)


@pytest.mark.parametrize("torch_version", ["2.8.0", "2.8.0+cu128", "2.8.1", "2.8.0a0"])
def test_its_own_torch_in_any_build_is_let_through(installed, step, torch_version):
    installed(torch_version, "2.8.0+cpu")
    assert step(Ipex, use_ipex=True).skip_reason(TrainingObjects()) is None


def test_torch_that_was_built_in_place_counts_as_what_it_says(installed, step, monkeypatch):
    installed(None, "2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0a0+git1234")
    assert step(Ipex, use_ipex=True).skip_reason(TrainingObjects()) is None
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(NanoConfigError, match=r"torch 2\.14\.0"):
        step(Ipex, use_ipex=True).skip_reason(TrainingObjects())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_model_is_refused(step, installed):
    installed("2.8.0", "2.8.0")
    parts = TrainingObjects([torch.jit.script(torch.nn.Linear(2, 2))])
    with pytest.raises(NanoConfigError, match=r"^use_ipex=True: .*TorchScript.*pass the model unscripted\.$"):
        step(Ipex, use_ipex=True).skip_reason(parts)


@pytest.mark.parametrize(
    "error",
    [OSError("libfoo.so: cannot open"), AttributeError("module 'os' has no 'exit'"), SystemExit("needs AVX2")],
)
def test_failure_of_its_import_is_said_with_its_reason(installed, step, error):
    installed("2.8.0", "2.8.0", raised=error)
    with pytest.raises(NanoError, match="importing IPEX raised") as caught:
        step(Ipex, use_ipex=True).apply(TrainingObjects())
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


def test_off_is_silent_and_imports_nothing(installed):
    installed("2.13.0", "2.8.0")
    with pytest.raises(KeyError):
        train(use_ipex=False)["ipex"]


def test_kernels_that_stay_in_force_are_in_the_report_of_a_run_without_the_option(installed, monkeypatch):
    installed("2.8.0", "2.8.0")
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", sys)
    assert "not requested" in train(use_ipex=False)["ipex"].detail


IMPORTING = """
    import json, logging, os, sys, threading, warnings
    from pathlib import Path
    import torch
    import nano_loop

    torch.compile(repr, backend="eager")  # wraps methods of optimizers, once, as importing IPEX does

    def state():
        children = Path("/proc/self/task", str(os.getpid()), "children").read_text()
        return {
            "environment": dict(os.environ), "threads": [each.name for each in threading.enumerate()],
            "children": children, "compute threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)), "handlers": list(map(repr, logging.root.handlers)),
            "logger class": repr(logging.getLoggerClass()), "disabled": logging.root.manager.disable,
            "tensor": sorted(vars(torch.Tensor)), "format": torch.Tensor.__format__.__module__,
            "bag": torch.embedding_bag.__module__, "scaler": torch.cpu.amp.GradScaler.__module__,
            "jit": torch.jit.trace.__module__, "fx": torch.fx.Tracer.is_leaf_module.__module__,
            "filters": list(map(repr, warnings.filters)), "optimizers": sorted(vars(torch.optim.AdamW)),
        }

    @nano_loop.nano(use_ipex=True)
    def loop(model, optimizer):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return "intel_extension_for_pytorch" in sys.modules

    model = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.GroupNorm(1, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state()
    imported = loop(model, optimizer)
    print(json.dumps({"imported": imported, "before": before, "after": state()}))
"""


@pytest.fixture(scope="module")
def imported():
    """Return the findings of a process that used IPEX once, and its standard error."""
    command = [sys.executable, "-c", textwrap.dedent(IMPORTING)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@needs_ipex
def test_import_leaves_the_process_as_it_was(imported):
    seen, _ = imported
    assert seen["imported"]
    assert seen["after"] == seen["before"]


@needs_ipex
def test_report_is_all_that_is_printed(imported):
    _, err = imported
    lines = err.splitlines()
    assert lines[0].startswith("nano_loop ")
    assert all(
        line.startswith(
            ("  applied  ", "  skipped  ", "  measured  ", "  nothing to do: ", "  too small to gain: ", "  for bf16")
        )
        for line in lines[1:]
    ), err
    assert [line for line in lines if "applied  ipex" in line and "2.8.0" in line]


@needs_ipex
@pytest.mark.parametrize("training", [True, False])
def test_encoder_layer_that_fails_when_it_is_packed_runs(training):
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 32)
    expected = model.eval()(x).detach()

    @nano(use_ipex=True, verbose=False)
    def run(model, optimizer):
        model.train(training)
        return model(x)

    found = run(model, torch.optim.AdamW(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
