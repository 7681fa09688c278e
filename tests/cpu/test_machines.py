"""Properties read from recorded and made-up machines: `machines/README.md` describes the tables."""

import json

import pytest

from nano_loop.cpu import format_cpu_list, given_shares, partition, process_counts, read_machine
from nano_loop.cpu.reading import Host
from nano_loop.cpu.tree import parse_cpu_list

from .recording import MACHINES, built, unpack, write_all
from .test_reading import assert_consistent

CASES = json.loads((MACHINES / "cases.json").read_text(encoding="utf-8"))
BUILT = json.loads((MACHINES / "shares.json").read_text(encoding="utf-8"))
CPUS = "sys/devices/system/cpu"
QUOTAS = json.loads((MACHINES / "quotas.json").read_text(encoding="utf-8"))


def made(case, folder):
    """Return the machine of a case, whose files are written below the folder."""
    if "of" in case:
        unpack(f"{case['of']}.txt", folder)
    for pattern in case.get("without", ()):
        for file in folder.glob(pattern.lstrip("/")):
            file.unlink()
    for path, text in case.get("files", {}).items():
        write_all([path], text.split("\n"), folder)
    affinity = frozenset(parse_cpu_list(case["affinity"])) if "affinity" in case else None
    return read_machine(folder / case.get("root", ""), Host(affinity=affinity, **case.get("host", {})))


def grouped(machine, name):
    """Return the CPUs of each value of an attribute."""
    values = sorted({getattr(cpu, name) for cpu in machine.logical_cpus}, key=str)
    return {
        str(value): format_cpu_list([cpu.id for cpu in machine.logical_cpus if getattr(cpu, name) == value])
        for value in values
    }


def in_order(cpus):
    return format_cpu_list(cpus) if list(cpus) == sorted(cpus) else ",".join(map(str, cpus))


def texts_of(shares):
    """Return each share as its computing CPUs and, if they differ, its loading CPUs."""
    shares = [[share.cpus, share.loader_cpus] for share in shares]
    return [" + ".join(map(in_order, share[: 1 + (share[0] != share[1])])) for share in shares]


def described(machine):
    return {
        **{name: getattr(machine, name) for name in ("name", "architecture", "quota")},
        **{name: grouped(machine, name) for name in ("package", "numa_node", "last_level_cache", "core_kind")},
        "bf16": machine.has_fast_bf16,
        "threads": machine.num_threads,
        "allowed": format_cpu_list(machine.allowed),
        "cores": " ".join(map(format_cpu_list, machine.physical_cores)),
        "instruction_sets": " ".join(sorted(machine.instruction_sets)),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_machine_is_read(tmp_path, case):
    machine, found = made(case, tmp_path), dict(case["found"])
    assert_consistent(machine)
    for count, shares in found.pop("shares", {}).items():
        assert texts_of(partition(machine, int(count))) == shares
    for lists, shares in found.pop("given", ()):
        assert texts_of(given_shares(machine, lists)) == shares
    assert found.pop("counts", None) in (None, [*process_counts(machine)])
    for number, pattern in enumerate(found.pop("unneeded", ())):
        without = made({**case, "without": [f"{CPUS}/cpu*/{pattern}"]}, tmp_path / str(number))
        assert (without.logical_cpus, without.physical_cores) == (machine.logical_cpus, machine.physical_cores)
    assert set(found.pop("sets", "").split()) <= machine.instruction_sets
    assert not set(found.pop("lacks", "").split()) & machine.instruction_sets
    properties = described(machine)
    assert {name: properties[name] for name in found} == found


@pytest.mark.parametrize(
    ("files", "text", "quota"), [(each["files"], *pair) for each in QUOTAS for pair in each["quotas"]]
)
def test_quota_is_a_share_of_its_period(tmp_path, files, text, quota):
    case = {"files": {path: content.replace("TEXT", text) for path, content in files.items()}}
    assert made(case, tmp_path).quota == quota


@pytest.mark.parametrize("case", BUILT, ids=str)
def test_shares_straddle_no_boundary_that_they_can_avoid_and_counts_fill_each_node(case):
    machine = built(case["caches"], case.get("quota"))
    assert "shares" not in case or texts_of(partition(machine, len(case["shares"]))) == case["shares"]
    assert "counts" not in case or process_counts(machine) == tuple(case["counts"])
