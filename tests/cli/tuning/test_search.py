"""The choice among the times and comparisons of trials, which a table of answers replaces here."""

import pytest

from nano_loop.cli.script import Script
from nano_loop.cli.tuning import LEAST, search
from nano_loop.cli.tuning.search import Search
from nano_loop.cli.tuning.trial import TrialFailedError, Trials
from nano_loop.errors import NanoConfigError, NanoError
from nano_loop.runtime import settings

PLAIN = "plain"


def answer(seconds, **others):
    more = {"report": {}, "options": {"precision": "bf16-mixed"}, "written": ["@nano(", ")"], "is_explicit": True}
    more["script"] = "of a process"
    return (
        {"steps": 50, "seconds": seconds, "peak": 1, "waits": 0.0, "took": 1.0, "has_convolutions": False}
        | more
        | others
    )


@pytest.fixture
def searched(monkeypatch):
    """Return a function that searches among candidates with the answers or errors of a table, as lists by rounds."""

    def searched(times, wrong="", candidates=({"num_threads": 1}, {"compile": True}), options=()):
        monkeypatch.setattr(search, "candidates", lambda *_: [dict(changes) for changes in candidates])
        counts = {}

        def trial(self, changes, *, is_plain=False, compares=False, **_):
            if compares:
                return {"fault": "layer 0" if wrong in changes else None, "loss": 0.0}
            name = PLAIN if is_plain else next((key for key in changes if key in times), "")
            rounds = times.get(name, [1.0])
            counts[name] = counts.get(name, -1) + 1
            found = rounds[min(counts[name], len(rounds) - 1)]
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, dict):
                return found
            given = answer(found)
            return {**given, "options": {**given["options"], **dict(options)}}

        monkeypatch.setattr(Trials, "answer", trial)
        monkeypatch.setattr(settings, "learn", lambda *found: searched.learnt.append(found))
        searched.learnt = []
        return Search(Script("train.py", ["python"], {}), 10.0).run()

    return searched


def test_faster_in_both_rounds_is_chosen(searched):
    tuning = searched({PLAIN: [2.0], "num_threads": [0.5], "compile": [0.4, 1.2]})
    assert tuning.rows[tuning.chosen].options == {"num_threads": 1}
    assert tuning.line == '@nano(precision="bf16", num_threads=1)'
    assert tuning.rows[tuning.chosen].speed_up == pytest.approx(4.0)


def test_options_as_they_are_stay_where_nothing_pays(searched):
    tuning = searched({PLAIN: [0.5], "num_threads": [0.99], "compile": [1.5]})
    assert tuning.chosen == 0
    assert [row.note for row in tuning.rows[2:]] == ["", "slower"]
    assert len(tuning.rows[3].seconds) == 1  # a second round would not help
    assert any("without nano_loop is 2.00 times as fast" in remark for remark in tuning.remarks)


def test_wrong_numbers_are_not_chosen(searched):
    tuning = searched({"compile": [0.5], "num_threads": [0.8]}, wrong="compile")
    assert tuning.rows[tuning.chosen].options == {"num_threads": 1}
    assert "layer 0" in tuning.rows[3].note


def test_other_batches_are_told_and_not_chosen(searched):
    tuning = searched({"num_processes": [0.8]}, candidates=[{"num_processes": 2}])  # per batch: 0.4
    assert tuning.chosen == 0
    assert any("2.50 times as fast as the choice, with other batches" in remark for remark in tuning.remarks)


AUTO = {"num_processes": "auto", "split_batches": True}


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 2), (0.99, 1)])
def test_number_of_processes_that_share_batches_is_chosen_and_learnt(searched, seconds, count):
    """Each step is one batch, whatever their number. That one process is the fastest is a valid answer, too."""
    tuning = searched({"num_processes": [seconds]}, candidates=[{"num_processes": 2}], options=AUTO)
    assert tuning.rows[2].milliseconds == pytest.approx(1e3 * seconds)
    assert tuning.chosen == (2 if count == 2 else 0)
    (((_, _, options, changes)),) = searched.learnt
    assert (options.num_processes, changes) == ("auto", {"num_processes": count})
    assert f"use num_processes={count}." in tuning.remarks[-1]
    assert 'num_processes="auto", split_batches=True' in tuning.remarks[-1]
    assert not any("batches of the loader" in remark for remark in tuning.remarks)


