"""The report lists applied and skipped steps, as lines for people and as plain values for programs."""

import io
import json
import sys

import pytest

from nano_loop.runtime.objects.report import ReportPrinter, SetupReport, StepResult, duration
from nano_loop.steps import STEPS

FUSED = StepResult("fused_optimizer", "applied", "AdamW")
FETCH = StepResult("fast_fetch", "skipped", "there is no loader")
FETCHED = StepResult("fast_fetch", "applied", "1 of 1 loaders")


def report(*results, **fields):
    return SetupReport("nano_loop 1", results=list(results), **fields)


@pytest.mark.parametrize("name", [step.name for step in STEPS])
def test_details_of_every_step_begin_in_one_column(name):
    line = str(StepResult(name, "applied", "detail"))
    assert line.index("detail") == str(FUSED).index("AdamW")


IDLE = {"idle": "nothing to do"}
NO_NORM = StepResult("fast_norm", "skipped", "no norm was found in the model", code="no_norm", **IDLE)
NO_ATTENTION = StepResult("fast_attention", "skipped", "no attention", code="no_attention", **IDLE)
NO_KERNEL = [StepResult(name, "skipped", "no compiler", code="no_kernel") for name in ("fast_rnn", "fast_linear")]


def test_steps_with_nothing_to_do_have_one_line_and_others_one_for_each_reason():
    small = StepResult("fast_embedding", "skipped", "small", idle="too small to gain")
    asked_for = StepResult("channels_last", "skipped", "no images", code="no_images")
    results = NO_KERNEL[0], FUSED, NO_NORM, small, NO_ATTENTION, NO_KERNEL[1], asked_for
    assert str(report(*results)).splitlines()[1:] == [
        "  skipped  fast_rnn, fast_linear  no compiler",
        "  applied  fused_optimizer     AdamW",
        "  nothing to do: fast_norm, fast_attention",
        "  too small to gain: fast_embedding",
        "  skipped  channels_last       no images",
    ]


def test_step_that_has_nothing_to_do_for_one_of_two_models_is_applied_and_not_skipped():
    found = report(NO_NORM, StepResult("fast_norm", "applied", "in C"))
    assert (found.applied, found.skipped) == (("fast_norm",), ())
    assert "nothing to do" not in str(found)
    assert found.results[0].code == "no_norm"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.413e-3, "8.41 ms"),
        (0.104, "104 ms"),
        (1.2e-5, "0.0120 ms"),
        (1.2, "1.20 s"),
        (2031, "2,031 s"),
        (0, "0.000 ms"),
    ],
)
def test_times_have_three_digits_and_no_exponent(seconds, text):
    assert duration(seconds) == text


def test_text_says_what_the_environment_overrode():
    lines = str(report(FUSED, from_environment=("NANO_LOOP_PRECISION=bf16", "NANO_LOOP_COMPILE=no"))).splitlines()
    assert lines[1].strip() == "from the environment: NANO_LOOP_PRECISION=bf16, NANO_LOOP_COMPILE=no"
    assert len(lines) == 3


def test_last_result_of_a_step_is_found_by_its_name():
    assert report(FETCH, FUSED, FETCHED)["fast_fetch"] is FETCHED
    with pytest.raises(KeyError, match=r"report\['precision'\]: this report has fast_fetch\. Use"):
        report(FETCH)["precision"]


def test_adding_gives_back_what_is_new():
    found = report(FUSED)
    assert found.add([FUSED, FETCH]) == [FETCH]
    assert found.add([StepResult("fast_fetch", "skipped", "there is no loader")]) == []
    assert found.results == [FUSED, FETCH]


def test_dict_is_what_json_gives_back():
    found = report(FUSED, FETCH, machine={"name": "cpu"}, options={"precision": "32-true"}, from_environment=("A=1",))
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert found.as_dict()["results"][1] == {
        "name": "fast_fetch",
        "status": "skipped",
        "detail": "there is no loader",
    }


def printed_by(capsys, memory, *setups):
    printer = ReportPrinter(memory)
    for entries in setups:
        printer.print(entries)
    return capsys.readouterr().err.splitlines()


def test_later_setups_of_a_run_are_compared_too(capsys):
    memory, first = [], [report(FUSED)]
    printed_by(capsys, memory, first, [FETCH])
    assert printed_by(capsys, memory, first, [FETCH]) == []
    assert printed_by(capsys, memory, first) == [], "a run that stopped early has nothing new"
    assert printed_by(capsys, memory, first, [FETCH]) == []
    assert printed_by(capsys, memory, first, [FETCHED]) == [str(FETCHED)]
    assert printed_by(capsys, memory, first, [FETCHED], [FETCH]) == [str(FETCH)]


def test_measurement_is_printed_once(capsys):
    memory = []
    one, other = (StepResult("step_time", "measured", f"{number} ms") for number in (1, 2))
    assert printed_by(capsys, memory, [one]) == [str(one)]
    assert printed_by(capsys, memory, [other]) == []


class OutStream(io.StringIO):
    """A notebook's output stream, recognized by its module."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize(("stream", "place"), [(OutStream, 0), (io.StringIO, 1)])
def test_report_is_on_standard_output_in_a_notebook_which_shows_errors_in_red(monkeypatch, stream, place):
    streams = stream(), stream()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    ReportPrinter([]).print([FUSED])
    assert [text.getvalue() for text in streams].index(f"{FUSED}\n") == place
