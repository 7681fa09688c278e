"""Holds every test to leaving the process as it found it, and keeps the caller's launch variables out of the tests."""

import gc
import os
import signal
import sys
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from distributed.conftest import nothing_left  # noqa: F401 - a fixture of tests that launch processes
from distributed.team import Team
from hypothesis import settings
from leaks import affinity_masks, changes, moved_threads, process_state
from lightning_utilities.core.rank_zero import rank_zero_only

from nano_loop.autotune import budget, choices
from nano_loop.autotune.budget import SHARE
from nano_loop.autotune.choices import Choices
from nano_loop.config.environment import KERNELS
from nano_loop.runtime import trial
from nano_loop.runtime.mkl_functions import resolve_mkl_functions
from nano_loop.steps import tune_operators

LAUNCH_PREFIXES = ("NANO_LOOP_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "GROUP_", "ROLE_")
LAUNCH_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
)


def pytest_addoption(parser):
    parser.addoption("--one-of", type=int, default=1, metavar="N", help="run one of N tests, always the same")


def pytest_configure(config):
    """Take launch variables away before test files are imported, for a decorator reads them at once.

    And let Ctrl-C be heard, which a shell lets its jobs in the background ignore: tests send it. Hypothesis tries a few
    examples where slow tests are left out.
    """
    # Slow machines are no fault of a test, and examples that were saved on one machine make another's runs differ.
    examples = 20 if config.getoption("markexpr") == "not slow" else 200
    settings.register_profile("nano_loop", max_examples=examples, deadline=None, database=None, derandomize=True)
    settings.load_profile("nano_loop")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        config.add_cleanup(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where a CPU has no such instructions, runs warn that they are slow: that is the machine's, and no fault of a test.
    config.addinivalue_line("filterwarnings", "ignore:.*this CPU has no bf16 instructions")
    for dtype in (torch.float32, torch.float64):
        resolve_mkl_functions(dtype)  # so that plain loops compute the same each time, too
    patch = pytest.MonkeyPatch()
    for name in [*os.environ]:
        if name != KERNELS and (name.startswith(LAUNCH_PREFIXES) or name in LAUNCH_NAMES):
            patch.delenv(name)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(config, items):
    """Keep one of N tests, by a hash of their names, those of teams first and those that launch processes last.

    Others keep their order. pytest's workers halve the tests, and one that has finished takes over what another has
    left. So one of them alone starts the teams, and both launch processes to the end, which is most of the time.
    """
    number = config.getoption("one_of")
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % number == 0]
    items.sort(key=lambda item: _launches(item) - ("teams" in item.fixturenames))


def _launches(item):
    return "nothing_left" in item.fixturenames or item.path.parent.name == "examples"


def pytest_collection_finish():
    """Take what was imported, which stays, out of the garbage collector's sight.

    Tests that look for what a run has left collect first, and going through all of torch takes most of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves the process different, with what was there before and what is there now."""
    before, masks = process_state(), affinity_masks()
    yield
    left = [*changes(before, process_state()), *moved_threads(masks, affinity_masks())]
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_is_measured(nothing_leaks, monkeypatch):
    """Let runs in the test's process compute by the first guesses, or what a test shows would depend on times."""
    monkeypatch.setattr(budget, "STEPS", -1)
    monkeypatch.setattr(budget, "SHARE", -1)
    for module in (tune_operators, trial):
        monkeypatch.setattr(module, "choices_for", lambda machine: Choices(None))


@pytest.fixture
def measuring(nothing_is_measured, monkeypatch, tmp_path):
    """Let runs measure, with time for all shapes and an empty cache folder; return the folder."""
    monkeypatch.setattr(budget, "STEPS", 1e6)
    monkeypatch.setattr(budget, "SHARE", SHARE)
    for module in (tune_operators, trial):
        monkeypatch.setattr(module, "Waits", lambda: SimpleNamespace(share=lambda: 0.0))
        monkeypatch.setattr(module, "choices_for", choices.choices_for)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "_opened", {})
    return tmp_path / "nano_loop"


@pytest.fixture
def deterministic():
    """Return what switches torch's deterministic mode on, as a loop may do at any time. The test ends without it."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rank_put_back(monkeypatch):
    """Put back the rank by which Lightning prints and logs: Fabric sets it and leaves it, also where nothing runs."""
    monkeypatch.setattr(rank_zero_only, "rank", getattr(rank_zero_only, "rank", 0), raising=False)


@pytest.fixture
def without_ipex(monkeypatch):
    """Let a report be as where no test before has imported IPEX, which a run that did not ask for it tells of."""
    monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)


@pytest.fixture(scope="session")
def teams():
    """By their sizes; a team that a test has broken is made anew."""
    made = {}
    yield made
    for team in made.values():
        team.close()


@pytest.fixture
def team(teams):
    """Give the team of a size: ``team(2)(function, *args)`` calls ``function(ranks, *args)`` in two processes."""

    def of(size):
        if size in teams and teams[size].broken:
            teams.pop(size).close()
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    return of
