"""Tests of nano_loop.cpu.process."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cpu import memory_left, peak_memory, process, resident_memory
from nano_loop.cpu.tree import Tree

MB = 2**20
CHILD = "from nano_loop.cpu import peak_memory; before = peak_memory(); {use}; print(peak_memory() - before)"


def growth(use: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHILD.format(use=use)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_peak_is_kept_after_the_memory_is_given_back() -> None:
    assert 95 * MB < growth("block = bytes([1]) * (100 << 20); del block") < 110 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lets ru_maxrss begin at what the parent had")
def test_peak_of_a_child_does_not_include_what_its_parent_has_had() -> None:
    child = "from nano_loop.cpu.process import peak_memory; print(peak_memory())"
    parent = f"import subprocess, sys; b = bytes([1]) * (1 << 30); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 900 * MB


def test_without_proc_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "Tree", lambda _: Tree(tmp_path))
    assert peak_memory() > 10 * MB


def test_resident_memory_grows_by_what_is_written_and_falls_when_it_is_given_back() -> None:
    use = "a = now(); block = bytes([1]) * (100 << 20); b = now(); del block; print(b - a, b - now())"
    child = f"from nano_loop.cpu import resident_memory as now; {use}"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert all(95 * MB < int(number) < 110 * MB for number in done.stdout.split())


def test_without_proc_no_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", missing)
    assert resident_memory() is None


def missing(*_: object, **__: object) -> None:
    raise FileNotFoundError


MEMINFO = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 100 kB\n"}
V2 = {"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": "1 2 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
V1 = {
    "/proc/self/cgroup": "4:memory:/a\n",
    "/proc/self/mountinfo": "1 2 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
OF_V2 = {
    "memory.max": 900 << 10,
    "memory.current": 700 << 10,
    "memory.stat": f"anon 1\nfile {300 << 10}\nshmem {200 << 10}\n",
}
OF_V1 = {
    "memory.limit_in_bytes": 900 << 10,
    "memory.usage_in_bytes": 700 << 10,
    "memory.stat": f"cache {300 << 10}\nrss 1\ntotal_cache {300 << 10}\ntotal_shmem {200 << 10}\n",
}


def below(folder: str, files: dict[str, object], **more: object) -> dict[str, object]:
    others = {name.replace("__", "."): value for name, value in more.items()}
    return {f"/sys/fs/cgroup/{folder}/{name}": value for name, value in (files | others).items()}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        pytest.param({}, None, id="no limit"),
        # 900 - 700 are free, 100 of files without shared memory can be freed, and 100 are swap.
        pytest.param(V2 | below("a", OF_V2), 400, id="version 2, of an ancestor"),
        pytest.param(V2 | below("a", OF_V2 | {"memory.swap.max": 0, "memory.swap.current": 0}), 300, id="no swap"),
        pytest.param(V2 | below("a/b", OF_V2 | {"memory.max": "max"}), None, id="version 2 without a limit"),
        pytest.param(V1 | below("memory/a", OF_V1), 400, id="version 1"),
        pytest.param(
            V1
            | below("memory/a", OF_V1)
            | below(
                "memory/a",
                {"memory.memsw.limit_in_bytes": 950 << 10, "memory.memsw.usage_in_bytes": 710 << 10},
            ),
            340,
            id="version 1 with a limit of both",
        ),
        pytest.param(
            V1 | below("memory/a", OF_V1 | {"memory.limit_in_bytes": "9223372036854771712"}),
            None,
            id="version 1 without a limit",
        ),
    ],
)
def test_cgroup_leaves_what_is_free_or_can_be(tmp_path: Path, files: dict[str, object], left: int | None) -> None:
    for name, value in (MEMINFO | files).items():
        path = Path(f"{tmp_path}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    found = memory_left(Tree(tmp_path), is_live=False)
    expected = {"memory and swap": 8100 << 10} | ({} if left is None else {"the cgroup": left << 10})
    assert found == expected


@pytest.mark.parametrize("name", ["v", "d"])
def test_ulimit_leaves_what_the_process_has_not_taken(name: str) -> None:
    child = "from nano_loop.cpu import memory_left; from nano_loop.cpu.tree import Tree; print(memory_left(Tree('/')))"
    limited = ["bash", "-c", f'ulimit -{name} 4000000; exec "$0" -c "{child}"', sys.executable]
    found = eval(subprocess.run(limited, capture_output=True, text=True, check=True).stdout)
    assert 3000000 << 10 < found[f"ulimit -{name}"] < 4000000 << 10
