"""Train digits.py without and with nano_loop, one after the other, and compare: `make demo`.

    python examples/demo.py
    python examples/demo.py --epochs 3

What is given is handed to digits.py.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

script = Path(__file__).with_name("digits.py")


def run(*options):
    """Run the script in a separate process, on this terminal, and return its results."""
    print(f"\n$ python {script.name} {' '.join(options)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        start = time.perf_counter()
        exit_code = subprocess.run([sys.executable, script, *options, "--json", results]).returncode
        seconds = time.perf_counter() - start
        if exit_code != 0:
            print(f"{script.name} failed, with exit code {exit_code}: nothing to compare.", file=sys.stderr)
            sys.exit(exit_code if exit_code > 0 else 128 - exit_code)  # a negative one is a signal
        return json.loads(results.read_text()) | {"in all": seconds}


plain = run("--plain", *sys.argv[1:])
accelerated = run(*sys.argv[1:])

print(f"\n{'':12}{'training':>10}{'with start':>12}{'test accuracy':>15}")
for name, result in {"plain": plain, "nano_loop": accelerated}.items():
    print(f"{name:12}{result['seconds']:>8.1f} s{result['in all']:>10.1f} s{result['accuracy']:>15.2%}")
speed_up, speed_up_in_all = (plain[key] / accelerated[key] for key in ("seconds", "in all"))
print(f"{'speed-up':12}{speed_up:>9.2f}×{speed_up_in_all:>11.2f}×")
