"""A search repeats any loop on copies, in any precision, and leaves the caller's objects and files where they were."""

import ctypes
import os
import random
import signal
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from marked import MARK, processes_with
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import nano_loop
from nano_loop import TorchNano
from nano_loop.distributed.launch_local.kept_server import end_kept
from nano_loop.search.trial_processes import TrialProcesses
from search.small import FIXED, STEPS, loss_of, made, state_of


class Positions(Sampler):
    """A sampler that knows how far it is, as those of loaders that go on after a checkpoint do."""

    def __init__(self, count):
        self.count = count
        self.position = 0

    def __iter__(self):
        while self.position < self.count:
            self.position += 1
            yield (self.position * 7 + random.randrange(3)) % self.count
        self.position = 0

    def __len__(self):
        return self.count - self.position


class Counting(Dataset):
    """A dataset that counts what is fetched, and draws random numbers as augmentation does."""

    def __init__(self, count):
        self.items = torch.rand(count, 8, generator=torch.Generator().manual_seed(3))
        self.fetched = 0

    def __getitem__(self, index):
        self.fetched += 1
        return self.items[index] + float(numpy.random.rand()) + torch.rand(8)

    def __len__(self):
        return len(self.items)


def loaders():
    """Return a loader that is in the middle of an epoch, and one that shuffles by a generator of its own."""
    resumed = DataLoader(Counting(24), batch_size=4, sampler=Positions(24))
    resumed.sampler.position = 8
    shuffled = DataLoader(Counting(16), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
    return resumed, shuffled


def everything_of(model, optimizer, resumed, shuffled):
    positions = (resumed.sampler.position, resumed.dataset.fetched, shuffled.dataset.fetched)
    return state_of(model, optimizer), positions, shuffled.generator.get_state().tolist()


def train(model, optimizer, resumed, shuffled, seen):
    seen.append(everything_of(model, optimizer, resumed, shuffled))
    for loader in (resumed, shuffled):
        for x in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    return len(seen)


def trained(function):
    """Return what a loop sees as it begins, and what it leaves, from the same random states."""
    model, optimizer, _ = made()
    resumed, shuffled = loaders()
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(11)
    seen = []
    assert function(model, optimizer, resumed, shuffled, seen) == 1
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return seen[0], everything_of(model, optimizer, resumed, shuffled)[1:], torch.get_rng_state(), weights


@pytest.mark.slow
def test_training_after_a_search_is_that_without_one(only):
    begun, positions, random_state, weights = trained(train)
    searched = nano_loop.nano(tune=True, verbose=False, **FIXED, **STEPS)(train)
    found = trained(searched)
    assert searched.report.options["tune"] is False
    assert found[0] == begun  # bit for bit, when the loop begins
    assert found[1] == positions
    assert found[2].equal(random_state)
    torch.testing.assert_close(found[3], weights)


@pytest.mark.slow
def test_files_of_a_trial_are_its_own_and_compiled_code_may_write_on_its_rank_0(only, tmp_path):
    def fit(model, optimizer, batch, out):
        if nano_loop.is_global_zero():
            sqlite3.connect(out / "database").execute("create table if not exists new (value)").connection.close()
            descriptor = ctypes.CDLL(None).open(os.fsencode(out / "compiled"), os.O_WRONLY | os.O_CREAT, 0o600)
            assert descriptor >= 0
            os.close(descriptor)
            (out / "number").write_text(f"{int((out / 'number').read_text()) + 1}")
        for _ in range(99):
            optimizer.zero_grad()
            loss_of(model, batch[nano_loop.global_rank() :]).backward()
            optimizer.step()

    model, optimizer, batch = made()
    (tmp_path / "number").write_text("0")
    options = {**FIXED, **STEPS, "num_processes": 2, "auto_lr": False}
    nano_loop.nano(tune=True, verbose=False, **options)(fit)(model, optimizer, batch.share_memory_(), tmp_path)
    assert (tmp_path / "number").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["compiled", "database", "number"]


class Nano(TorchNano):
    """Makes its model itself, and draws what it trains on from torch's generator."""

    def train(self, steps, seen):
        seen.append(torch.get_rng_state().tolist())
        model = nn.Linear(8, 1)
        loader = DataLoader(torch.rand(16, 8), batch_size=4, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = self.setup(model, optimizer, loader)
        for _ in range(steps):
            for x in loader:
                optimizer.zero_grad()
                self.backward(loss_of(model, x))
                optimizer.step()
        return model.weight.detach().clone(), len(seen)


@pytest.mark.slow
def test_torch_nano_is_searched_and_then_trained(only):
    only({"precision": "bf16-mixed"})
    torch.manual_seed(2)
    begun = []
    expected, _ = Nano(verbose=False).train(2, begun)
    torch.manual_seed(2)
    seen = []
    instance = Nano(tune=True, verbose=False, **FIXED)
    weights, calls = instance.train(2, seen)
    assert (calls, seen) == (1, begun)
    assert instance.report.options["tune"] is False
    bf16 = instance.report.options["precision"] == "bf16-mixed"  # a faster one is taken
    torch.testing.assert_close(weights, expected, **{"rtol": 0.05, "atol": 0.05} if bf16 else {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:precision='16-mixed'")  # on CPUs that are slow in it
def test_search_in_fp16_measures_and_keeps_it(only):
    model, optimizer, batch = made()
    before = state_of(model, optimizer)
    found = nano_loop.tune(model, optimizer, batch, loss_of, seconds=60, precision=16, **FIXED, **STEPS)
    assert state_of(model, optimizer) == before
    assert found.options["precision"] == "16-mixed"
    assert "precision=16" in found.line
    assert all(row.milliseconds > 0 for row in found.rows)
    assert [row.note for row in found.rows if row.plain] == [""]  # slower or not, it cannot be chosen


class Fails(nn.Linear):
    """Raises in bf16, asks for more memory than there is in fp16, and ends its process in fp64."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            if torch.get_autocast_dtype("cpu") == torch.bfloat16:
                raise ZeroDivisionError("no such kernel")
            torch.empty(1 << 50)
        if x.dtype == torch.float64:
            os.kill(os.getpid(), signal.SIGKILL)  # as where memory has run out
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:precision='16-mixed'")
def test_candidates_that_raise_or_need_too_much_memory_are_shown_and_the_rest_goes_on(only):
    names = ["bf16-mixed", "16-mixed", "64-true", "bf16-true"]
    only(*({"precision": name} for name in names))
    found = nano_loop.tune(*made(Fails), loss_of, seconds=60, **FIXED, **STEPS)
    notes = {row.options.get("precision"): row.note for row in found.rows if not row.plain}
    assert notes["bf16-mixed"].startswith("raised ZeroDivisionError: no such kernel")
    assert "DefaultCPUAllocator: can't allocate memory" in notes["16-mixed"]
    assert "SIGKILL" in notes["64-true"]
    times = {row.options.get("precision"): row.milliseconds for row in found.rows if not row.plain}
    assert times["bf16-mixed"] is times["16-mixed"] is times["64-true"] is None
    assert times["bf16-true"] > 0
    assert times[None] > 0
    text = " ".join(str(found).split())  # its lines are wrapped
    assert all(name in text for name in ("no such kernel", "can't allocate memory"))
    assert found.options.get("precision") in (None, "bf16-true")


@pytest.mark.slow
def test_ctrl_c_in_a_search_ends_its_trials_and_leaves_nothing(only, cache, monkeypatch):
    take, living = TrialProcesses.take, []
    monkeypatch.setenv(MARK, str(cache))

    def interrupted(self, count, timeout):
        living.extend(processes_with(str(cache)))
        os.kill(os.getpid(), signal.SIGINT)
        return take(self, count, timeout)

    monkeypatch.setattr(TrialProcesses, "take", interrupted)
    model, optimizer, batch = made()
    before = state_of(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        nano_loop.tune(model, optimizer, batch, loss_of, seconds=30, **FIXED, **STEPS)
    assert state_of(model, optimizer) == before
    # The one that forks and the one that has imported, kept for the next search.
    assert len(processes_with(str(cache))) <= 2
    end_kept()
    assert len(living) >= 3  # the one that forks, and two trials
    assert processes_with(str(cache)) == []
    assert [*Path("/dev/shm").glob(f"nano_loop-{os.getpid()}-*")] == []
    assert [*cache.glob("**/*.json")] == []
    monkeypatch.setattr(TrialProcesses, "take", take)
    assert not nano_loop.tune(model, optimizer, batch, loss_of, seconds=5, **FIXED, **STEPS).cached


@pytest.mark.skipif(not find_spec("intel_extension_for_pytorch"), reason="IPEX is not installed")
def test_ipex_is_measured_where_it_is_installed_and_does_not_reach_this_process(only):
    only({"use_ipex": True})
    fixed = {name: value for name, value in FIXED.items() if name != "use_ipex"}
    imported = "intel_extension_for_pytorch" in sys.modules
    tuning = nano_loop.tune(*made(), loss_of, seconds=40, **fixed, **STEPS, precision="bf16")
    (row,) = [row for row in tuning.rows if row.options]
    assert row.milliseconds > 0, row.note
    assert ("intel_extension_for_pytorch" in sys.modules) == imported
