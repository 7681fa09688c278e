"""A process that trains cases, and reports each result: ``python -m proof.worker``.

It reads requests from standard input, one line of JSON each. It writes a line when a case begins, when a way ends, and
when the request ends, and an empty object before each accelerated run, to show that it has not hung.
"""

import fnmatch
import json
import logging
import os
import sys
import warnings

import torch

from nano_loop.runtime.mkl_functions import resolve_mkl_functions
from proof.own_kernels import take_own_kernels
from proof.sources import families, hash_of
from proof.ways import WAYS, Compared


def cases(source, only="*", part=0, parts=1, share=(0, 1), always=()):
    """Yield a source's cases that match `only`: those of a part's families in the share, or in ``always``."""
    remainder, ratio = share
    for family, samples in families(source):
        in_family = fnmatch.fnmatch(f"{family}/0", only) or fnmatch.fnmatch(family, only.rpartition("/")[0])
        if hash_of(family) % parts == part and in_family:
            for case in samples():
                in_share = hash_of(case.name) % ratio == remainder or case.name in always
                if in_share and fnmatch.fnmatch(case.name, only):
                    yield case


def compared(case, ways, alive=lambda: None):
    """Yield the way, plain torch's error, and the differences of a case; nothing if it cannot be built."""
    program = case.build()
    together = program and Compared(program, alive)
    for way in ways if program else ():
        if WAYS[way].applies(program):
            found = together.differences(way)
            yield way, together.plain().error, found


def serve(lines, write):
    """Process each line's request."""
    for request in map(json.loads, lines):
        known, after, ways = request.pop("known"), request.pop("after"), request.pop("ways")
        for case in cases(**request, always=known):
            if after is not None:
                after = None if case.name == after else after
                continue
            write({"begins": case.name})
            one, other = ("fp32", "exact") if hash_of(case.name) // 7 % 2 == 0 else ("exact", "fp32")
            named = {"all": WAYS, "one": [one], "other": [other]}
            chosen = {*named.get(str(ways), ways), *known.get(case.name, ())}
            try:
                for way, error, found in compared(case, [each for each in WAYS if each in chosen], lambda: write({})):
                    write({"way": way, "raises": error, "found": found})
            except Exception as error:
                write({"way": "", "raises": None, "found": [("harness", repr(error)[:300])]})
        write({"ends": True})


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not an answer
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(int(sys.argv[1]))
    for dtype in (torch.float32, torch.float64):
        resolve_mkl_functions(dtype)  # so that plain torch computes the same values each time
    take_own_kernels()
    serve(sys.stdin, lambda answer: answers.write(json.dumps(answer) + "\n"))
