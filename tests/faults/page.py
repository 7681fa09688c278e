"""Writes docs/faults.md from the table of faults: ``make docs-faults``."""

from pathlib import Path

from faults.fault import PHASES, Told
from faults.runs import ROOT
from faults.table import FAULTS
from nano_loop import NanoWorkerError

PAGE = Path(ROOT) / "docs/faults.md"
_BEGINNING = """# Faults

What becomes of a run of several processes on one host when something goes wrong; [Clusters](clusters.md#failures) has
Ray's. Each row is committed by a test (`tests/faults/`), and this page is written from the same table
(`make docs-faults`).

After every fault:

- no process, thread, file descriptor, temporary folder or shared memory of the run is left;
- environment variables, CPU affinity, signal handlers and hooks are as before;
- the process can train again at once.

An error comes within 10 seconds of the fault, most within one. Where a rank does not answer, the error comes after
`timeout`, and shows the line of Python that the rank is in. Each message says what happened, why that ends the run, and
what to do. The table quotes parts of it. Where it says *training goes on*, the run ends as if nothing had happened.
"""


def page():
    """Return the text of the page."""
    sections = (_section(phase) for phase in PHASES)
    return "\n".join([_BEGINNING, *filter(None, sections)])


def _section(phase):
    rows = [f"| {_cell(fault.what)} | {_result(fault)} |" for fault in FAULTS if fault.when == phase]
    title = f"## {phase[0].upper()}{phase[1:]}\n"
    return "\n".join([title, "| fault | what you see |", "| --- | --- |", *rows, ""]) if rows else ""


def _result(fault):
    if fault.sees is None:
        return _cell(fault.result)
    told = Told.by(fault.words[0]) if fault.words and fault.sees is NanoWorkerError else None
    rank = "" if fault.rank is None else f" of rank {fault.rank}"
    code = "" if told is None or told.exitcode is None else f", exit code {told.exitcode}"
    words = " … ".join(f"“{_cell(each)}”" for each in fault.words)
    return f"`{fault.sees.__name__}`{rank}{code}" + (f": {words}" if words else "")


def _cell(text):
    for character in "\\*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
