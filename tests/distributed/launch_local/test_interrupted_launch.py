"""Ctrl-C at any line of a launch raises KeyboardInterrupt, leaves nothing behind, and the next run works."""

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from leaks import affinity_masks, changes, moved_threads, process_state

import nano_loop
from distributed import small
from distributed.conftest import belongings, runs_that_have_the_process
from nano_loop import NanoError, nano
from nano_loop.distributed.launch import interrupts
from nano_loop.distributed.launch.active_runs import innermost

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    # A file interrupted between its opening and its `with` is closed by its last reference, with a warning.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PACKAGE = Path(nano_loop.__file__).parent
#: Files in which an interrupt between two related lines could leave something behind.
LAUNCH = tuple(
    str(PACKAGE / each) for each in ("distributed/launch", "cpu/binding.py", "runtime/run.py", "api/decorator.py")
)


STEP = 36  # each test interrupts every 36th line of a launch; all tests together cover every line
TOGETHER = 20  # launches between two checks for leftovers, which scan all objects and processes


def train(model):
    return small.rank()


def run():
    return nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))


class Tracer:
    """Calls `at_line(file, number)` before each line of the launch that the main thread executes."""

    def __init__(self, at_line):
        self.at_line = at_line

    def __enter__(self):
        sys.settrace(self._enter)

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._trace if frame.f_code.co_filename.startswith(LAUNCH) else None

    def _trace(self, frame, event, argument):
        if event == "line":
            self.at_line(frame.f_code.co_filename, frame.f_lineno)
        return self._trace


def lines_of_a_launch():
    """Return the distinct lines that a launch executes, in order."""
    lines = {}
    with Tracer(lambda *line: lines.setdefault(line)):
        run()
    return [*lines]


def interrupted_at(line):
    """Run with Ctrl-C just before `line`, and return the problems found afterwards."""
    sent = []

    def at_line(*here):
        if here == line and not sent:
            sent.append(here)
            signal.raise_signal(signal.SIGINT)

    try:
        with Tracer(at_line):
            run()
        wrong = ["no KeyboardInterrupt"] if sent else []  # this launch did not reach the line
    except KeyboardInterrupt:
        wrong = []
    except NanoError as error:  # caused by leftovers of an earlier interrupt
        wrong = [f"{error}"]
    wrong += [f"the process is held by {what}" for what in runs_that_have_the_process()]
    if innermost() is not None:
        wrong.append("a run is still under way")
    return wrong


def state():
    return {**process_state(), "handler": signal.getsignal(signal.SIGINT)}


def everything_wrong(lines):
    """Interrupt a launch at each line, and return the problems after each one, and the leftovers of several."""
    run()
    belonging, before, masks = belongings(), state(), affinity_masks()
    found = []
    for start in range(0, len(lines), TOGETHER):
        group = lines[start : start + TOGETHER]
        for line in group:
            found += [f"{named(line)}: {each}" for each in interrupted_at(line)]
        after = belongings()
        left = [*changes(before, state()), *moved_threads(masks, affinity_masks())]
        left += [f"{kind} {more}" for kind in after if (more := after[kind].keys() - belonging[kind].keys())]
        found += [f"one of {[*map(named, group)]}: {each}" for each in left]
        signal.signal(signal.SIGINT, before["handler"])
        belonging = after
    return found


def named(line):
    return f"{Path(line[0]).relative_to(PACKAGE)}:{line[1]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(STEP) if each)])
def test_ctrl_c_at_any_line_of_a_launch_leaves_nothing(first, monkeypatch):
    monkeypatch.setattr(interrupts, "_ECHO", 0.01)  # an interrupted run waits this many seconds
    assert threading.current_thread() is threading.main_thread()
    lines = lines_of_a_launch()
    assert len(lines) > 200
    assert everything_wrong(lines[first::STEP]) == []
    assert run() == 0