def test_number_of_processes_is_not_learnt_where_it_was_not_asked_for(searched):
    given = {"num_processes": [0.5]}
    tuning = searched(given, candidates=[{"num_processes": 2}], options={"split_batches": True})
    assert tuning.rows[tuning.chosen].options == {"num_processes": 2}
    assert [changes for *_, changes in searched.learnt] == [{}]


def test_fastest_in_each_precision_is_learnt_without_its_precision(searched):
    """The answers' precision is bf16. If a precision was not measured alone, the fastest with it is learnt."""
    in_fp32 = {"precision": "32-true", "allocator": False}
    others = [{"num_processes": 2}, {"compile": True}, {"use_ipex": True}]
    times = {"num_threads": [0.5], "precision": [0.9], **{name: [0.1] for changes in others for name in changes}}
    tuning = searched(times, candidates=[{"num_threads": 1}, in_fp32, *others])
    found = {options.precision: changes for _, _, options, changes in searched.learnt}
    assert found == {"bf16-mixed": {"num_threads": 1}, "32-true": {"allocator": False}}
    assert {script for _, script, *_ in searched.learnt} == {"of a process"}
    assert sum("Later runs" in remark for remark in tuning.remarks) == 2


def test_options_as_they_are_are_learnt_in_place_of_others_that_were(searched):
    searched({"num_threads": [1.5], "compile": [1.5]})
    assert [changes for *_, changes in searched.learnt] == [{}]


@pytest.mark.parametrize("answers", [{"waits": 0.9}, {"script": None}, KeyboardInterrupt()])
def test_nothing_is_learnt_beside_other_programs_without_a_file_or_of_half_a_search(searched, answers):
    found = answer(0.5, **answers) if isinstance(answers, dict) else answers
    of_own = {"": [answer(1.0, **answers)]} if isinstance(answers, dict) else {}
    searched({"num_threads": [found], "compile": [found]} | of_own)
    assert searched.learnt == []


@pytest.mark.parametrize(("rounds", "chosen"), [([0.5], 2), ([0.999], 2), ([1.001], 0), ([0.5, 1.2], 2)])
@pytest.mark.parametrize("interrupted", [[KeyboardInterrupt()], [1.01, KeyboardInterrupt()]], ids=["1st", "2nd"])
def test_ctrl_c_chooses_the_fastest_of_what_was_measured(searched, rounds, chosen, interrupted):
    candidates = [{"num_threads": 1}, {"compile": True}]
    times = {"num_threads": rounds, "compile": interrupted}
    tuning = searched(times, candidates=candidates if len(interrupted) == 1 else candidates[::-1])
    expected = chosen and next(n for n, row in enumerate(tuning.rows) if row.options == {"num_threads": 1})
    assert tuning.chosen == expected
    measured = [row.milliseconds for row in tuning.rows if row.milliseconds]
    assert tuning.rows[tuning.chosen].milliseconds == min(measured)
    if len(interrupted) == 1:
        assert tuning.rows[3].note == "not measured: interrupted"
        assert "fastest so far, after" in str(tuning)


def test_ctrl_c_before_there_is_a_time_to_compare_with_ends_the_search(searched):
    with pytest.raises(KeyboardInterrupt):
        searched({"": [1.0, KeyboardInterrupt()]})


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (TrialFailedError("it ended with code 1: ValueError", 1, "Traceback"), TrialFailedError),
        (TrialFailedError("it took more than 33 s"), NanoError),
        (answer(None, steps=5), NanoConfigError),
    ],
    ids=["raises", "too long", "too few steps"],
)
def test_script_that_fails_as_it_is_in_a_later_run_is_an_error_and_nothing_is_the_fastest(
    searched, rounds, failure, error
):
    with pytest.raises(error):
        searched({"": [1.0] * rounds + [failure], "num_threads": [0.5]})


def test_failing_candidate_is_a_row_and_failing_script_an_error(searched):
    tuning = searched({"compile": [TrialFailedError("it ended with code 1: no compiler", 1)]})
    assert tuning.rows[3].note == "it ended with code 1: no compiler"
    with pytest.raises(TrialFailedError) as failed:
        searched({"": [TrialFailedError("it ended with code 7", 7, "Traceback")]})
    assert (failed.value.code, failed.value.errors) == (7, "Traceback")


def test_script_of_few_steps_is_told_how_many_are_needed(searched):
    with pytest.raises(NanoConfigError, match=rf"train.py takes 5 steps.*needs \d*{LEAST + 4}"):
        searched({"": [answer(None, steps=5)]})
    tuning = searched({"compile": [answer(None, steps=5)]})
    assert tuning.rows[3].note == f"it took 5 steps, and tune needs {LEAST + 4}"
