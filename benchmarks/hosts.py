"""Measure a training step on two hosts with a network between them, for several ways of averaging gradients.

    sudo python -m benchmarks.hosts
    sudo python -m benchmarks.hosts --rate 10gbit --ranks 1 --rounds 5 --only lstm

The hosts are network namespaces of this machine, each with a name, shared memory and one end of a veth pair whose
rate `tc` limits. This needs root, and Linux's ip, tc and unshare. All ranks share the machine's cores, so compare the
ways with each other, and not their times with those of one process. The ways alternate in the same processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore

from benchmarks.names import at_least_one
from nano_loop.config.options import Options
from nano_loop.cpu import read_machine
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.averaging import Averaging
from nano_loop.distributed.data_parallel.buckets import GroupTransport
from nano_loop.distributed.launch_external.environment import Launch
from nano_loop.distributed.launch_external.launcher import join_run

ROOT = Path(__file__).resolve().parent.parent
HOSTS = ("nano-loop-a", "nano-loop-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29617
WAYS = ("DDP over gloo", "buckets at the end", "buckets")


class Bert(nn.Module):
    """A model of BERT-base's shapes: 110 million parameters."""

    def __init__(self, words: int = 30522, width: int = 768) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def bert() -> tuple[nn.Module, Tensor]:
    return Bert(), torch.randint(30522, (4, 128))


def lstm() -> tuple[nn.Module, Tensor]:
    from benchmarks.workloads.sequences import LstmModel

    return LstmModel(10_000, 512), torch.randint(10_000, (16, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"bert": bert, "lstm": lstm}


# --- a rank ---


def measure(ranks: Ranks, name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step of the slowest rank, by way and round; a first round warms up."""
    torch.manual_seed(0)
    model, tokens = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way in WAYS:
            with averaged(ranks, way, model, optimizer) as called:
                times[way].append(max(gathered(ranks, step_time(ranks, called, optimizer, tokens, steps))))
    return {way: each[1:] for way, each in times.items()}


def step_time(ranks: Ranks, model: Any, optimizer: Any, tokens: Tensor, steps: int) -> float:
    seconds = []
    for _ in range(steps + 1):
        ranks.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens)
        F.cross_entropy(output.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[1:])


@contextmanager
def averaged(ranks: Ranks, way: str, model: nn.Module, optimizer: Any) -> Iterator[Any]:
    if way == "DDP over gloo":
        wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
        yield wrapped
        del wrapped
        optimizer.zero_grad()
        gc.collect()
        return
    transport = GroupTransport(ranks, ranks.context.gradient_group)
    averaging = Averaging(ranks, transport, compare=False, overlapped=way == "buckets")
    averaging.add([model], [optimizer])
    with ExitStack() as stack:
        stack.callback(transport.close)
        stack.callback(transport.leave)
        stack.callback(averaging.close)
        yield model


def gathered(ranks: Ranks, value: float) -> list[float]:
    return ranks.gather(value)


def work(args: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), 2 * args.ranks
    torch.set_num_threads(1)
    store = TCPStore(ADDRESSES[0], PORT, is_master=rank == 0, wait_for_workers=False)
    options, machine = Options(verbose=False), read_machine()
    address = ADDRESSES[rank // args.ranks]
    launch = Launch("the benchmark", rank, size)
    with join_run(store, options, machine, launch, address=address, threads=1) as slot:
        found = {name: measure(slot.ranks, name, args.rounds, args.steps) for name in args.only}
        slot.ranks.barrier()
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(found))


# --- the hosts ---


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def network(rate: str) -> Iterator[None]:
    """Create the two namespaces and their connection, and delete them on exit."""
    with ExitStack() as stack:
        for host in HOSTS:
            run("ip", "netns", "add", host)
            stack.callback(run, "ip", "netns", "del", host)
        run("ip", "link", "add", "nl0", "netns", HOSTS[0], "type", "veth", "peer", "name", "nl1", "netns", HOSTS[1])
        for number, (host, address) in enumerate(zip(HOSTS, ADDRESSES, strict=True)):
            inside = ("ip", "netns", "exec", host)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", f"nl{number}")
            for device in (f"nl{number}", "lo"):
                run(*inside, "ip", "link", "set", device, "up")
            shape = ("root", "tbf", "rate", rate, "burst", "1mbit", "latency", "50ms")
            run(*inside, "tc", "qdisc", "add", "dev", f"nl{number}", *shape)
        yield


# The ranks of a host share its name and shared memory.
START = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; for rank in $RANKS; do RANK=$rank "$@" & done; wait'


def start(host: int, ranks: int, command: list[str], result: str) -> subprocess.Popen[bytes]:
    numbers = " ".join(str(host * ranks + each) for each in range(ranks))
    environment = {**os.environ, "RANKS": numbers, "RESULT": result, "PYTHONPATH": str(ROOT)}
    inside = ["ip", "netns", "exec", HOSTS[host], "unshare", "--mount", "--uts"]
    return subprocess.Popen([*inside, "sh", "-c", START, HOSTS[host], *command], env=environment, cwd=ROOT)


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [f"| | {' | '.join(found)} |", f"| --- |{' --- |' * len(found)}"]
    for way in WAYS:
        cells = []
        for times in found.values():
            ratios = [mine / ours for mine, ours in zip(times[way], times["buckets"], strict=True)]
            spread = f"{statistics.median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{statistics.median(times[way]):.0f} ms, {spread}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def can_make_networks() -> str | None:
    """Return why this machine cannot simulate a network, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [each for each in ("ip", "tc", "unshare") if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    try:
        with network("1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return str(error)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the network, as tc takes it (default: 1gbit)")
    parser.add_argument("--ranks", type=at_least_one, default=2, help="on each host (default: 2)")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=2, help="of each way in a round")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--output", type=Path, help="write the times to this file, as JSON")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        work(args)
        return
    reason = can_make_networks()
    if reason is not None:
        sys.exit(f"no two hosts here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are deleted
    result = Path(f"/tmp/nano-loop-hosts-{os.getpid()}.json")
    command = [sys.executable, "-m", "benchmarks.hosts", *(arguments if arguments is not None else sys.argv[1:])]
    with network(args.rate), contextlib.suppress(FileNotFoundError):
        processes = [start(host, args.ranks, command, str(result)) for host in range(2)]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes) or not result.exists():
            sys.exit("a rank has failed")
        found = json.loads(result.read_text())
        result.unlink()
        print(table(found))
        if args.output:
            args.output.write_text(json.dumps({**vars(args), "output": None, "times": found}, indent=1))


if __name__ == "__main__":
    main()
