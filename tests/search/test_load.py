"""The load of other programs is that of the CPUs which this process may use."""

from collections import namedtuple

import psutil
import pytest

from nano_loop.search import load

Times = namedtuple("Times", "user system idle iowait")


@pytest.mark.parametrize(("cpus", "share"), [([0], 1.0), ([1], 0.25), ([0, 1], 0.625), ([7], 0.0)], ids=str)
def test_share_of_the_time_in_which_cpus_are_busy(monkeypatch, cpus, share):
    readings = iter([[Times(5, 5, 5, 0), Times(0, 0, 0, 0), Times(0, 0, 0, 0)], [Times(7, 7, 5, 0), Times(1, 0, 2, 1)]])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(readings))
    assert load.load_of(cpus) == pytest.approx(share)


def test_load_is_not_known_without_proc(monkeypatch):
    def unreadable(percpu):
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", unreadable)
    assert load.load_of([0]) == 0.0
