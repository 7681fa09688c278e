"""A recorded machine on which `doctor` finds nothing, for tests that change one thing at a time."""

import dataclasses
import functools
import shutil
from pathlib import Path

import pytest
from cpu.recording import unpack, write

from nano_loop.cli.doctor import findings_of
from nano_loop.cli.inspected import inspect_system
from nano_loop.cpu.reading import Host

PACKAGES = {"nano-loop": "0.1.0", "torch": "2.13.0+cpu", "lightning-fabric": "2.6.6"}
CGROUP = "26 25 0:29 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
CLEAN = {
    "/proc/meminfo": "MemTotal:       65859580 kB\nMemFree:        61000000 kB\nMemAvailable:   63000000 kB\n",
    "/proc/self/mountinfo": CGROUP,
}


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    """Return a function that writes the files of a recorded machine, and others, and returns their root folder.

    They are hundreds, so they are written once for all checks of the same machine.
    """
    recorded = functools.cache(lambda name: unpack(f"{name}.txt", tmp_path_factory.mktemp(name)))

    @functools.cache
    def root_of(name, files):
        machine, root = recorded(name), tmp_path_factory.mktemp("root")
        shutil.copytree(machine / "proc", root / "proc")
        shutil.copytree(machine / "sys", root / "sys", ignore=shutil.ignore_patterns("devices"))
        (root / "sys/devices").symlink_to(machine / "sys/devices")
        for path, text in files:
            write(root, path, text)
        return root

    return root_of


@pytest.fixture
def inspect(machines):
    """Return a function that inspects the machine, with other files, another environment or other packages."""

    def inspect(
        files=None,
        environ=None,
        machine="epyc_9v74_azure",
        affinity=None,
        shared=32 << 30,
        instruction_sets=None,
        **replaced,
    ):
        root = machines(machine, (*{**CLEAN, **(files or {})}.items(),))
        found = inspect_system(root, environ or {}, Host(affinity=affinity))
        memory = dataclasses.replace(found.memory, shared=shared)
        if instruction_sets is not None:
            machine = dataclasses.replace(found.machine, instruction_sets=frozenset(instruction_sets))
            found = dataclasses.replace(found, machine=machine)
        return dataclasses.replace(found, **{"memory": memory, "packages": PACKAGES, **replaced})

    return inspect


@pytest.fixture
def found(inspect):
    """Return a function that returns the findings on the machine after one change."""
    return lambda **change: findings_of(inspect(**change))


@pytest.fixture
def only(found):
    """Return a function that returns the only finding on the machine after one change."""

    def only(**change):
        (finding,) = found(**change)
        assert all(finding[:4])
        for part in (finding.what, finding.why, finding.advice):
            assert not part.endswith(".")
        return finding

    return only


@pytest.fixture
def library(tmp_path):
    def make(path, folder=None):
        file = Path(folder or tmp_path / "root") / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return file

    return make
