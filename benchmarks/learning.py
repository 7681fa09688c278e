"""Show that plain and accelerated loops learn equally well: losses over wall time, on real data, over several seeds.

python -m benchmarks.learning
python -m benchmarks.learning --only digits,diabetes --seeds 5
python -m benchmarks.learning --output 2026-11-cpu-learning --picture docs/learning.png --page docs/learning.md

A seed's two runs differ only in nano_loop: they start with the same weights and see the same batches. Losses are
computed on held-out data, and the clock is stopped meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

from benchmarks.chart import COLOURS
from benchmarks.fresh import ROOT, fresh
from benchmarks.markdown import table
from benchmarks.names import at_least_one, names
from benchmarks.surroundings import heading, surroundings
from nano_loop import nano

#: The options of the README's first example.
OPTIONS = {"precision": "auto", "channels_last": "auto"}
MODES = ("plain", "nano")
#: By task, mode and seed: pairs of training time in seconds and loss.
Curves = dict[str, dict[str, list[list[tuple[float, float]]]]]


@dataclass(frozen=True)
class Task:
    """A model that is trained on data that come with a package.

    Parameters
    ----------
    title : str
        Its name in the plot.
    make : callable
        Returns the model, the training set, the data that is held out, and the loss of outputs and targets.
    steps, batch_size, rate : int, int, float
        The number of steps, the batch size, and the initial learning rate of AdamW.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Dataset[Any], list[Tensor], Callable[[Tensor, Tensor], Tensor]]]
    steps: int
    batch_size: int
    rate: float


class GPT(nn.Module):
    """A language model of characters: four layers of causal attention, 256 wide."""

    def __init__(self, context: int, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.character(codes) + self.position.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x)).flatten(0, 1)


