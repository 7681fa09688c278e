"""Cores, packages, nodes, caches and kinds of cores: from sysfs, and from what is left without it."""

import shutil

import pytest

from nano_loop.cpu import LogicalCpu, read_machine

CPUS = "/sys/devices/system/cpu"


def cpus_of(root):
    return {cpu.id: cpu for cpu in read_machine(root).logical_cpus}


def test_siblings_that_are_not_adjacent_share_a_core(recorded):
    cpus = cpus_of(recorded("xeon_4309y_two_sockets"))
    assert len(cpus) == 32
    assert cpus[0] == LogicalCpu(0, physical_core=0, package=0, numa_node=0, last_level_cache=0)
    assert cpus[16] == LogicalCpu(16, physical_core=0, package=0, numa_node=0, last_level_cache=0)
    assert cpus[31] == LogicalCpu(31, physical_core=15, package=1, numa_node=1, last_level_cache=8)


def test_siblings_that_are_adjacent_share_a_core(recorded):
    cpus = cpus_of(recorded("epyc_9v74_azure"))
    assert [cpus[i].physical_core for i in range(6)] == [0, 0, 2, 2, 4, 4]


def test_one_node_may_have_several_last_level_caches(recorded):
    cpus = cpus_of(recorded("epyc_9v74_azure"))
    assert {cpu.numa_node for cpu in cpus.values()} == {0}
    assert [cpus[i].last_level_cache for i in (0, 15, 16, 31)] == [0, 0, 16, 16]


@pytest.mark.parametrize("machine", ["xeon_4309y_two_sockets", "epyc_9v74_azure", "core_i7_1260p", "graviton3"])
def test_core_ids_stand_in_for_missing_lists_of_siblings(recorded, machine):
    root = recorded(machine)
    complete = read_machine(root).physical_cores
    for file in root.glob("sys/devices/system/cpu/cpu*/topology/*_list"):
        file.unlink()
    assert read_machine(root).physical_cores == complete


@pytest.mark.parametrize("machine", ["xeon_4309y_two_sockets", "epyc_9v74_azure", "core_i7_1260p"])
def test_cpuinfo_stands_in_for_a_missing_topology(recorded, machine):
    root = recorded(machine)
    complete = cpus_of(root)
    for folder in root.glob("sys/devices/system/cpu/cpu*/topology"):
        shutil.rmtree(folder)
    assert cpus_of(root) == complete


def test_the_newer_name_of_the_siblings_list_is_read(planted):
    lists = {f"{CPUS}/cpu{cpu}/topology/core_cpus_list": "0-1\n" for cpu in (0, 1)}
    assert read_machine(planted({f"{CPUS}/online": "0-1\n", **lists})).physical_cores == ((0, 1),)


def test_a_core_id_is_unique_in_its_package_and_die_only(planted):
    files = {f"{CPUS}/online": "0-3\n"}
    for cpu, (package, die) in enumerate([(0, 0), (0, 1), (1, 0), (1, 0)]):
        topology = f"{CPUS}/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = f"{package}\n"
        files[f"{topology}/die_id"] = f"{die}\n"
        files[f"{topology}/core_id"] = "0\n"
    assert read_machine(planted(files)).physical_cores == ((0,), (1,), (2, 3))


def test_without_any_topology_each_cpu_is_a_core(planted):
    machine = read_machine(planted({f"{CPUS}/online": "0-3\n"}))
    assert machine.physical_cores == ((0,), (1,), (2,), (3,))
    assert machine.num_threads == 4


def test_a_sandbox_with_cpuinfo_alone_is_read(planted):
    # As gVisor has it.
    block = "processor\t: {0}\nmodel name\t: unknown\nphysical id\t: 0\ncore id\t\t: {0}\nflags\t\t: avx2\n\n"
    machine = read_machine(planted({"/proc/cpuinfo": "".join(block.format(cpu) for cpu in range(4))}))
    assert machine.name == "x86_64"
    assert machine.num_threads == 4
    assert {cpu.last_level_cache for cpu in machine.logical_cpus} == {0}


