"""Two ranks of one core each: what averaging costs, beside torch's DDP and beside none, and how long a start takes.

python -m benchmarks.processes --rounds 3
python -m benchmarks.processes --only start

The three ways of averaging run under the same launch, binding and accelerations, in fresh processes and in turn.
BERT-base is transformers', with random weights: pip install -r requirements/bench.txt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.names import at_least_one
from nano_loop import TorchNano

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("none", "nano", "ddp")
WARMUP, STEPS = 2, 6
IMPORT = "import nano_loop"
FIRST_STEP = """
import nano_loop, torch
@nano_loop.nano(num_processes=2, verbose=False)
def train(model, optimizer):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
model = torch.nn.Linear(1, 1)
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


class Timed(TorchNano):
    """Times steps of BERT-base on 4 sequences of 128 tokens a rank, with one way of averaging gradients."""

    def train(self, way: str) -> list[float]:
        from transformers import BertConfig, BertForMaskedLM

        bert = BertForMaskedLM(BertConfig())
        optimizer = torch.optim.AdamW(bert.parameters(), lr=1e-4)
        self.setup(bert, optimizer)
        tokens = torch.randint(30000, (4, 128))
        with self.no_backward_sync(bert, enabled=way != "nano"):
            model = DistributedDataParallel(bert, gradient_as_bucket_view=True) if way == "ddp" else bert
            return [_step(model, optimizer, tokens) for _ in range(WARMUP + STEPS)][WARMUP:]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return time.perf_counter() - start


def measure(way: str) -> float:
    """Return the median milliseconds of a step, from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.processes", "--way", way]
    return float(json.loads(_output(command).splitlines()[-1]))


def bert(rounds: int) -> None:
    """Print a row a way: its median, and the ratio to the others, round by round."""
    found: list[dict[str, float]] = []
    for number in range(rounds):
        print(f"bert: round {number + 1} of {rounds}", file=sys.stderr)
        found.append({way: measure(way) for way in WAYS})
    print("\nBERT-base, 4×128 tokens a rank, two ranks of one core, bf16, milliseconds a step")
    for way in WAYS:
        ratios = [each[way] / each["none"] for each in found]
        median = statistics.median(each[way] for each in found)
        print(f"  {way:<6} {median:8.0f}   {statistics.median(ratios):.3f}× none ({min(ratios):.3f}-{max(ratios):.3f})")
    gains = [each["ddp"] / each["nano"] for each in found]
    print(f"  DDP takes {statistics.median(gains):.3f}× nano's time ({min(gains):.3f}-{max(gains):.3f})")


def start(rounds: int) -> None:
    """Print how long two processes take to their first step, over one Python that imports nano_loop."""
    found = []
    for _ in range(rounds):
        imported, stepped = (_seconds(program) for program in (IMPORT, FIRST_STEP))
        found.append(stepped - imported)
        print(f"start: import {imported:.2f} s, first step of two processes {stepped:.2f} s", file=sys.stderr)
    print(f"\nstart of two processes, over an import: {statistics.median(found):.2f} s (median of {rounds})")


def _seconds(program: str) -> float:
    begun = time.perf_counter()
    _output([sys.executable, "-c", program])
    return time.perf_counter() - begun


def _output(command: list[str]) -> str:
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    return run.stdout


PARTS: dict[str, Any] = {"bert": bert, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        timed = Timed(num_processes=2, precision="bf16", auto_lr=False, verbose=False)
        print(json.dumps(statistics.median(timed.train(arguments.way)) * 1e3))
        return
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.rounds)


if __name__ == "__main__":
    main()
