"""An import that changes the process is followed by putting back what it changed."""

import contextlib
import logging
import os

import pytest

from nano_loop.integrations.ipex.quiet_import import leaving_no_trace


class Own:
    """Has one attribute of its own and inherits the others."""

    kept = "before"


class Loud(logging.Logger):
    """Such as a library sets for everybody."""


def change_everything():
    os.environ["ADDED_BY_AN_IMPORT"] = "1"
    os.environ["KNOWN"] = "changed"
    logging.setLoggerClass(Loud)
    logging.root.addHandler(logging.NullHandler())
    Own.kept = Own.__repr__ = "after"


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setenv("KNOWN", "before")


def state():
    return [
        dict(os.environ),
        logging.getLoggerClass(),
        logging.root.handlers[:],
        logging.root.manager.disable,
        dict(vars(Own)),
    ]


def import_that(raises):
    with leaving_no_trace((Own, "kept"), (Own, "__repr__")):
        change_everything()
        if raises:
            raise ImportError


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back_also_after_a_failure(known, raises):
    before = state()
    with pytest.raises(ImportError) if raises else contextlib.nullcontext():
        import_that(raises)
    assert state() == before


def test_variable_that_is_removed_comes_back(known):
    with leaving_no_trace():
        del os.environ["KNOWN"]
    assert os.environ["KNOWN"] == "before"


def test_logging_is_silent_inside(caplog):
    with leaving_no_trace():
        logging.getLogger("loud").critical("inside")
    logging.getLogger("loud").warning("outside")
    assert [record.message for record in caplog.records] == ["outside"]


def test_attributes_that_are_not_named_are_left_alone():
    with leaving_no_trace((Own, "kept")):
        Own.new = 1
    assert Own.new == 1
    del Own.new
