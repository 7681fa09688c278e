"""Finds processes by a marker in their environment; processes of trials are not children of the caller."""

import psutil

MARK = "MARK"


def processes_with(mark):
    """Return the processes in which the variable `MARK` has this value."""
    return [each for each in psutil.process_iter() if _mark_of(each) == mark]


def _mark_of(process):
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None
