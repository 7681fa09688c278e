"""Measures how fast two ranks of one core each average 440 MB of gradients, in GB of gradients a second.

python -m benchmarks.averaging

Through shared memory, through our buckets over the process group, and through a bare gloo all-reduce of each tensor,
in turn: once as one tensor, once as the tensors of BERT-base.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
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


def gradients(name: str) -> list[torch.Tensor]:
    shapes = [(110_000_000,)] if name == "one tensor" else list(bert_shapes())
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
    """Return, for each list, a round's GB/s of each system; an unmeasured round warms up."""
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


def serve(rank: int, arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints the measurements as one line of JSON."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    store = distributed.FileStore(arguments.store, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    folder = Path(arguments.store).parent
    ranks = Ranks(rank, 2, local_rank=rank, local_size=2, folder=folder)
    ranks.channel = SharedChannel(ranks, folder)
    results = measure(ranks, arguments.rounds)
    ranks.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


def run_ranks(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.averaging", *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return json.loads(outputs[0].splitlines()[-1])


def show(name: str, rounds: list[dict[str, float]]) -> None:
    print(f"\n{name}")
    print(f"  {'way':<16} {'GB/s':>6}   {OURS} is faster by, round by round: median (range)")
    for way in rounds[0]:
        row = f"  {way:<16} {statistics.median(each[way] for each in rounds):>6.2f}"
        if way != OURS:
            ratios = [each[OURS] / each[way] for each in rounds]
            row += f"   {statistics.median(ratios):.2f}× ({min(ratios):.2f}-{max(ratios):.2f})"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        serve(arguments.rank, arguments)
        return
    machine = read_machine()
    print(f"{machine.name}, two ranks of one core each, torch {torch.__version__}")
    for name, rounds in run_ranks(arguments).items():
        show(name, rounds)


if __name__ == "__main__":
    main()
