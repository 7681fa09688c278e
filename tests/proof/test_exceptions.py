"""The page of exceptions, and the counts of the proof."""

import queue
import sys
from functools import partial
from typing import NamedTuple

import pytest
import torch

from proof import __main__, exceptions, ways
from proof.exceptions import BY_DESIGN, Known
from proof.program import Outcome

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


def test_exception_may_be_unneeded_with_another_torch(monkeypatch):
    monkeypatch.setattr(__main__, "Tally", partial(__main__.Tally, (KNOWN,)))
    monkeypatch.setattr(__main__, "take", lambda waiting, tally, threads: tally.add(CASE, "fp32", []))
    arguments = ["--only", "modules/*", "--processes", "1"]
    assert (__main__.main(arguments), __main__.main([*arguments, "--elsewhere"])) == (1, 0)


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


class Draws(NamedTuple):
    """A program, given by the indices of the draws in which ours and plain torch are off."""

    ours: range
    plain: range = range(0)
    number: int = 0

    def redrawn(self, number):
        return self._replace(number=number)


class Trained(ways.Compared):
    """Compares draws without training."""

    def plain(self, in_fp64=False, around=None, again=False):
        return self._off(not in_fp64 and self.program.number in self.program.plain)

    def accelerated(self, way):
        return self._off(self.program.number in self.program.ours)

    def _off(self, is_off):
        found = {"outputs": [torch.tensor([1.0, is_off / 1000])], "random": [torch.get_rng_state()]}
        return Outcome(found, None, [])


@pytest.mark.parametrize(
    ("draws", "differs"),
    [
        (Draws(range(17)), True),
        (Draws(range(13)), True),
        (Draws(range(13), range(13, 17)), False),
        (Draws(range(0, 17, 2), range(1, 17, 2)), False),
        (Draws(range(1)), False),
        (Draws(range(1, 17)), False),  # the first one is within the tolerance
    ],
)
def test_result_that_falls_short_more_often_than_plain_torchs_differs(draws, differs, monkeypatch):
    monkeypatch.setattr(ways, "Compared", Trained)
    compared = Trained(draws)
    assert bool(ways.near(compared, compared.accelerated("fp32"), "fp32")) == differs


def test_result_that_is_off_in_one_of_two_runs_differs():
    off = Trained(Draws(range(1))).accelerated("fp32")
    assert ways.near(Trained(Draws(range(0))), off, "fp32")


class Given(NamedTuple):
    """A program that fp64 has no kernel for, given by its outputs in fp32, under autocast by hand, and ours."""

    fp32: list
    by_hand: list
    ours: list

    def redrawn(self, number):
        return self


class Rounded(ways.Compared):
    """Compares given outputs without training."""

    def plain(self, in_fp64=False, around=None, again=False):
        values = self.program.by_hand if around is ways.by_hand else self.program.fp32
        return _outcome(values, "RuntimeError" if in_fp64 else None)

    def accelerated(self, way):
        return _outcome(self.program.ours)


def _outcome(values, error=None):
    found = {"outputs": [torch.tensor(values)], "random": [torch.get_rng_state()]}
    return Outcome(found, error, [])


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        (Given([1.0, 0.5], by_hand=[1.0, 0.6], ours=[1.0, 0.5]), False),
        (Given([1.0, 0.5], by_hand=[1.0, 0.6], ours=[1.0, 0.37]), False),
        (Given([1.0, 0.5], by_hand=[1.0, 0.6], ours=[1.0, 0.3]), True),
        (Given([1.0, 0.5], by_hand=[1.0, 0.6], ours=[1.0]), True),
        # Rounding by hand selects another number of elements than fp32.
        (Given([1.0, 0.5], by_hand=[1.0, 0.5, 0.4], ours=[1.0, 0.5]), False),
        (Given([1.0, 0.5], by_hand=[1.0, 0.5, 0.4], ours=[1.0, 0.4]), True),
        (Given([1.0, 0.5, 0.3], by_hand=[1.0, 0.5, 0.4], ours=[1.0, 0.5]), True),
    ],
)
def test_rounding_is_compared_with_fp32_where_fp64_has_no_kernel(given, differs, monkeypatch):
    monkeypatch.setattr(ways, "Compared", Rounded)
    compared = Rounded(given)
    assert bool(ways.rounded(compared, compared.accelerated("auto"), "auto")) == differs
