"""Train digits.py without and with nano_loop, alternating after each epoch, and compare: `make demo`.

    python examples/demo.py
    python examples/demo.py --epochs 3

Arguments are passed to digits.py. While one process trains, the other one is stopped, so other programs slow down both
equally.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

script = Path(__file__).with_name("digits.py")


class Training:
    """The script in a process, which is stopped after each line that it prints."""

    def __init__(self, name, folder, *options):
        self.name, self.results = name, Path(folder, f"{name}.json")
        self.start, self.epochs = 0.0, []  # seconds
        command = [sys.executable, script, *options, "--json", self.results]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def processes(self):
        """Return the process and its workers."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def each(self, action):
        """Apply an action to all processes that are still running."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                action(process)

    def go_on(self):
        """Run the script until its next line, and return whether there was one."""
        self.each(psutil.Process.resume)
        begun = time.perf_counter()
        line = self.process.stdout.readline()
        seconds = time.perf_counter() - begun
        if not line:
            return False
        self.each(psutil.Process.suspend)
        if line.startswith("epoch"):
            self.epochs.append(seconds)
            print(f"{self.name:10} {line.rstrip()}, {seconds:.1f} s", flush=True)
        elif not self.epochs:
            self.start = seconds
        return True

    def result(self):
        """Return the script's output, or end this script with its exit code."""
        exit_code = self.process.wait()
        if exit_code != 0:
            print(f"{script.name} failed, with exit code {exit_code}: nothing to compare.", file=sys.stderr)
            sys.exit(exit_code if exit_code > 0 else 128 - exit_code)  # a negative one is a signal
        return json.loads(self.results.read_text())


print("Plain PyTorch and nano_loop train in turn: one to three minutes on two cores.", flush=True)
with ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    trainings = []
    for name, options in {"plain": ["--plain"], "nano_loop": []}.items():
        training = Training(name, folder, *options, *sys.argv[1:])
        stack.callback(training.each, psutil.Process.kill)
        trainings.append(training)
        if not training.go_on():
            training.result()
    goes_on = [True]
    while all(goes_on):
        goes_on = [training.go_on() for training in trainings]
    results = {training.name: training.result() for training in trainings}

print(f"\n{'':12}{'training':>10}{'with start':>12}{'test accuracy':>15}")
for training in trainings:
    seconds, accuracy = sum(training.epochs), results[training.name]["accuracy"]
    print(f"{training.name:12}{seconds:>8.1f} s{training.start + seconds:>10.1f} s{accuracy:>15.2%}")
plain, accelerated = trainings
in_turn = statistics.median(one / other for one, other in zip(plain.epochs, accelerated.epochs, strict=True))
in_all = (plain.start + sum(plain.epochs)) / (accelerated.start + sum(accelerated.epochs))
print(f"{'speed-up':12}{in_turn:>9.2f}×{in_all:>11.2f}×  (of training: the median of the epochs)")
