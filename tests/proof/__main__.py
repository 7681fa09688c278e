"""Trains every sample of the sources plainly and accelerated, and fails if a result differs: ``make proof``.

python -m proof [--all | --share 1/6] [--elsewhere] [--only 'modules/nn.GRU/*'] [--ways fp32,exact]
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time

from proof import exceptions

WORKER = (sys.executable, "-m", "proof.worker")
#: Seconds without output after which a process is considered hung.
_PATIENCE = 180
#: By source: the number of parts, and for `make proof`, the ratio of cases to trained cases, and the ways.
SHARES = {
    "architectures": (16, 1, "one"),
    "operators": (8, 6, ("fp32", "exact")),
    "modules": (4, 6, ("fp32", "exact")),
    "optimizers": (4, 6, ("fp32", "exact")),
}


class Tally:
    """Counts of the results of the cases."""

    def __init__(self, known=exceptions.KNOWN):
        self.known, self.needed, self.tried, self._lock = known, set(), set(), threading.Lock()
        self.passed = self.failed = self.excepted = self.raised = 0

    def add(self, case, way, found, raises=None):
        """Count one way of training a case, and print its differences."""
        kinds = {kind for kind, _ in found}
        with self._lock:
            matching = [each for each in self.known if kinds and each.covers(case, way, kinds)]
            self.tried.add((case, way))
            self.needed.update((each.case, way) for each in matching if each.case == case)
            self.raised += bool(raises)
            self.excepted += bool(matching)
            self.passed += not found
            self.failed += bool(found) and not matching
            if found and not matching:
                print(*(f"{case} {way}: {kind} {text}" for kind, text in found[:4]), sep="\n", flush=True)

    def unneeded(self):
        """Return the exceptions whose case was trained without a difference: each is an error."""
        pairs = {(each.case, way) for each in self.known for way in each.ways}
        return sorted(pairs & self.tried - self.needed)


def take(waiting, tally, threads):
    """Let a process answer requests until none is left; a process that dies or hangs is a failure, and is replaced."""
    request = None
    while request is not None or not waiting.empty():
        with contextlib.ExitStack() as stack:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            process = subprocess.Popen(
                [*WORKER, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": cache},
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            with contextlib.suppress(queue.Empty):
                while process.poll() is None:
                    request = _left_of(request or waiting.get_nowait(), process, tally)


def _left_of(request, process, tally):
    """Process a request; return the remainder after the case in which the process died, if it did."""
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    case = None
    while True:
        watch = threading.Timer(_PATIENCE, process.kill)
        watch.start()
        line = process.stdout.readline()
        watch.cancel()
        answer = json.loads(line) if line else {"died": process.wait()}
        if "died" in answer:
            tally.add(case, "", [("died", f"its process has ended with exit code {answer['died']}")])
            return {**request, "after": case} if case else None
        case = answer.get("begins", case)
        if "way" in answer:
            tally.add(case, answer["way"], [*map(tuple, answer["found"])], answer["raises"])
        if "ends" in answer:
            return None


def requests(everything, only, ways, sources, share=None):
    """Return the requests for the processes: parts of sources."""
    found = []
    for source in sources:
        parts, ratio, of_source = SHARES[source]
        known = {each.case: each.ways for each in exceptions.KNOWN if each.case.startswith(source) and only == "*"}
        chosen = ways or ("all" if everything else of_source)
        common = {"source": source, "only": only, "parts": parts, "after": None, "known": known, "ways": chosen}
        of_cases = share or (0, 1 if everything or only != "*" else ratio)
        found += [{**common, "part": part, "share": of_cases} for part in range(parts)]
    return found


def _ways(text):
    return text if text in ("one", "other") else text.split(",")


def _share(text):
    """Return a remainder and a divisor of hashes, given as 1/6."""
    remainder, _, divisor = text.partition("/")
    return int(remainder), int(divisor)


def main(arguments=None):
    """Train the selected cases, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every case in every way, and docs/exceptions.md is written")
    parser.add_argument("--elsewhere", action="store_true", help="as with another torch, exceptions may be unneeded")
    parser.add_argument("--only", default="*", help="the cases whose names match, with * for anything")
    parser.add_argument("--ways", type=_ways, help="such as fp32,exact; one or other: of these, one by hash")
    parser.add_argument("--share", type=_share, help="such as 1/6: cases whose hash is 1 modulo 6; default: 0/6")
    parser.add_argument("--sources", type=lambda text: text.split(","), default=[*SHARES], help="such as modules")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    options = parser.parse_args(arguments)
    started, tally, waiting = time.perf_counter(), Tally(), queue.SimpleQueue()
    sources = [each for each in options.sources if options.only == "*" or options.only.startswith(each)]
    for request in requests(options.all, options.only, options.ways, sources, options.share):
        waiting.put(request)
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        for done in [pool.submit(take, waiting, tally, options.threads) for _ in range(options.processes)]:
            done.result()
    unneeded = [] if options.elsewhere else tally.unneeded()
    for case, way in unneeded:
        print(f"{case} {way} does not differ: take the exception out of tests/proof/exceptions.py")
    if options.all:
        exceptions.write()
    counted = collections.Counter(f"{str(case).partition('/')[0]} {way}" for case, way in tally.tried)
    print("samples:", dict(sorted(counted.items())))
    print(f"{tally.excepted} differ as docs/exceptions.md says, {tally.raised} raise in plain torch")
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes")
    failed = tally.failed + len(unneeded)
    print(f"{tally.passed} passed, {failed} failed")
    return int(bool(failed or not tally.passed))


if __name__ == "__main__":
    sys.exit(main())
