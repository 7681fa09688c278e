"""Measure two ranks with one core each: the cost of averaging, compared with DDP and none, and of starts and calls.

python -m benchmarks.processes --rounds 3
python -m benchmarks.processes --only start
python -m benchmarks.processes --only calls

The three ways of averaging alternate in the same two processes, so that the state of the machine is the same.
BERT-base is transformers', with random weights: pip install -r requirements/bench.txt.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.names import at_least_one
from nano_loop import TorchNano, nano

ROOT = Path(__file__).resolve().parent.parent
#: No averaging; no averaging, but ranks wait for each other after the backward pass; ours; torch's.
WAYS = ("none", "wait", "nano", "ddp")
WARMUP, TURNS = 2, 8  # unmeasured steps, and measured steps per round
IMPORT = "import nano_loop"
FIRST_STEP = """
import nano_loop, torch
@nano_loop.nano(num_processes={}, verbose=False)
def train(model, optimizer):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
model = torch.nn.Linear(1, 1)
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


class InTurn(TorchNano):
    """Takes steps on 4 sequences of 128 tokens per rank, with each way of averaging in turn."""

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, turns: int) -> list[dict[str, list[float]]]:
        """Return, for each turn and way, the seconds of each rank. The ranks start each step together."""
        self.setup(model, optimizer)
        tokens = torch.randint(30000, (4, 128))
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        found = []
        for turn in range(WARMUP + turns):
            seconds = {}
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                with self.no_backward_sync(model, enabled=way != "nano"):
                    self.barrier()
                    after = self.barrier if way == "wait" else _nothing
                    mine = _step(ddp if way == "ddp" else model, optimizer, tokens, after)
                seconds[way] = self.all_gather(torch.tensor([mine])).flatten().tolist()
            found.append(seconds)
        return found[WARMUP:]


def _nothing() -> None: ...


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, after: Callable[[], object]
) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    after()
    optimizer.step()
    return time.perf_counter() - start


def bert(rounds: int) -> None:
    """Print one row per way: its median step, and its time relative to no averaging, turn by turn."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig())
    # Without averaging, the ranks train independently.
    in_turn = InTurn(num_processes=2, precision="bf16", auto_lr=False, compare_parameters=False, verbose=False)
    found = in_turn.train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), rounds * TURNS)
    slower = [{way: max(each) for way, each in turn.items()} for turn in found]
    waits = statistics.quantiles((each["nano"] / each["wait"] for each in slower), n=4)
    print("\nBERT-base, 4×128 tokens per rank, two ranks of one core, bf16, milliseconds per step of the slower rank")
    for way in WAYS:
        ratios = statistics.quantiles((each[way] / each["none"] for each in slower), n=4)
        median = statistics.median(each[way] for each in slower)
        print(f"  {way:<6} {median * 1e3:8.0f}   {ratios[1]:.3f}× none (quartiles {ratios[0]:.3f}, {ratios[2]:.3f})")
    print(f"  nano takes {waits[1]:.3f}× the time of waiting alone (quartiles {waits[0]:.3f}, {waits[2]:.3f})")
    gains = statistics.quantiles((each["ddp"] / each["nano"] for each in slower), n=4)
    print(f"  DDP takes {gains[1]:.3f}× nano's time (quartiles {gains[0]:.3f}, {gains[2]:.3f}), {len(found)} turns")


def start(rounds: int) -> None:
    """Print the time to the first step of two processes, compared with one process and an import of nano_loop."""
    programs = {"import": IMPORT, "one process": FIRST_STEP.format(1), "two processes": FIRST_STEP.format(2)}
    found: dict[str, list[float]] = {"an import": [], "one process": []}
    for _ in range(rounds):
        seconds = {name: _seconds(program) for name, program in programs.items()}
        print("start:", ", ".join(f"{name} {each:.2f} s" for name, each in seconds.items()), file=sys.stderr)
        found["an import"].append(seconds["two processes"] - seconds["import"])
        found["one process"].append(seconds["two processes"] - seconds["one process"])
    print()
    for name, each in found.items():
        print(f"start of two processes, over {name}: {statistics.median(each):.2f} s (median of {rounds})")


FOLDS = 5


@nano(num_processes=2, verbose=False)
def cross_validate(models: list[nn.Module], optimizers: list[Any], loaders: list[Any], epochs: int) -> None:
    for model, optimizer, loader in zip(models, optimizers, loaders, strict=True):
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()


def calls(rounds: int, rows: int, epochs: int) -> None:
    """Print the time of a cross-validation with one call, one call per fold, and one call per epoch."""
    ways = {"one call": (1, epochs), "a call a fold": (FOLDS, epochs), "a call an epoch": (FOLDS, 1)}
    cross_validate(*_folds(rows), 1)  # starts the process that workers are forked from
    found = [{name: _seconds_by(*way, rows, epochs) for name, way in ways.items()} for _ in range(rounds)]
    print(f"\n{FOLDS} folds of {epochs} epochs over {rows} rows, two processes, seconds")
    for name in ways:
        ratios = [each[name] / each["one call"] for each in found]
        median = statistics.median(each[name] for each in found)
        print(f"  {name:<16} {median:7.2f}   {statistics.median(ratios):.3f}× ({min(ratios):.3f}-{max(ratios):.3f})")


def _folds(rows: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[DataLoader[Any]]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        for _ in range(FOLDS)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    data = TensorDataset(torch.rand(rows, 32), torch.rand(rows, 1))
    held = torch.arange(rows).chunk(FOLDS)
    subsets = [Subset(data, torch.cat([*held[:fold], *held[fold + 1 :]]).tolist()) for fold in range(FOLDS)]
    return models, optimizers, [DataLoader(subset, 64, shuffle=True) for subset in subsets]


def _seconds_by(parts: int, epochs_a_call: int, rows: int, epochs: int) -> float:
    """Return the seconds of all folds and epochs, with calls for a part of the folds and this many epochs each."""
    folds = list(zip(*_folds(rows), strict=True))
    size = FOLDS // parts
    begun = time.perf_counter()
    for start in range(0, FOLDS, size):
        for _ in range(epochs // epochs_a_call):
            cross_validate(*map(list, zip(*folds[start : start + size], strict=True)), epochs_a_call)
    return time.perf_counter() - begun


def _seconds(program: str) -> float:
    begun = time.perf_counter()
    _output([sys.executable, "-c", program])
    return time.perf_counter() - begun


def _output(command: list[str]) -> str:
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    return run.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("bert", "start", "calls"))
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--rows", type=at_least_one, default=20_000, help="of the cross-validation (default: 20,000)")
    parser.add_argument("--epochs", type=at_least_one, default=20, help="of each of its folds (default: 20)")
    arguments = parser.parse_args()
    cross_validation = functools.partial(calls, rows=arguments.rows, epochs=arguments.epochs)
    for name, part in {"bert": bert, "start": start, "calls": cross_validation}.items():
        if arguments.only in (None, name):
            part(arguments.rounds)


if __name__ == "__main__":
    main()
