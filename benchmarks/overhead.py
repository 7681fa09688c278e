"""Measure nano_loop's own overhead per step, in microseconds: the same work inside and outside a run.

python -m benchmarks.overhead

The model does almost nothing, so that the cost of the calls into it and of the optimizer's step remains.
bf16 is compared with manual autocast, fp32 with the plain loop; the optimizer is fused on both sides, manually and
by nano_loop. It uses one thread: two would wait for each other longer than nano_loop's overhead.

`verify` and `log_casts` work once per run. Their cost is measured in steps of a transformer.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import nano_loop

REPEATS, CALLS, CALLS_OF_FUNCTION = 60, 400, 20


def build(fused: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds per step."""
    x = torch.ones(2, 4)
    start = time.perf_counter()
    for _ in range(CALLS):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    return (time.perf_counter() - start) / CALLS


def loop_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.ones(2, 4)
    start = time.perf_counter()
    for _ in range(CALLS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        optimizer.step()
    return (time.perf_counter() - start) / CALLS


def difference(ours: Callable[..., float], theirs: Callable[..., float]) -> tuple[float, float]:
    """Return the median seconds of theirs and ours' additional seconds, pair by pair, in alternating order."""
    pairs = []
    for number in range(REPEATS):
        if number % 2:
            pairs.append((ours(*build(None)), theirs(*build(True))))
        else:
            pairs.append((theirs(*build(True)), ours(*build(None)))[::-1])
    return statistics.median(b for _, b in pairs), statistics.median(a - b for a, b in pairs[2:])


def calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds per call into the model."""
    x = torch.ones(2, 4)
    start = time.perf_counter()
    for _ in range(CALLS):
        model(x)
    return (time.perf_counter() - start) / CALLS


def calls_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.ones(2, 4)
    start = time.perf_counter()
    for _ in range(CALLS):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float()
    return (time.perf_counter() - start) / CALLS


CHECKS = {"verify": {"verify": True}, "log_casts": {"log_casts": True}}
CHECKED_STEPS, ROUNDS = 4, 5


def transformer_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the seconds of each step."""
    x, found = torch.randn(8, 64, 256), []
    for _ in range(CHECKED_STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append(time.perf_counter() - start)
    return found


def steps_of_check(options: dict[str, object]) -> float:
    """Return how much longer a run takes with these options, in steps without them."""
    found = []
    for _ in range(ROUNDS):
        seconds = []
        for each in (options, {}):
            layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
            model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            run = nano_loop.nano(precision="bf16", verbose=False, **each)(transformer_loop)
            seconds.append(run(model, torch.optim.AdamW(model.parameters())))
        checked, plain = seconds
        found.append((sum(checked) - sum(plain)) / statistics.median(plain))
    return statistics.median(found)


@nano_loop.nano(verbose=False)
def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Be called, as once an epoch."""


def functions(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds of a call of a decorated function, after the first."""
    nothing(model, optimizer)
    start = time.perf_counter()
    for _ in range(CALLS_OF_FUNCTION):
        nothing(model, optimizer)
    return (time.perf_counter() - start) / CALLS_OF_FUNCTION


def functions_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    for _ in range(CALLS_OF_FUNCTION):
        nothing.__wrapped__(model, optimizer)
    return (time.perf_counter() - start) / CALLS_OF_FUNCTION


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of a CPU without bf16 instructions
    fp32, bf16 = nano_loop.nano(verbose=False), nano_loop.nano(precision="bf16", verbose=False)
    listed = nano_loop.nano(precision="bf16", bf16_ops=["relu"], verbose=False)
    images = nano_loop.nano(precision="bf16", channels_last=True, verbose=False)
    cases = {
        "a call of a function": (functions, functions_by_hand),
        "a call, bf16": (bf16(calls), calls_by_hand),
        "a call, bf16, channels_last": (images(calls), calls_by_hand),
        "a call, bf16, 2 listed": (listed(calls), calls_by_hand),
        "a step, fp32": (fp32(loop), loop),
        "a step, bf16": (bf16(loop), loop_by_hand),
    }
    for name, (ours, theirs) in cases.items():
        base, more = difference(ours, theirs)
        print(f"{name:<28} {base * 1e6:7.1f} µs by hand, nano_loop adds {more * 1e6:5.1f} µs")
    for name, options in CHECKS.items():
        print(f"{name:<28} takes as long as {steps_of_check(options):.1f} steps of a transformer")


if __name__ == "__main__":
    main()
