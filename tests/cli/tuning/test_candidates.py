"""The candidates of a search: a short list, without options that are fixed, without effect or slow here."""

from dataclasses import replace

import pytest
from cpu.recording import built, unpack

from nano_loop.cli.tuning.candidates import STEPS_BY_DEFAULT, candidates
from nano_loop.config.declarations import DEFAULTS, EXACT, OPTIONS
from nano_loop.cpu import read_machine
from nano_loop.runtime.settings import Settings

ANSWER = {"report": {}, "has_convolutions": False}
IMAGES = {**ANSWER, "has_convolutions": True}


@pytest.fixture
def proposed(monkeypatch):
    """Return a function that returns the candidates on a machine with the given instructions."""
    monkeypatch.setattr("nano_loop.cli.tuning.candidates.find_spec", lambda name: None)

    def proposed(sets=("avx512_bf16",), fixed=(), answer=ANSWER, machine=None, **options):
        settings = Settings.read(options)
        machine = replace(machine or settings.machine, instruction_sets=frozenset(sets))
        return candidates(settings.options, machine, fixed, answer)

    return proposed


def test_list_is_short_and_names_each_choice_once(proposed):
    found = proposed(answer=IMAGES)
    assert 8 <= len(found) <= 12
    assert all(found.count(changes) == 1 for changes in found)
    assert found[-1]["compile"] is True  # takes the longest to start
    varied = {name for changes in found for name in changes}
    assert varied >= {"precision", "channels_last", "compile", *STEPS_BY_DEFAULT}


def test_reduced_precision_is_a_candidate_where_the_cpu_is_fast_in_it(proposed):
    for sets in ((), ("avx512_bf16",)):
        assert ("bf16-mixed" in {changes.get("precision") for changes in proposed(sets)}) == bool(sets)


def test_layout_is_varied_for_convolutions(proposed):
    for answer, expected in ((ANSWER, False), (IMAGES, True)):
        assert any("channels_last" in changes for changes in proposed(answer=answer)) == expected


def test_what_is_fixed_stays(proposed):
    for name in OPTIONS:
        assert not any(name in changes for changes in proposed(fixed=[name]))
    assert proposed(fixed=OPTIONS) == []


def test_exact_results_stay_exact(proposed):
    varied = {name for changes in proposed(answer=IMAGES, exact=True) for name in changes}
    assert varied
    assert not varied & {*EXACT, "num_threads", "num_processes"}


def test_one_process_is_the_same_as_none(proposed):
    assert not any(changes.get("num_processes", 2) in (None, 1) for changes in proposed())
    assert any(changes.get("num_processes", 2) is None for changes in proposed(num_processes=2))


def test_steps_are_those_that_the_options_declare(proposed):
    assert {*STEPS_BY_DEFAULT} == {name for name in OPTIONS if DEFAULTS[name] == "auto"}
    assert any(all(changes.get(name) is False for name in STEPS_BY_DEFAULT) for changes in proposed())
    assert any(changes.get("fast_norm") == "auto" for changes in proposed(fast_norm=False))


def test_share_of_cpus_that_is_written_stays(proposed):
    share = [[min(read_machine().allowed)]]
    assert not any(changes.get("num_processes") for changes in proposed(cpu_for_each_process=share))


@pytest.mark.parametrize(
    ("machine", "options", "counts"),
    [
        (built([[16], [16]]), {}, [2, 4, 8, 16, 32]),
        (built([[16], [16]]), {"cpu_for_each_process": 4}, [2, 4, 8]),
        (built([[1]]), {}, []),
        ("epyc_9v74_azure.txt", {}, [2, 4, 8, 16]),
    ],
    ids=str,
)
def test_number_that_is_asked_for_is_the_only_question(proposed, tmp_path, machine, options, counts):
    machine = read_machine(unpack(machine, tmp_path)) if isinstance(machine, str) else machine
    found = proposed(machine=machine, num_processes="auto", split_batches=True, **options)
    assert found == [{"num_processes": count} for count in counts]


def test_exact_results_are_those_of_one_process(proposed):
    found = proposed(num_processes="auto", split_batches=True, exact=True)
    assert not any("num_processes" in changes for changes in found)
