"""Finds the processes that carry a mark in their environment: those of trials are no descendants of who starts them."""

import psutil

MARK = "MARK"


def processes_with(mark):
    """Return the processes whose variable `MARK` has this value."""
    return [each for each in psutil.process_iter() if _mark_of(each) == mark]


def _mark_of(process):
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None
