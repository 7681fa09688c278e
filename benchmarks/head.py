"""Measure a language model's last layer with its cross-entropy: time and memory of a forward and a backward.

The peers are torch's plain calls, its chunked ``functional.linear_cross_entropy``, and a loop over chunks of rows, in
fp32 and in bf16. Each runs in a fresh process.

Run ``python -m benchmarks.head --rows 4096 --width 896 --words 151936``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.fresh import fresh, keep_output
from nano_loop import accelerated

CHUNK = 256  # rows of logits that the loop over chunks holds


def plain(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(head(hidden), labels)


def autocast(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return plain(head, hidden, labels)


def torchs(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, head.weight, labels, options=options)


def torchs_bf16(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    weight = head.weight.bfloat16()
    return functional.linear_cross_entropy(hidden.bfloat16(), weight, labels, options=options).float()


def chunked(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of each chunk again in the backward, so that one chunk of logits exists at a time."""

    def of_chunk(rows: Tensor, own: Tensor) -> Tensor:
        return functional.cross_entropy(head(rows), own, reduction="sum")

    pairs = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    losses = [checkpoint(of_chunk, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum() / len(labels)


def chunked_autocast(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return chunked(head, hidden, labels)


PEERS = {
    "plain": plain,
    "torch": torchs,
    "chunked": chunked,
    "autocast": autocast,
    "torch_bf16": torchs_bf16,
    "chunked_autocast": chunked_autocast,
}
SYSTEMS = (*PEERS, "nano_fp32", "nano_auto")


def measure(system: str, rows: int, width: int, words: int, repeats: int) -> dict[str, float]:
    """Return the median time of a forward and a backward in s, and the memory that they add in MB."""
    torch.manual_seed(0)
    head = nn.Linear(width, words, bias=False)
    hidden, labels = torch.randn(rows, width), torch.randint(words, (rows,))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    times = []

    def steps(loss: Callable[..., Tensor]) -> None:
        for _ in range(repeats):
            inputs = hidden.detach().requires_grad_()
            optimizer.zero_grad()
            start = time.perf_counter()
            loss(head, inputs, labels).backward()
            times.append(time.perf_counter() - start)
            optimizer.step()

    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    if system in PEERS:
        steps(PEERS[system])
    else:
        with accelerated(head, optimizer, precision="auto" if system == "nano_auto" else 32):
            steps(plain)
    return {"s": median(times[1:]), "added_mb": (_peak() - before) / 1024}


def _peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 4096), ("width", 896), ("words", 151_936), ("repeats", 4), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    rounds = options.pop("rounds")
    print("| system | s | MB added |\n| --- | --- | --- |")
    for system in SYSTEMS * rounds:
        result = fresh({"system": system, **options}, limit=900, program=("-m", "benchmarks.head"))
        cells = f"{result['s']:.2f} | {result['added_mb']:.0f}" if "s" in result else f"{result['reason']} |"
        print(f"| `{system}` | {cells} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        out = keep_output()
        print(json.dumps(measure(**json.loads(sys.argv[1]))), file=out, flush=True)
    else:
        main()
