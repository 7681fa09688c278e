"""Train the examples to the end with several seeds and precisions, and print their final results and memory.

python -m benchmarks.training
python -m benchmarks.training --only digits --seeds 3 --modes plain,bf16-true --digits "--epochs 4 --width 64"

A seed's runs differ only in the mode: they start with the same weights and see the same batches.
Memory is that of parameters, gradients and optimizer state after the second step, and the peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.fresh import ROOT, environment
from benchmarks.names import at_least_one, names

#: By example: the key of its results that is compared, and how it is written.
MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "digits": ("accuracy", "{:.2%}".format),
    "char_gpt": ("loss", "{:.4f}".format),
}
_PRECISIONS = {"fp32": "32", "bf16": "bf16", "bf16-true": "bf16-true", "fp16": "16", "fp64": "64"}
MODES = {"plain": ["--plain"], **{mode: ["--precision", name] for mode, name in _PRECISIONS.items()}}
#: The parts of a process's memory, as `benchmarks.watched` measures them.
PARTS = ("parameters", "gradients", "state", "resident")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(MEASURES), default=list(MEASURES), metavar="EXAMPLES", help="names between commas")
    add("--modes", type=names(MODES), default=["fp32", "bf16"], help=f"of {', '.join(MODES)}; the first is compared to")
    add("--seeds", type=at_least_one, default=5, metavar="N", help="how many, from 0 on (default: 5)")
    add("--digits", type=shlex.split, default=[], metavar="OPTIONS", help="options of examples/digits.py")
    add("--char-gpt", type=shlex.split, default=[], metavar="OPTIONS", help="options of examples/char_gpt.py")
    return parser.parse_args(given)


@dataclass(frozen=True)
class End:
    """The result of a run: its final accuracy or loss, and the bytes of each of `PARTS`."""

    result: float
    memory: Mapping[str, int]


def train(example: str, mode: str, seed: int, options: Sequence[str]) -> End:
    """Run an example to its end in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        results, memory = (Path(folder, f"{name}.json") for name in ("results", "memory"))
        script = [str(ROOT / f"examples/{example}.py"), *options, *MODES[mode]]
        command = [sys.executable, "-m", "benchmarks.watched", str(memory), *script]
        command += ["--seed", str(seed), "--json", str(results)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} failed:\n{done.stderr}")
        result = float(json.loads(results.read_text())[MEASURES[example][0]])
        return End(result, json.loads(memory.read_text()))


def ends(options: argparse.Namespace) -> dict[str, dict[str, list[End]]]:
    """Return, by example and mode, the result of each seed; the modes alternate."""
    found = {example: {mode: [] for mode in options.modes} for example in options.only}
    runs = [(example, seed) for example in options.only for seed in range(options.seeds)]
    with tqdm(total=len(runs) * len(options.modes), file=sys.stderr, unit="run", dynamic_ncols=True) as bar:
        for example, seed in runs:
            for mode in options.modes:
                bar.set_description(f"{example} seed {seed} {mode}")
                found[example][mode].append(train(example, mode, seed, getattr(options, example)))
                bar.update()
    return found


def markdown(found: dict[str, dict[str, list[End]]]) -> str:
    """Return a row for each example and mode: mean ± standard deviation, differences seed by seed, and memory in MB."""
    lines = [
        "| example | mode | seeds | end, mean ± sd | difference, mean ± sd (range) | parameters | gradients "
        "| optimizer | resident, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for example, modes in found.items():
        measure, write = MEASURES[example]
        reference = [end.result for end in next(iter(modes.values()))]
        for mode, runs in modes.items():
            values = [end.result for end in runs]
            difference = "" if runs is next(iter(modes.values())) else _differences(values, reference, write)
            end = f"{measure} {_mean(values, write)}"
            memory = " | ".join(_megabytes([end.memory[part] for end in runs]) for part in PARTS)
            lines.append(f"| {example} | {mode} | {len(values)} | {end} | {difference} | {memory} |")
    return "\n".join(lines)


def _megabytes(sizes: list[int]) -> str:
    return f"{statistics.median(sizes) / 1e6:,.3g}"


def _differences(values: list[float], reference: list[float], write: Callable[[float], str]) -> str:
    found = [value - other for value, other in zip(values, reference, strict=True)]
    return f"{_mean(found, write)} ({write(min(found))} to {write(max(found))})"


def _mean(values: list[float], write: Callable[[float], str]) -> str:
    spread = write(statistics.stdev(values)) if len(values) > 1 else "–"
    return f"{write(statistics.mean(values))} ± {spread}"


def main(given: Sequence[str] | None = None) -> None:
    print(markdown(ends(arguments(given))))


if __name__ == "__main__":
    main()
