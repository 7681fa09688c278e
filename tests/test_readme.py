"""Examples of the README and docs/options.md run, the report is the README's, and the table matches the declarations.

``make docs-options`` writes the table.
"""

import re
from pathlib import Path

import pytest
import torch

import nano_loop
from benchmarks.experts import has_fast_bf16
from nano_loop.config.declarations import DECLARED
from nano_loop.patching.operators import gives_kernels

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = ROOT / "docs/options.md"
OPTIONS = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README + OPTIONS, flags=re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)


def run(source):
    names = {"__name__": "__main__"}
    exec(compile(source, "README.md", "exec"), names)
    return names


def decorated(source):
    """Apply the README's first diff."""
    added = [line[1:] for line in DIFFS[0].splitlines() if line.startswith("+")]
    decorator = next(line for line in added if line.startswith("@"))
    imports = next(line for line in added if line.startswith("from"))
    return f"{imports}\n{source}".replace("def train(", f"{decorator}\ndef train(")


def test_there_are_examples():
    assert len(EXAMPLES) >= 2
    assert len(DIFFS) == 3


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(source, capsys):
    torch.manual_seed(0)
    run(source)
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore::nano_loop.NanoWarning")  # on a CPU without bf16 instructions
def test_decorated_example_trains_the_same_model_and_prints_the_report_that_is_shown(capsys, without_ipex):
    source = EXAMPLES[0].replace("320", "64")  # after more steps, rounding has changed more
    torch.manual_seed(0)
    plain = run(source)
    torch.manual_seed(0)
    capsys.readouterr()
    fast = run(decorated(source))
    printed = capsys.readouterr().err
    for mine, theirs in zip(fast["model"].parameters(), plain["model"].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=5e-3)
    shown = re.search(r"```\n(nano_loop .*?)```", README, flags=re.DOTALL)[1]
    assert steps_of(shown).keys() <= steps_of(printed).keys()
    if gives_kernels():  # before torch 2.9, different steps are skipped, one line each
        assert steps_of(shown).keys() == steps_of(printed).keys()
    for name in (
        "channels_last",
        "fused_optimizer",
        "fast_fetch",
        *["precision"] * (has_fast_bf16() and gives_kernels()),
    ):
        assert steps_of(shown)[name] == steps_of(printed)[name]


def steps_of(report):
    """Return what each step reports when it is applied or skipped, without what is measured later."""
    lines = [line.split(maxsplit=2) for line in report.splitlines()[1:] if line.startswith(("  applied", "  skipped"))]
    shared = re.findall(r"^  ([a-z][a-z\d ]+): (fast_.*|tune_.*)$", report, re.MULTILINE)
    return {name: detail for _, name, detail in lines} | {
        name: why for why, names in shared for name in names.split(", ")
    }


def test_class_of_the_second_diff_trains():
    head, rest = EXAMPLES[0].split("def train(")
    body, script = re.fullmatch(r".*?loader:\n(.*?)\n\n\n(.*)", rest, flags=re.DOTALL).groups()
    added = [line[1:] for line in DIFFS[1].splitlines() if line.startswith("+")]
    loop = "\n".join(f"    {line}" for line in body.splitlines())
    call = added.pop()
    script = script.replace(
        "train(model, optimizer, DataLoader", call.split("(model")[0] + "(model, optimizer, DataLoader"
    )
    names = run("\n".join([head, *added, loop, script]))
    assert isinstance(names["MyNano"](verbose=False), nano_loop.TorchNano)


def with_table_of_options(text):
    """Return the text with a row per option: existing rows keep their order, and new ones follow."""
    rows = {each.name: f"| `{each.name}` | {' | '.join(cells(each))} |\n" for each in DECLARED}
    (table,) = re.findall(r"^\| option \| default \| exact \| .+\n\| --- .+\n((?:\|.+\n)+)", text, re.MULTILINE)
    order = [name for name in re.findall(r"^\| `(\w+)`", table, re.MULTILINE) if name in rows]
    return text.replace(table, "".join(rows[name] for name in dict.fromkeys([*order, *rows])))


def cells(option):
    """Return the default, the exactness (of steps, and of what can change some), and the help."""
    changes_bits, is_step = option.metadata["changes_bits"], option.default == "auto"
    exact = "no" if changes_bits else "yes" if is_step else ""
    return f"`{option.default!r}`".replace("'", '"'), exact, option.metadata["help"]


def test_table_is_that_of_the_declarations():
    assert with_table_of_options(OPTIONS) == OPTIONS, "make docs-options writes it"


if __name__ == "__main__":
    PAGE.write_text(with_table_of_options(OPTIONS), encoding="utf-8")
