"""Measure in one process the seconds in which a program trains.

python -m benchmarks.libraries.case '{"program": "bert", "small": true}'
"""

from __future__ import annotations

import json
import sys
import time
import warnings

from benchmarks.fresh import keep_output
from benchmarks.libraries import PROGRAMS
from benchmarks.libraries.programs import seed


def main() -> None:
    output = keep_output()
    warnings.simplefilter("ignore")  # the libraries' advice about GPUs and loader workers
    job = json.loads(sys.argv[1])
    seed()
    fit = PROGRAMS[job["program"]].prepare(job["small"])
    start = time.perf_counter()
    trained = fit()
    print(json.dumps({"fit": time.perf_counter() - start, "loss": trained.loss}), file=output, flush=True)


if __name__ == "__main__":
    main()
