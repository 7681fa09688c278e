"""Measure layers of public models in bf16 and in fp32, both under nano_loop: is any of them slower in bf16?

python -m benchmarks.shapes
python -m benchmarks.shapes --only MobileNet,Conv3d --seconds 2
python -m benchmarks.shapes --quick

Each layer is measured as inside a model: its input and the gradient of its output have the dtypes that autocast gives
them there, and its weights are fp32. `tune_operators` chooses the algorithms beforehand, in steps of which the layer
is a small part. fp32 and bf16 alternate in short blocks, so that other programs disturb both. With one thread, times
are CPU times, which are least affected by other programs. A layer counts as slower if it is slower by both the fastest
times and the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import nano_loop
from benchmarks.fresh import ROOT
from benchmarks.layers import LAYERS, Layer
from benchmarks.names import at_least_one
from benchmarks.surroundings import heading, surroundings

PRECISIONS: dict[str, int | str] = {"fp32": 32, "bf16": "bf16"}
PARTS = ("forward", "backward")
#: Below this ratio of fp32's time to bf16's, bf16 is slower by more than noise.
NOISE = 0.95
BLOCKS = 5
_WARMUP = 3  # calls of a block: the first is cold, and in the third nano_loop may measure
_OTHERS = 30  # while operators are tuned, the pause after a call as a multiple of its time: the rest of a step
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Seconds = tuple[float, float]  # forward, backward


class Held:
    """An output that a set-up model returns unchanged: nano_loop casts tensors, not objects of unknown classes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Model(nn.Module):
    """A layer inside a set-up model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Held:
        return Held(self.layer(x))


@dataclass
class Row:
    """The measurements of a layer in one memory layout: by precision, the seconds of each call."""

    layer: Layer
    layout: str
    seconds: dict[str, list[Seconds]] = field(default_factory=lambda: {name: [] for name in PRECISIONS})

    def milliseconds(self, precision: str, pick: Callable[[Sequence[float]], float], part: int | None = None) -> float:
        """Return the fastest or the median time of a part of the step, or of both parts."""
        return pick([sum(each) if part is None else each[part] for each in self.seconds[precision]]) * 1e3

    def ratio(self, pick: Callable[[Sequence[float]], float], part: int | None = None) -> float:
        """Return fp32's time over bf16's: above 1, bf16 is faster."""
        return self.milliseconds("fp32", pick, part) / self.milliseconds("bf16", pick, part)

    @property
    def is_slower(self) -> bool:
        """Whether bf16 is slower by both the fastest times and the medians."""
        return max(self.ratio(min), self.ratio(statistics.median)) < NOISE

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.layer.model, "layer": self.layer.text, "shape": self.layer.shape}
        found |= {"layout": self.layout, "slower": self.is_slower}
        found["min_ms"] = {precision: self.milliseconds(precision, min) for precision in PRECISIONS}
        for number, part in enumerate(PARTS):
            found[part] = {
                precision: {
                    "min_ms": self.milliseconds(precision, min, number),
                    "median_ms": self.milliseconds(precision, statistics.median, number),
                }
                for precision in PRECISIONS
            }
        return found | {"ratio_of_minima": self.ratio(min), "ratio_of_medians": self.ratio(statistics.median)}


def measure(pairs: Sequence[tuple[Layer, str]], seconds: float) -> list[Row]:
    """Measure layers in their layouts, each for about `seconds`.

    One run around all blocks sets the allocator: set again in each block, it would return the memory in between.
    """
    with nano_loop.accelerated(nn.Identity(), verbose=False):
        return [_measured(*pair, seconds) for pair in tqdm(pairs, file=sys.stderr, unit="layer")]


def _measured(layer: Layer, layout: str, seconds: float) -> Row:
    """Measure a layer with fp32 and bf16 in turn."""
    row, sides = Row(layer, layout), {name: _side(layer, layout, name) for name in PRECISIONS}
    if seconds:
        _block(*sides["bf16"], "bf16", layout, 0.0, _WARMUP + 2, _OTHERS)
    for number in range(BLOCKS if seconds else 1):
        for name in list(PRECISIONS)[:: -1 if number % 2 else 1]:
            share, least = seconds / BLOCKS / len(PRECISIONS), _WARMUP + 1 if seconds else 2
            row.seconds[name] += _block(*sides[name], PRECISIONS[name], layout, share, least)
    return row


def _side(layer: Layer, layout: str, precision: str) -> tuple[Model, Tensor]:
    """Return the layer in a model, and its input as an earlier layer would produce it."""
    torch.manual_seed(0)
    model, x = Model(layer.build()), layer.input
    if layout == "NHWC":
        x = x.contiguous(memory_format=_FORMATS[x.dim()])
    if not layer.first:
        x = (x.bfloat16() if precision == "bf16" else x).requires_grad_()
    return model, x


def _block(
    model: Model, x: Tensor, precision: int | str, layout: str, seconds: float, least: int, others: int = 0
) -> list[Seconds]:
    """Return the seconds of calls, for about `seconds`. The first ones are not counted, if there are more.

    Between them is a pause of the length of `others` calls, as if the model had this many other layers.
    """
    leaves = [each for each in (x, *model.parameters()) if each.requires_grad]
    counted = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # nano_loop measures within the steps of a loop
    options = {"precision": precision, "channels_last": layout == "NHWC", "allocator": False, "verbose": False}
    with nano_loop.accelerated(model, **options):
        end, found = time.perf_counter() + seconds, []
        while len(found) < least or time.perf_counter() < end:
            found.append(_call(model, x, leaves))
            if others:
                time.sleep(others * sum(found[-1]))
            counted.step()
    return found[_WARMUP:] or found[-1:]


def _call(model: Model, x: Tensor, leaves: list[Tensor]) -> Seconds:
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.process_time
    start = clock()
    out = model(x).tensor
    end = clock()
    gradient = torch.ones_like(out)
    begin = clock()
    torch.autograd.grad(out, leaves, gradient)
    return end - start, clock() - begin


def chosen(only: Sequence[str]) -> list[tuple[Layer, str]]:
    """Return the layers and layouts whose description contains one of `only`, or all."""
    found = [(layer, layout) for layer in LAYERS for layout in layer.layouts]
    text = [f"{layer.model}: {layer.text} {layout}" for layer, layout in found]
    return [each for each, words in zip(found, text, strict=True) if not only or any(name in words for name in only)]


HEAD = """\
| model | layer | input | layout | fp32, ms | bf16, ms | fp32 ÷ bf16, fastest | medians | forward | backward |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/layers.md. Times are the fastest steps; forward and backward are ratios of them."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    times = [f"{row['min_ms'][name]:.3g}" for name in PRECISIONS]
    mark = "**" if row["slower"] else ""
    ratios = [row["ratio_of_minima"], row["ratio_of_medians"]]
    parts = [f"{row[part]['fp32']['min_ms'] / row[part]['bf16']['min_ms']:.2f}" for part in PARTS]
    cells = [row["model"], row["layer"], " × ".join(map(str, row["shape"])), row["layout"], *times]
    return f"| {' | '.join([*cells, *(f'{mark}{each:.2f}{mark}' for each in ratios), *parts])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = "parts of models' or layers' names, between commas"
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=only)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each layer")
    parser.add_argument("--threads", type=at_least_one, help="threads of torch; one is disturbed least")
    parser.add_argument("--quick", action="store_true", help="two calls of each: only to see that everything runs")
    output = "store the results in benchmarks/results/NAME.json, or at a path"
    parser.add_argument("--output", metavar="NAME", help=output)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = surroundings() | {"quick": arguments.quick}
    seconds = 0.0 if arguments.quick else arguments.seconds
    results["layers"] = rows = [row.as_dict() for row in measure(chosen(arguments.only), seconds)]
    if arguments.output:
        target = ROOT / "benchmarks/results" / f"{arguments.output}.json"
        target.write_text(json.dumps(results, indent=1) + "\n")
    slower = sum(row["slower"] for row in rows)
    print(heading(results), markdown(rows), f"slower in bf16: {slower} of {len(rows)}", sep="\n\n")


if __name__ == "__main__":
    main()
