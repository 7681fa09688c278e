"""One workload under one system, in this process; prints the measurement as one line of JSON."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import warnings

import torch

from benchmarks.systems import SYSTEMS
from benchmarks.workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--steps", type=int, default=6, help="steps that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' advice about GPUs and loader workers
    torch.manual_seed(0)
    work = WORKLOADS[arguments.workload]()
    seconds = SYSTEMS[arguments.system](work, arguments.warmup + arguments.steps)[arguments.warmup :]
    result = {
        "median_ms": statistics.median(seconds) * 1e3,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
