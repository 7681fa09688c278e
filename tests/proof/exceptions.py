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
_LAYOUTS = "Its fused kernel updates wrong elements where a gradient or state lies otherwise than its parameter"

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

`make proof-all` trains samples that others ship, plain and accelerated: of torch's databases of modules, operators and
optimizers, and of every architecture of transformers that a configuration of at most ten million parameters builds, one
size of each. A training has a step of SGD and one of AdamW; that of an optimizer has five steps, with groups added,
states loaded, gradients missing, schedulers, closures, clipping, sparse gradients and complex parameters. Kernels are
nano_loop's wherever there is one, also below the sizes from which on they pay.

| way | what outputs, gradients, parameters, buffers and optimizer states keep |
| --- | --- |
| fp32, `channels_last=True` | an error against fp64 of at most 4 times plain torch's, and two units in the last place |
| `exact=True` | each bit, and all random numbers |
| `"auto"`, `"bf16"` | an error of at most 1.5 times that of autocast by hand, and two units of bf16 in the last place |

The unit is that of the largest number of its kind. Where a result falls short, up to 16 trainings follow, with tensors
up to a hundredth smaller, so that others round. It differs if it falls short so much more often than plain torch does
against it that chance would do so once in a thousand times. Where fp64 draws other random numbers, or has no kernel,
half of the digits of plain torch are compared. After each training, everything is undone, and `state_dict`s are plain.

`make proof`, in continuous integration, trains one sample in six of the databases, by the hash of its name, in fp32 and
`exact=True`, and each architecture in one of both.
"""


def page():
    """Return the text of the page."""
    rows = [f"| `{each.case}` | {', '.join(each.ways)} | {each.whose} | {each.reason} |" for each in KNOWN]
    table = (
        ["| sample | in | whose | reason |", "| --- | --- | --- | --- |", *rows]
        if rows
        else ["None is known to differ."]
    )
    before, _, after = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    return "\n".join([before + _BEGIN + _PROOF, *table, "", _END + after.partition(_END)[2]])


def write():
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