def test_firmware_that_says_minus_one_gives_each_cpu_a_core(planted):
    files = {f"{CPUS}/online": "0-1\n"}
    for cpu in (0, 1):
        files[f"{CPUS}/cpu{cpu}/topology/core_id"] = "-1\n"
        files[f"{CPUS}/cpu{cpu}/topology/physical_package_id"] = "-1\n"
    machine = read_machine(planted(files))
    assert machine.physical_cores == ((0,), (1,))
    assert {cpu.package for cpu in machine.logical_cpus} == {0}


def test_a_list_of_siblings_without_its_own_cpu_is_ignored(planted):
    lists = {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": "0\n" for cpu in (0, 1)}
    assert read_machine(planted({f"{CPUS}/online": "0-1\n", **lists})).physical_cores == ((0,), (1,))


@pytest.mark.parametrize(("threads", "cores"), [(8, 1), (16, 16)])
def test_more_than_eight_threads_a_core_are_not_believed(planted, threads, cores):
    lists = {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": f"0-{threads - 1}\n" for cpu in range(threads)}
    machine = read_machine(planted({f"{CPUS}/online": f"0-{threads - 1}\n", **lists}))
    assert machine.num_threads == cores


def test_offline_cpus_are_left_out(planted):
    files = {f"{CPUS}/online": "0,2-3\n", f"{CPUS}/offline": "1\n"}
    for cpu, siblings in {0: "0", 2: "2-3", 3: "2-3"}.items():
        files[f"{CPUS}/cpu{cpu}/topology/thread_siblings_list"] = f"{siblings}\n"
    machine = read_machine(planted(files), affinity=range(4))
    assert machine.allowed == (0, 2, 3)
    assert machine.physical_cores == ((0,), (2, 3))


def test_smt_switched_off_leaves_one_cpu_a_core(recorded):
    root = recorded("xeon_4309y_two_sockets")
    (root / "sys/devices/system/cpu/online").write_text("0-15\n")
    for cpu in range(16):
        (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu}\n")
    assert read_machine(root).physical_cores == tuple((cpu,) for cpu in range(16))


def test_a_cache_that_does_not_list_its_own_cpu_is_ignored(planted):
    files = {f"{CPUS}/online": "0-3\n"}
    for cpu in range(4):
        files[f"{CPUS}/cpu{cpu}/cache/index2/level"] = "2\n"
        files[f"{CPUS}/cpu{cpu}/cache/index2/shared_cpu_list"] = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        files[f"{CPUS}/cpu{cpu}/cache/index3/level"] = "3\n"
        files[f"{CPUS}/cpu{cpu}/cache/index3/shared_cpu_list"] = "8-9\n"
    assert [cpu.last_level_cache for cpu in read_machine(planted(files)).logical_cpus] == [0, 0, 2, 2]


def test_without_caches_the_cpus_of_a_node_are_taken_to_share_one(recorded):
    root = recorded("xeon_4309y_two_sockets")
    complete = cpus_of(root)
    for folder in root.glob("sys/devices/system/cpu/cpu*/cache"):
        shutil.rmtree(folder)
    assert cpus_of(root) == complete


def test_intels_kinds_of_cores_are_told_apart(recorded):
    cpus = cpus_of(recorded("core_i7_1260p"))
    assert [cpus[i].core_kind for i in (0, 7, 8, 15)] == ["performance"] * 2 + ["efficiency"] * 2


def test_arms_kinds_of_cores_are_told_apart_by_capacity(planted):
    # A Rockchip RK3588: four A55, then four A76.
    files = {f"{CPUS}/cpu{cpu}/cpu_capacity": f"{530 if cpu < 4 else 1024}\n" for cpu in range(8)}
    machine = read_machine(planted({f"{CPUS}/online": "0-7\n", **files}))
    assert [cpu.core_kind for cpu in machine.logical_cpus] == ["efficiency"] * 4 + ["performance"] * 4
    assert machine.physical_cores[0] == (4,)


@pytest.mark.parametrize("machine", ["graviton3", "xeon_4309y_two_sockets"])
def test_cores_that_are_all_alike_have_no_kind(recorded, machine):
    assert {cpu.core_kind for cpu in cpus_of(recorded(machine)).values()} == {None}


def test_a_node_without_cpus_does_no_harm(recorded):
    root = recorded("graviton3")
    (root / "sys/devices/system/node/node1").mkdir()
    (root / "sys/devices/system/node/node1/cpulist").write_text("\n")
    assert {cpu.numa_node for cpu in cpus_of(root).values()} == {0}
