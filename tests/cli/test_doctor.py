"""`nano-loop doctor`: its facts, its findings, its exit code; it does not wait for torch."""

import json

import pytest

from nano_loop.cli import SHAPE, doctor
from nano_loop.cli.main import main
from nano_loop.version import __version__


@pytest.fixture
def on(inspect, monkeypatch):
    """Let `doctor` see the recorded machine with one change."""

    def on(**change):
        inspected = inspect(**change)
        monkeypatch.setattr(doctor, "inspect_system", lambda: inspected)

    return on


def test_clean_machine_is_described(on, capsys):
    on()
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"nano_loop {__version__} · Python ")
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "CPU AMD EPYC 9V74, x86_64",
        "instructions avx2, avx512f, avx512_bf16",
        "cores 1 socket, 1 NUMA node, 16 cores, 32 logical CPUs (SMT)",
        "usable CPUs 0-31 of 32, 16 cores, no quota: 16 threads",
        "processes 1 × 16, 2 × 8, 4 × 4, 8 × 2, 16 × 1 cores: "
        "nano-loop tune --num-processes auto --split-batches finds the fastest",
        "memory 67.4 GB, 64.5 GB available, no limit",
        "can allocate 64.5 GB of memory and swap",
        "shared memory 34.4 GB",
        "packages nano-loop 0.1.0, torch 2.13.0+cpu, lightning-fabric 2.6.6",
        "",
        "Nothing that slows down training was found.",
    ]


def test_other_machine_is_described_by_its_own_names(on, capsys):
    on(machine="graviton3", files={"/proc/meminfo": "", "/proc/self/mountinfo": ""}, shared=None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("aarch64", "asimd, sve, bf16, i8mm", "no SMT", "memory         unknown"):
        assert words in out


def test_finding_that_hurts_is_printed_in_three_parts_and_sets_the_exit_code(on, capsys):
    on(environ={"OMP_NUM_THREADS": "1"}, instruction_sets=("avx2",))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "hurts  omp-num-threads-low: OMP_NUM_THREADS=1 is set" in out
    assert "       why: 15 cores stay idle" in out
    assert "       do:  Unset OMP_NUM_THREADS, or set it to 16" in out
    assert "note   no-bf16" in out
    on(instruction_sets=("avx2",))
    assert main(["doctor"]) == 0


def test_json_has_the_shape_that_the_documentation_shows(on, capsys):
    on(environ={"OMP_NUM_THREADS": "1"}, affinity=frozenset(range(32)))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [found["version"], found["command"]] == [SHAPE, "doctor"]
    assert [*found["findings"][0]] == ["id", "what", "why", "advice", "hurts"]
    facts = found["facts"]
    assert {name: [*each] for name, each in facts.items() if isinstance(each, dict)} == {
        "cpu": [
            *("name", "architecture", "instruction_sets", "fast_bf16", "sockets", "numa_nodes", "cores"),
            "logical_cpus",
        ],
        "usable": ["logical_cpus", "cores", "affinity", "cpuset", "quota", "num_threads", "shares"],
        "memory": ["total", "available", "limit", "left", "shared"],
        "packages": ["nano-loop", "torch", "lightning-fabric"],
    }
    assert facts["usable"]["affinity"] == [*range(32)]
    assert facts["memory"] == {
        "total": 65859580 << 10,
        "available": 63000000 << 10,
        "limit": None,
        "left": {"memory and swap": 63000000 << 10},
        "shared": 32 << 30,
    }


def test_value_of_the_environment_is_quoted_short_and_without_characters_that_act(on, capsys):
    on(environ={"OMP_NUM_THREADS": "\x1b[31mred\n" + "9" * 5000})
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert any("OMP_NUM_THREADS=\\x1b[31mred\\n999" in line for line in lines)
