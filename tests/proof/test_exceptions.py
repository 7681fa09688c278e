"""The page of exceptions, and what the proof counts."""

import queue
import sys

import pytest

from proof import __main__, exceptions
from proof.exceptions import BY_DESIGN, Known

CASE = "modules/nn.Linear/3"
KNOWN = Known(CASE, ("fp32",), ("outputs",), BY_DESIGN, "it was never right")


def test_page_is_written_from_the_table():
    assert exceptions.PAGE.read_text(encoding="utf-8") == exceptions.page()
    assert len(exceptions.page().splitlines()) <= 50


@pytest.mark.parametrize(
    ("case", "way", "kinds", "counted"),
    [
        (CASE, "fp32", ["outputs"], "excepted"),
        ("modules/nn.Linear/4", "fp32", ["outputs"], "excepted"),
        ("modules/nn.Linear/4", "fp32", [], "passed"),
        (CASE, "exact", ["outputs"], "failed"),
        (CASE, "fp32", ["outputs", "gradients"], "failed"),
        ("modules/nn.Linear.eval/3", "fp32", ["outputs"], "failed"),
    ],
)
def test_exception_is_for_one_family_and_one_kind(case, way, kinds, counted):
    tally = __main__.Tally((KNOWN,))
    tally.add(case, way, [(kind, "off") for kind in kinds])
    found = {"passed": tally.passed, "excepted": tally.excepted, "failed": tally.failed}
    assert found == {"passed": 0, "excepted": 0, "failed": 0, counted: 1}


def test_exception_that_is_not_needed_is_an_error():
    tally = __main__.Tally((KNOWN,))
    assert tally.unneeded() == []  # its case was not trained
    tally.add(CASE, "fp32", [])
    assert tally.unneeded() == [(CASE, "fp32")]
    tally.add(CASE, "fp32", [("outputs", "off")])
    assert tally.unneeded() == []


DIES_IN_B = """import json, os, sys
for line in sys.stdin:
    for case in "abc"[ord(json.loads(line)["after"] or "`") - 96 :]:
        print(json.dumps({"begins": case}), flush=True)
        case == "b" and os._exit(7)
        print(json.dumps({"way": "fp32", "raises": None, "found": []}), flush=True)
    print(json.dumps({"ends": True}), flush=True)
"""


def test_case_whose_process_dies_has_failed_and_the_others_are_trained(monkeypatch):
    monkeypatch.setattr(__main__, "WORKER", (sys.executable, "-c", DIES_IN_B))
    tally, waiting = __main__.Tally(()), queue.SimpleQueue()
    for _ in range(2):
        waiting.put({"after": None})
    __main__.take(waiting, tally, 1)
    assert (tally.passed, tally.failed) == (4, 2)
    assert tally.tried == {("a", "fp32"), ("b", ""), ("c", "fp32")}
