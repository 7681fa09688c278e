"""Measure how fast two ranks with one core each average 440 MB of gradients, in GB of gradients per second.

python -m benchmarks.averaging
python -m benchmarks.averaging --ranks 2,4,8

It compares shared memory, our buckets over the process group, and a plain gloo all-reduce of each tensor, in turn: once
as one tensor, once as the tensors of BERT-base.

With `--ranks`, it measures the CPU time of a rank in shared memory, relative to the time for moving its bytes at the
memory bandwidth. With S bytes of gradients and N ranks, a rank

- copies the others' slices into its slot: it reads and writes S (N - 1) / N each;
- sums its own slice: it reads one of each rank, S, and writes the mean twice, 2 S / N;
- copies the others' slices out of their results: it reads and writes S (N - 1) / N each,

which is S (5 N - 2) / N in total. The bandwidth is measured with copies of the gradients, 2 S, by all ranks at the same
time. CPU time is not affected by other programs. If ranks share cores, they also wait for each other, first by
spinning, which is not necessary with one core each: this is shown separately.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import distributed

from benchmarks.names import at_least_one
from nano_loop.cpu import read_machine
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.distributed.shared_memory.shared_file import map_together
from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

ROOT = Path(__file__).resolve().parent.parent
WIDTH, INNER, LAYERS, WORDS = 768, 3072, 12, 30522  # of BERT-base
LISTS = ("one tensor", "BERT-base")
OURS = "shared memory"


def bert_shapes() -> Iterator[tuple[int, ...]]:
    yield from ((WORDS, WIDTH), (512, WIDTH), (2, WIDTH), (WIDTH,), (WIDTH,))
    for _ in range(LAYERS):
        yield from ((WIDTH, WIDTH), (WIDTH,)) * 4  # query, key, value, output
        yield from ((INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,))
        yield from ((WIDTH,),) * 4  # two layer norms
    yield from ((WIDTH, WIDTH), (WIDTH,))


def gradients(name: str, megabytes: int = 440) -> list[torch.Tensor]:
    """Return a list of this many megabytes: one tensor, or as many of BERT-base's as fit, the last ones first."""
    shapes, room = list(bert_shapes()), megabytes * 250_000
    if name == "one tensor":
        shapes = [(room,)]
    sizes = accumulate(math.prod(shape) for shape in reversed(shapes))
    shapes = [shape for shape, size in zip(reversed(shapes), sizes, strict=True) if size <= room][::-1]
    return [torch.rand(shape) for shape in shapes]


def systems(ranks: Ranks) -> dict[str, Callable[[list[torch.Tensor]], None]]:
    def all_reduce(tensors: list[torch.Tensor]) -> None:
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        for tensor in tensors:
            tensor.div_(ranks.size)

    mapped = partial(map_together, ranks, Path(f"/dev/shm/averaging-{os.getppid()}"))
    return {
        OURS: SharedMemoryTransport(ranks, mapped).average,
        "process group": GroupTransport(ranks).average,
        "gloo all_reduce": all_reduce,
    }


