"""Saves the fastest options that a search has found, for later runs of the script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nano_loop.cli.tuning.result import Row, as_text
from nano_loop.config.options import Options
from nano_loop.cpu import read_machine

#: The minimum speed-up of a candidate that is chosen or saved.
PAYS = 1.02
#: Options that later runs do not use automatically: they change the batches, or depend on software that may be gone.
_NOT_LEARNT = frozenset(("num_processes", "use_ipex", "compile"))


def save_fastest(rows: Sequence[Row], options: Options, script: str) -> Iterator[str]:
    """Save the fastest options in each precision, and yield a line about each.

    Parameters
    ----------
    rows : sequence of Row
        The measured candidates, of which the first is the unchanged script.
    options : Options
        The options of the unchanged script.
    script : str
        See `nano_loop.runtime.learnt_options.script_of_process`.
    """
    from nano_loop.runtime.learnt_options import learn  # here, since it imports torch, which takes a second

    own, unchanged = options.precision, rows[0]
    rows = [row for row in rows if row.seconds and not (row.note or row.plain)]
    asked_for = {"num_processes": "auto", "split_batches": True} if options.num_processes == "auto" else {}
    rows = [row for row in rows if (_NOT_LEARNT - {*asked_for}).isdisjoint(row.options)]
    for precision in dict.fromkeys(row.options.get("precision", own) for row in rows):
        base = {} if precision == own else {"precision": precision}
        before = next((row for row in rows if row.options == base), None)
        faster = [row for row in rows if row.options.get("precision", own) == precision]
        faster = [row for row in faster if before is None or row.pays(before, PAYS)]
        best = min(faster, key=lambda row: row.milliseconds or 0.0, default=before or unchanged)
        changes = {"num_processes": 1} if asked_for else {}  # one process is a valid result
        changes |= {name: value for name, value in best.options.items() if name != "precision"}
        learn(read_machine(), script, options.changed(base), changes)
        if changes:
            written = as_text({"precision": precision, **asked_for})
            yield f"Later runs of this script with {written} use {as_text(changes)}."
