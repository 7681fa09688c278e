"""Systems without /proc are asked by sysctl or psutil."""

import subprocess

import psutil

from nano_loop.cpu import host as host_module
from nano_loop.cpu.host import live_host


def test_a_live_mac_is_asked_once_for_all_that_counts(monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="hw.ncpu: 14\nno colon here\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(host_module.platform, "system", lambda: "Darwin")
    assert live_host().sysctl == {"hw.ncpu": "14"}
    assert commands == [["/usr/sbin/sysctl", "hw", "machdep.cpu"]]


def test_a_system_without_masks_is_counted_by_psutil(monkeypatch):
    monkeypatch.delattr(host_module.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else None)
    assert (live_host().logical_count, live_host().physical_count) == (8, None)
