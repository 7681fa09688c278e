"""Tests of nano_loop.cpu.process."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nano_loop.cpu import memory_left, peak_memory, process, resident_memory
from nano_loop.cpu.process import Waits
from nano_loop.cpu.tree import Tree

MB = 2**20


def printed(program: str, command: Sequence[str] = (sys.executable, "-c")) -> str:
    return subprocess.run([*command, program], capture_output=True, text=True, check=True).stdout


def test_peak_is_kept_after_the_memory_is_given_back() -> None:
    use = "before = peak_memory(); block = bytes([1]) * (100 << 20); del block; print(peak_memory() - before)"
    assert 95 * MB < int(printed(f"from nano_loop.cpu import peak_memory; {use}")) < 110 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lets ru_maxrss begin at what the parent had")
def test_peak_of_a_child_does_not_include_what_its_parent_has_had() -> None:
    child = "from nano_loop.cpu.process import peak_memory; print(peak_memory())"
    parent = f"import subprocess, sys; b = bytes([1]) * (1 << 30); subprocess.run([sys.executable, '-c', {child!r}])"
    assert int(printed(parent)) < 900 * MB


def test_resident_memory_grows_by_what_is_written_and_falls_when_it_is_given_back() -> None:
    use = "a = now(); block = bytes([1]) * (100 << 20); b = now(); del block; print(b - a, b - now())"
    numbers = printed(f"from nano_loop.cpu import resident_memory as now; {use}").split()
    assert all(95 * MB < int(number) < 110 * MB for number in numbers)


def test_without_proc_the_system_is_asked_for_the_peak_and_no_other_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(process, "Tree", lambda _: Tree(tmp_path))
    assert peak_memory() > 10 * MB
    monkeypatch.setattr("builtins.open", missing)
    assert resident_memory() is None


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
    limited = f'ulimit -{name} 4000000; exec "{sys.executable}" -c "{child}"'
    found = eval(printed(limited, ("bash", "-c")))
    assert 3000000 << 10 < found[f"ulimit -{name}"] < 4000000 << 10


def write(tasks: Path, **threads: str) -> None:
    for name, text in threads.items():
        (tasks / name).mkdir(exist_ok=True)
        (tasks / name / "schedstat").write_text(text)


def test_share_is_of_the_time_since_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, t1="1000 5000 3\n", t2="0 0 0\n")
    waits = Waits(tmp_path)
    write(tmp_path, t1="1600 5300 9\n", t2="0 0 0\n", t3="0 100 1\n")
    assert waits.share() == pytest.approx(400 / 1000)


@pytest.mark.parametrize("text", ["", "1 2", "words and words"])
def test_nothing_is_known_where_the_system_does_not_count(tmp_path: Path, text: str) -> None:
    write(tmp_path, t1=text)
    assert Waits(tmp_path).share() is None


BUSY = """
import os, subprocess, sys, time
from nano_loop.cpu.process import Waits
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
waits, end = Waits(), time.monotonic() + 1
while time.monotonic() < end:
    pass
other.kill()
other.wait()
print(waits.share())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts waits")
def test_process_that_shares_its_cpu_waits_for_it() -> None:
    assert 0.3 < float(printed(BUSY)) < 0.95
