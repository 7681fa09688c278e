"""Checks that every test leaves the process as it found it, and hides the caller's launch variables from the tests."""

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

from nano_loop.autotune import choices, tuner
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import SHARE
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
    """Remove launch variables before test files are imported, because a decorator reads them immediately.

    Also restore the handling of Ctrl-C, which shells ignore in background jobs: tests send it. Hypothesis tries only a
    few examples if slow tests are deselected.
    """
    # No deadline, because machines may be slow, and no database, because runs would then differ between machines.
    examples = 20 if config.getoption("markexpr") == "not slow" else 200
    settings.register_profile("nano_loop", max_examples=examples, deadline=None, database=None, derandomize=True)
    settings.load_profile("nano_loop")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        config.add_cleanup(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Runs warn that a CPU without these instructions is slow, which is not a failure of the test.
    config.addinivalue_line("filterwarnings", "ignore:.*this CPU has no bf16 instructions")
    for dtype in (torch.float32, torch.float64):
        resolve_mkl_functions(dtype)  # so that plain loops compute the same values each time, too
    patch = pytest.MonkeyPatch()
    for name in [*os.environ]:
        if name != KERNELS and (name.startswith(LAUNCH_PREFIXES) or name in LAUNCH_NAMES):
            patch.delenv(name)
    config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(config, items):
    """Keep one of N tests by a hash of their names, and run team tests first and tests that launch processes last.

    Others keep their order. Each pytest worker starts with half of the tests and takes over others when it is done, so
    a single worker starts the teams, and both end by launching processes, which takes most of the time.
    """
    number = config.getoption("one_of")
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % number == 0]
    items.sort(key=lambda item: _launches(item) - ("teams" in item.fixturenames))


def _launches(item):
    return "nothing_left" in item.fixturenames or item.path.parent.name == "examples"


def pytest_collection_finish():
    """Exclude everything imported so far from garbage collection.

    Tests that check what a run leaves behind collect garbage first, and traversing torch takes most of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that changes the process, and show the state before and after."""
    before, masks = process_state(), affinity_masks()
    yield
    left = [*changes(before, process_state()), *moved_threads(masks, affinity_masks())]
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_is_measured(nothing_leaks, monkeypatch):
    """Make runs in the test process use the initial guesses, so that no test depends on timings."""
    monkeypatch.setattr(tuner, "STEPS", -1)
    monkeypatch.setattr(tuner, "SHARE", -1)
    for module in (tune_operators, trial):
        monkeypatch.setattr(module, "choices_for", lambda machine: Choices(None))


@pytest.fixture
def measuring(nothing_is_measured, monkeypatch, tmp_path):
    """Enable measurements, with time for all shapes and an empty cache folder; return the folder."""
    monkeypatch.setattr(tuner, "STEPS", 1e6)
    monkeypatch.setattr(tuner, "SHARE", SHARE)
    for module in (tune_operators, trial):
        monkeypatch.setattr(module, "Waits", lambda: SimpleNamespace(share=lambda: 0.0))
        monkeypatch.setattr(module, "choices_for", choices.choices_for)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "_opened", {})
    return tmp_path / "nano_loop"


@pytest.fixture
def deterministic():
    """Return a function that enables torch's deterministic mode, which is restored after the test."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def rank_put_back(monkeypatch):
    """Restore the rank that Lightning prints and logs with: Fabric sets it and never restores it."""
    monkeypatch.setattr(rank_zero_only, "rank", getattr(rank_zero_only, "rank", 0), raising=False)


@pytest.fixture
def without_ipex(monkeypatch):
    """Make the report independent of earlier tests that imported IPEX, which runs that did not ask for it mention."""
    monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)


@pytest.fixture(scope="session")
def teams():
    """Teams by size. A team broken by a test is recreated."""
    made = {}
    yield made
    for team in made.values():
        team.close()


@pytest.fixture
def team(teams):
    """Return a team by size: ``team(2)(function, *args)`` calls ``function(ranks, *args)`` in two processes."""

    def of(size):
        if size in teams and teams[size].broken:
            teams.pop(size).close()
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    return of
