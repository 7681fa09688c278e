"""Known differences, with their reasons: the end of docs/exceptions.md is written from this table."""

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/exceptions.md"
TORCHS, OURS, BY_DESIGN = "torch's", "ours", "by design"


class Known(NamedTuple):
    """A case that may differ, like others of its family, in these ways and kinds of result."""

    case: str
    ways: tuple[str, ...]
    kinds: tuple[str, ...]
    whose: str
    reason: str

    def covers(self, case, way, kinds):
        return _family(case) == _family(self.case) and way in self.ways and {*kinds} <= {*self.kinds}


def _family(case):
    return case.rpartition("/")[0]


_NUMBERS = ("outputs", "gradients", "parameters", "states")
_LAYOUTS = "Its fused kernel updates wrong elements if a gradient or state has other strides than its parameter"

_ALL_NUMBERS = ("fp32", "auto", "bf16")

_OPTIMIZERS = tuple(
    Known(f"optimizers/{case}", ways, _NUMBERS, TORCHS, _LAYOUTS)
    for case, ways in (
        ("Adagrad.loaded.fused/0", _ALL_NUMBERS),
        ("Adam.loaded.fused/0", _ALL_NUMBERS),
        ("AdamW.loaded.fused/0", _ALL_NUMBERS),
        ("SGD.loaded.fused/4", _ALL_NUMBERS),
        ("Adagrad.clipped.fused/3", _ALL_NUMBERS),
        ("SGD.clipped.fused/4", _ALL_NUMBERS),
        ("Adam.clipped.fused/0", ("fp32",)),
        ("AdamW.clipped.fused/0", ("fp32",)),
    )
)
_KEY_POINTS = "Key points are ordered by scores that are equal but for rounding"
_ARCHITECTURES = (Known("architectures/superpoint/0", ("auto",), ("outputs",), BY_DESIGN, _KEY_POINTS),)

KNOWN = (*_OPTIMIZERS, *_ARCHITECTURES)

_HEAD, _END = "| samples | modes | origin | reason |\n| --- | --- | --- | --- |\n", "\n<!-- end -->"


def page():
    """Return the text of the page, whose table is that of this file."""
    cases = {}
    for each in KNOWN:
        row = f"{', '.join(each.ways)} | {each.whose} | {each.reason}"
        cases.setdefault(row, []).append(f"`{each.case}`")
    rows = [f"| {', '.join(alike)} | {row} |\n" for row, alike in cases.items()]
    before, head, after = PAGE.read_text(encoding="utf-8").partition(_HEAD)
    return before + head + "".join(rows) + _END + after.partition(_END)[2]


def write():
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