def text() -> tuple[nn.Module, Dataset[Any], list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Return a character-level GPT on the source code of modules of the standard library."""
    context, folder = 128, Path(sysconfig.get_path("stdlib"))
    modules = ("argparse", "doctest", "inspect", "mailbox", "pydoc", "tarfile", "typing")
    files = [folder / f"{name}.py" for name in modules]
    written = "".join(file.read_text(encoding="utf-8") for file in files).encode("ascii", errors="ignore")
    rows = torch.tensor(list(written[: len(written) // (context + 1) * (context + 1)])).view(-1, context + 1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    data, held_out = rows[64:], rows[:64]
    return (
        GPT(context),
        TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous()),
        [held_out[:, :-1], held_out[:, 1:]],
        lambda logits, following: F.cross_entropy(logits, following.flatten()),
    )


def digits() -> tuple[nn.Module, Dataset[Any], list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Return a small convolutional network on scikit-learn's handwritten digits, of 32² pixels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, size=32, mode="bilinear")
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, *_divided(images, torch.tensor(labels)), F.cross_entropy


def diabetes() -> tuple[nn.Module, Dataset[Any], list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Return a multilayer perceptron on scikit-learn's diabetes data."""
    from sklearn.datasets import load_diabetes

    rows, targets = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
    layers: list[nn.Module] = []
    for inputs in (10, 512):
        layers += [nn.Linear(inputs, 512), nn.GELU("tanh"), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(512, 1), nn.Flatten(0))
    return model, *_divided(rows / rows.std(), (targets - targets.mean()) / targets.std()), F.mse_loss


def _divided(inputs: Tensor, targets: Tensor) -> tuple[Dataset[Any], list[Tensor]]:
    """Return four fifths of the data for training, and the rest; the split is the same for every seed."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    held_out, rows = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(inputs[rows], targets[rows]), [inputs[held_out], targets[held_out]]


TASKS = {
    "text": Task("character GPT,\nsource of the standard library", text, steps=90, batch_size=32, rate=1e-3),
    "digits": Task("convolutional network,\nscikit-learn's digits", digits, steps=180, batch_size=64, rate=1e-3),
    "diabetes": Task("multilayer perceptron,\nscikit-learn's diabetes", diabetes, steps=600, batch_size=64, rate=1e-5),
}
_EVALUATIONS = 12


def curve(workload: str, mode: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train once, and return the seconds and the losses of its evaluations. This is a job of `benchmarks.case`."""
    made, pairs = TASKS[workload], []
    torch.manual_seed(seed)
    model, data, (inputs, targets), loss_of = made.make()
    count = steps or made.steps
    epochs = math.ceil(count * made.batch_size / len(data))  # type: ignore[arg-type]
    order = torch.cat([torch.randperm(len(data)) for _ in range(epochs)])  # type: ignore[arg-type]
    loader = DataLoader(data, made.batch_size, sampler=order[: count * made.batch_size].tolist())
    optimizer = torch.optim.AdamW(model.parameters(), made.rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * made.rate, total_steps=count)
    every = max(1, count // _EVALUATIONS)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
        seconds, start = 0.0, time.perf_counter()
        for step, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            if step % every == 0:
                seconds += time.perf_counter() - start
                model.eval()
                with torch.no_grad():
                    pairs.append((seconds, loss_of(model(inputs), targets).item()))
                model.train()
                start = time.perf_counter()

    (train if mode == "plain" else nano(**OPTIONS, verbose=False)(train))(model, optimizer, loader)
    return {"curve": pairs}


def curves(options: argparse.Namespace) -> Curves:
    """Train each task with each seed, plain and accelerated in turn, each in a fresh process."""
    measured: Curves = {task: {mode: [] for mode in MODES} for task in options.only}
    runs = [(task, seed, mode) for task in options.only for seed in range(options.seeds) for mode in MODES]
    for task, seed, mode in tqdm(runs, file=sys.stderr, unit="run", dynamic_ncols=True):
        job = {"task": "learning", "workload": task, "mode": mode, "seed": seed, "steps": options.steps}
        result = fresh(job, limit=options.limit)
        if "reason" in result:
            sys.exit(f"{task}, {mode}, seed {seed}: {result['reason']}")
        measured[task][mode].append(result["curve"])
    return measured


def ends(measured: Curves) -> str:
    """Return a row for each task: the final losses, the paired differences with their error, and the speed."""
    head = ["", "seeds", "plain ends at", "nano_loop ends at", "difference, mean ± standard error", "× plain"]
    rows = []
    for task, modes in measured.items():
        plain, fast = ([run[-1] for run in modes[mode]] for mode in MODES)
        off = [100 * (ours[1] / theirs[1] - 1) for ours, theirs in zip(fast, plain, strict=True)]
        error = f" ± {statistics.stdev(off) / math.sqrt(len(off)):.2f}%" if len(off) > 1 else ""
        speed = statistics.median(theirs[0] / ours[0] for ours, theirs in zip(fast, plain, strict=True))
        means = [f"{statistics.fmean(loss for _, loss in end):.4f}" for end in (plain, fast)]
        title = TASKS[task].title.replace("\n", " ")
        rows.append([title, str(len(off)), *means, f"{statistics.fmean(off):+.2f}%{error}", f"{speed:.2f}"])
    return table(head, rows)


def draw(measured: Curves, path: Path) -> None:
    """Write a PNG of the losses over wall time, one line per run, with the values in its "Description"."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    for axes, (task, modes) in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured.items(), strict=True):
        for mode, colour, label in zip(MODES, (COLOURS[0], COLOURS[2]), ("plain PyTorch", "nano_loop"), strict=True):
            for seed, run in enumerate(modes[mode]):
                axes.plot(*zip(*run, strict=True), color=colour, linewidth=1.2, label="" if seed else label)
        axes.set_title(TASKS[task].title, fontsize=10)
        axes.set_xlabel("seconds of training")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("loss of data not trained on")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None, "Description": json.dumps(measured)})


def page(results: dict[str, Any]) -> str:
    """Return the text of docs/learning.md."""
    return f"""\
# Learning

A faster step is of no use if the model learns less. This page shows three training loops on real data that come with
packages, plain and with the options of the README's first example, over several seeds:

![Loss over seconds of training, plain and with nano_loop, one line per seed](learning.png)

{ends(results["learning"])}

For each seed, both runs start with the same weights and see the same batches, so the differences are paired: each is
nano_loop's last loss relative to the plain one's. They are caused by rounding products to bf16, and by sums in another
order. Losses are computed on held-out data, and the clock is stopped meanwhile. Each run is a fresh process, and the
seconds are those of the loop, including nano_loop's measurements in its first steps.

{heading(results)}, {results["date"][:10]}: `python -m benchmarks.learning {" ".join(results["command"])}`.
[Measurements](measurements.md#training-to-the-end) has longer runs.
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", type=names(TASKS), default=list(TASKS), metavar="TASKS", help="names between commas")
    add("--seeds", type=at_least_one, default=3, metavar="N", help="how many, from 0 on (default: 3)")
    add("--steps", type=at_least_one, metavar="N", help="steps of each run, in place of the task's own")
    add("--limit", type=at_least_one, default=600, metavar="SECONDS", help="give a run up after (default: 600)")
    add("--output", metavar="NAME", help="store the results in benchmarks/results/NAME.json")
    add("--picture", type=Path, metavar="FILE", help="draw the losses to FILE")
    add("--page", type=Path, metavar="FILE", help="write docs/learning.md to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    results = {**surroundings(), "quick": options.steps is not None, "learning": curves(options)}
    print(ends(results["learning"]))
    if options.output:
        (ROOT / "benchmarks/results" / f"{options.output}.json").write_text(json.dumps(results, indent=1) + "\n")
    if options.picture:
        draw(results["learning"], options.picture)
    if options.page:
        options.page.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
