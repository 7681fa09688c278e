"""After an import that changes the process, the changes are undone."""

import contextlib
import gc
import logging
import os
import warnings

import pytest

from nano_loop.integrations.quiet_import import leaving_no_trace


class Own:
    """Has one attribute of its own and inherits the others."""

    kept = "before"


class Loud(logging.Logger):
    """A logger class as a library sets for everybody."""


def change_everything():
    os.environ["ADDED_BY_AN_IMPORT"] = "1"
    os.environ["KNOWN"] = "changed"
    del os.environ["REMOVED"]
    logging.setLoggerClass(Loud)
    for name in (None, "loud"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).setLevel("DEBUG")
    logging.getLogger("loud").propagate = False
    warnings.formatwarning = print
    warnings.simplefilter("ignore")
    gc.enable()
    Own.kept = Own.__repr__ = "after"


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setenv("KNOWN", "before")
    monkeypatch.setenv("REMOVED", "before")


def state():
    return [
        dict(os.environ),
        logging.getLoggerClass(),
        *((log.handlers[:], log.level, log.propagate) for log in (logging.root, logging.getLogger("loud"))),
        (warnings.formatwarning, warnings.filters[:], gc.isenabled()),
        dict(vars(Own)),
    ]


def import_that(raises):
    with leaving_no_trace("loud", (Own, "kept"), (Own, "__repr__")):
        change_everything()
        if raises:
            raise ImportError


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back_also_after_a_failure(known, raises):
    before = state()
    with pytest.raises(ImportError) if raises else contextlib.nullcontext():
        import_that(raises)
    assert state() == before


def test_advice_of_tqdm_about_widgets_is_not_shown(recwarn):
    with leaving_no_trace("loud"):
        warnings.warn("IProgress not found. Please update jupyter", stacklevel=1)
    assert not recwarn


def test_import_by_the_user_keeps_its_effects(known):
    with leaving_no_trace("os"):
        os.environ["KNOWN"] = "by the user"
    assert os.environ["KNOWN"] == "by the user"
