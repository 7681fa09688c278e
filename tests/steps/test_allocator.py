"""glibc is configured to keep freed memory, if it is the allocator."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from nano_loop import accelerated
from nano_loop.cpu import glibc
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import allocator
from nano_loop.steps.allocator import Allocator

GLIBC = pytest.mark.skipif(not glibc.is_glibc(), reason="it is about glibc")


@pytest.fixture
def settings(monkeypatch):
    """Record the settings instead of applying them."""
    recorded = []
    monkeypatch.setattr(allocator, "_set", recorded.append)
    return recorded


def test_thresholds_stay_until_the_last_run_has_ended(step, settings):
    first, second = step(Allocator), step(Allocator)
    first.apply(TrainingObjects())
    second.apply(TrainingObjects())
    first.undo()
    assert settings == [glibc.SETTINGS]
    assert allocator._trim_after_fork().is_on
    second.undo()
    assert settings == [glibc.SETTINGS, allocator._LEFT]
    assert not allocator._trim_after_fork().is_on


def test_large_blocks_are_mapped_until_each_optimizer_has_made_its_states(settings):
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    with accelerated(models, optimizers, verbose=False):
        for model, optimizer in zip(models, optimizers, strict=True):
            assert settings[1:] == [allocator._FIRST]
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert settings[2:] == [glibc.SETTINGS]
    assert settings[3:] == [allocator._LEFT]


@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_users_own_settings_stay(step, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    reason = step(Allocator).skip_reason(TrainingObjects())
    assert reason.code == "users_setting"
    assert variable in reason.detail


def test_what_the_command_line_has_exported_is_no_reason_and_leaves_the_thresholds(step, monkeypatch, settings):
    for name, value in glibc.SETTINGS_AS_VARIABLES.items():
        assert name in glibc.USERS_OWN
        monkeypatch.setenv(name, value)
    made = step(Allocator)
    assert made.skip_reason(TrainingObjects()) is None
    assert made.apply(TrainingObjects()) == "glibc keeps freed memory, as set by its environment variables"
    assert allocator._trim_after_fork().is_on
    made.undo()
    assert settings == []
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert made.skip_reason(TrainingObjects()).code == "users_setting"


def test_another_c_library_is_a_reason(step, monkeypatch):
    monkeypatch.setattr(glibc.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert step(Allocator).skip_reason(TrainingObjects()).code == "not_glibc"


MEASURED = """
    import multiprocessing, resource, torch
    from nano_loop.cpu import glibc
    from nano_loop.steps import allocator

    context = multiprocessing.get_context("fork")

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            torch.ones(12_000_000)  # 48 MB, above the 32 MB up to which glibc adjusts itself
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def work(started, ended):
        started.set()
        ended.wait(60)

    def resident():
        started, ended = context.Event(), context.Event()
        child = context.Process(target=work, args=(started, ended))
        child.start()
        assert started.wait(60)
        found = rss_of(child.pid)
        ended.set()
        child.join()
        return found, rss_of("self")

    def rss_of(pid):  # of anonymous memory, in kB
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

    torch.set_num_threads(1)
    plain = faults()
    allocator._set(glibc.SETTINGS)
    faults()
    print(plain, faults())
    with allocator._trimmed_children():
        print(*resident())
    print(*resident())  # when it has ended
"""


@GLIBC
def test_large_allocations_stop_faulting_and_a_forked_process_returns_freed_memory_that_it_shares():
    """In a separate process, because glibc adapts to earlier allocations of this one.

    Pages that a child has not returned are copied one by one when the training process writes to them.
    """
    command = [sys.executable, "-c", textwrap.dedent(MEASURED)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    (plain, kept), trimmed, ended = (map(int, line.split()) for line in run.stdout.splitlines())
    assert kept < plain / 10
    for (child, parent), applied in ((trimmed, True), (ended, False)):
        assert (child < parent - 40_000) is applied
