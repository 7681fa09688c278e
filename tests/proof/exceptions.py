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

KNOWN = tuple(
    Known(f"optimizers/{case}", ways, _NUMBERS, TORCHS, _LAYOUTS)
    for case, ways in (
        ("Adagrad.loaded.fused/0", _ALL_NUMBERS),
        ("Adam.loaded.fused/0", _ALL_NUMBERS),
        ("AdamW.loaded.fused/0", _ALL_NUMBERS),
        ("Adagrad.clipped.fused/3", _ALL_NUMBERS),
        ("SGD.clipped.fused/4", _ALL_NUMBERS),
        ("Adam.clipped.fused/0", ("fp32",)),
        ("AdamW.clipped.fused/0", ("fp32",)),
    )
)

#: Text after the marker is generated; text before it covers differences that no sample has.
_BEGIN, _END = "<!-- by make proof-all -->", "<!-- end -->"
_PROOF = """

## The proof

`make proof-all` trains samples that torch and transformers ship, plain and accelerated: those of torch's databases of
modules, operators and optimizers, and each architecture of transformers that can be built with at most ten million
parameters, in one size. A training run has a step of SGD and one of AdamW. Optimizers take five steps, with added
groups, loaded states, missing gradients, schedulers, closures, clipping, sparse gradients and complex parameters.
nano_loop's kernels are used wherever there is one, even for sizes below those from which they are faster.

| mode | requirement for outputs, gradients, parameters, buffers and optimizer states |
| --- | --- |
| fp32, `channels_last=True` | error relative to fp64: at most 4 times plain torch's, plus two units in the last place |
| `exact=True` | equal bit for bit, as are all random numbers |
| `"auto"`, `"bf16"` | error at most 1.5 times that of manual autocast, plus two bf16 units in the last place |

The unit in the last place is that of the largest number of its kind. If a result exceeds a limit, up to 16 runs follow
with tensors scaled by up to 1%, so that they round differently. A difference is reported if the limit is exceeded so
much more often than by plain torch that chance would do so once in a thousand cases. If fp64 draws other random numbers
or has no kernel, half of plain torch's digits are compared. After each run, everything is undone, and `state_dict`s are
plain.

In continuous integration, `make proof` trains one sixth of the databases' samples, selected by the hash of their names,
in fp32 and with `exact=True`, and each architecture in one of the two.
"""


def page():
    """Return the text of the page."""
    rows = [f"| `{each.case}` | {', '.join(each.ways)} | {each.whose} | {each.reason} |" for each in KNOWN]
    table = (
        ["| sample | mode | origin | reason |", "| --- | --- | --- | --- |", *rows]
        if rows
        else ["No sample is known to differ."]
    )
    before, _, after = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    return "\n".join([before + _BEGIN + _PROOF, *table, "", _END + after.partition(_END)[2]])


def write():
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
