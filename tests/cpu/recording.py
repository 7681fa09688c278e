"""Writes a recorded machine as the folders /proc and /sys; `machines/README.md` describes the format."""

import itertools
import re
from pathlib import Path

from nano_loop.cpu import LogicalCpu, Machine

MACHINES = Path(__file__).parent / "machines"


def unpack(recording: str, root: Path) -> Path:
    paths: list[str] = []
    content: list[str] = []
    for line in (MACHINES / recording).read_text(encoding="utf-8").splitlines():
        if line.startswith("include "):
            unpack(line.removeprefix("include "), root)
        elif line.startswith("== "):
            if content:
                write_all(paths, content, root)
                paths, content = [], []
            paths.append(line.removeprefix("== "))
        elif paths:
            content.append(line)
    write_all(paths, content, root)
    return root


def write_all(paths: list[str], content: list[str], root: Path) -> None:
    text = "".join(f"{line}\n" for line in content)
    for heading in paths:
        path, _, cpus = heading.partition(" for each of ")
        for expanded in expand(path):
            write(root, expanded, for_each(text, numbers(cpus), root) if cpus else text)


def write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def expand(path: str) -> list[str]:
    """Return one path for each combination of the numbers in braces."""
    parts = re.split(r"\{(.*?)\}", path)
    choices = [numbers(part) if odd else [part] for part, odd in zip(parts, itertools.cycle([False, True]))]
    return ["".join(choice) for choice in itertools.product(*choices)]


def numbers(text: str) -> list[str]:
    ranges = [part.split("-") for part in text.split(",")]
    return [str(number) for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def for_each(text: str, cpus: list[str], root: Path) -> str:
    return "".join(fill(text, cpu, root) for cpu in cpus)


def fill(text: str, cpu: str, root: Path) -> str:
    """Fill in the CPU's own numbers in one block of /proc/cpuinfo, as the kernel does from the topology."""
    text = text.replace("{cpu}", cpu)
    for name in ("core_id", "physical_package_id"):
        if f"{{{name}}}" in text:
            file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/{name}"
            text = text.replace(f"{{{name}}}", file.read_text(encoding="utf-8").strip())
    return text


def machine_of(*cpus: LogicalCpu, **fields: object) -> Machine:
    defaults = {"name": "test", "architecture": "x86_64", "allowed": tuple(cpu.id for cpu in cpus)}
    return Machine(logical_cpus=cpus, **{**defaults, **fields})


def built(caches: list[list[int]], quota: float | None = None, **fields: object) -> Machine:
    """Return a machine without SMT, from the core counts of each node's last-level caches: ``[[4, 4], [4, 4]]``."""
    cpus: list[LogicalCpu] = []
    for node, counts in enumerate(caches):
        for count in counts:
            first = len(cpus)
            cpus += [LogicalCpu(i, i, numa_node=node, last_level_cache=first) for i in range(first, first + count)]
    return machine_of(*cpus, quota=quota, **fields)