def measure(ranks: Ranks, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return, for each list, the GB/s of each system in each round; an unmeasured round warms up."""
    ways, results = systems(ranks), {}
    for name in LISTS:
        tensors = gradients(name)
        gigabytes = sum(tensor.nbytes for tensor in tensors) / 1e9
        results[name] = [
            {way: gigabytes / seconds(ranks, average, tensors) for way, average in ways.items()}
            for _ in range(rounds + 1)
        ][1:]
    return results


def seconds(ranks: Ranks, average: Callable[[list[torch.Tensor]], None], tensors: list[torch.Tensor]) -> float:
    ranks.barrier()
    start = time.perf_counter()
    average(tensors)
    return time.perf_counter() - start


class Waiting:
    """Records the CPU time that a rank spends spinning while it waits for another; see `RunContext.waits`."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def begin(self, *_: object) -> Waiting:
        self._began = time.thread_time()
        return self

    def look(self) -> None: ...

    def end(self) -> None:
        self.seconds += time.thread_time() - self._began


def measure_cpu(ranks: Ranks, rounds: int, megabytes: int) -> dict[str, list[dict[str, float]]]:
    """Return, for each list, a round's seconds of CPU of this rank; an unmeasured round warms up."""
    waiting = ranks.context.waits = Waiting()  # type: ignore[assignment]
    average, results = systems(ranks)[OURS], {}
    for name in LISTS:
        tensors = gradients(name, megabytes)
        copies = [tensor.clone() for tensor in tensors]
        copy = partial(copy_each, copies)
        nbytes, rows = sum(tensor.nbytes for tensor in tensors), []
        for _ in range(rounds + 1):
            rate = 2 * nbytes / cpu_seconds(ranks, copy, tensors)
            waiting.seconds = 0.0
            whole = cpu_seconds(ranks, average, tensors, waiting)
            least = nbytes * (5 * ranks.size - 2) / ranks.size / rate
            rows.append({"nbytes": nbytes, "rate": rate, "seconds": whole, "waiting": waiting.seconds, "least": least})
        results[name] = rows[1:]
    return results


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def cpu_seconds(
    ranks: Ranks,
    function: Callable[[list[torch.Tensor]], None],
    tensors: list[torch.Tensor],
    waiting: Waiting | None = None,
) -> float:
    ranks.barrier()
    if waiting is not None:
        waiting.seconds = 0.0
    start = time.thread_time()
    function(tensors)
    return time.thread_time() - start


def serve(rank: int, arguments: argparse.Namespace) -> None:
    """Run one rank, which prints its measurements as one line of JSON."""
    cpus, size = sorted(os.sched_getaffinity(0)), arguments.size
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    store = distributed.FileStore(arguments.store, size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    folder = Path(arguments.store).parent
    ranks = Ranks(rank, size, local_rank=rank, local_size=size, folder=folder)
    ranks.channel = SharedChannel(ranks, folder)
    if arguments.ranks:
        results = measure_cpu(ranks, arguments.rounds, arguments.megabytes)
    else:
        results = measure(ranks, arguments.rounds)
    ranks.barrier()
    distributed.destroy_process_group()
    print(json.dumps(results))


def run_ranks(size: int) -> list[dict[str, list[dict[str, float]]]]:
    """Return the output of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.averaging", *sys.argv[1:], "--store", f"{folder}/store"]
        command += ["--size", str(size), "--rank"]
        environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def show(name: str, rounds: list[dict[str, float]]) -> None:
    print(f"\n{name}")
    print(f"  {'way':<16} {'GB/s':>6}   {OURS} is faster by, round by round: median (range)")
    for way in rounds[0]:
        row = f"  {way:<16} {statistics.median(each[way] for each in rounds):>6.2f}"
        if way != OURS:
            ratios = [each[OURS] / each[way] for each in rounds]
            row += f"   {statistics.median(ratios):.2f}× ({min(ratios):.2f}-{max(ratios):.2f})"
        print(row)


def show_cpu(size: int, found: list[dict[str, list[dict[str, float]]]]) -> None:
    """Print one row per list: the median over the rounds of each figure's mean over the ranks."""
    for name in LISTS:
        rounds = [
            {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
            for rows in zip(*(rank[name] for rank in found), strict=True)
        ]
        ratios = sorted((each["seconds"] - each["waiting"]) / each["least"] for each in rounds)
        nbytes, rate, seconds, waiting, least = (
            statistics.median(each[key] for each in rounds) for key in ("nbytes", "rate", "seconds", "waiting", "least")
        )
        print(
            f"| {size} | {name} | {nbytes / 1e6:.0f} | {rate / 1e9:.1f} | {least * 1e3:.0f} | "
            f"{(seconds - waiting) * 1e3:.0f} | {waiting * 1e3:.0f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )


def counts(text: str) -> list[int]:
    """Parse an argument with numbers of ranks."""
    found = [at_least_one(each) for each in text.split(",")]
    if min(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: two ranks or more average")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--ranks", type=counts, default=[], metavar="N,...", help="instead: CPU time of so many ranks")
    parser.add_argument("--megabytes", type=at_least_one, default=440, help="of gradients, with --ranks (default: 440)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        serve(arguments.rank, arguments)
        return
    machine = read_machine()
    if arguments.ranks:
        print(f"{machine.name}, {machine.num_threads} cores, torch {torch.__version__}\n")
        print("| ranks | | S, MB | memory's rate, GB/s | bytes at that rate, ms | CPU, ms | waiting awake, ms | |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for size in arguments.ranks:
            show_cpu(size, run_ranks(size))
        return
    print(f"{machine.name}, two ranks of one core each, torch {torch.__version__}")
    for name, rounds in run_ranks(2)[0].items():
        show(name, rounds)


if __name__ == "__main__":
    main()
