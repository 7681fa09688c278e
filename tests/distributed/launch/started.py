"""Start Python as a person or a launcher would, for tests of the ways to start a run."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import nano_loop

# Works in a script, at a prompt and in a notebook: no line inside a block is empty.
LOOP = """
import argparse, json, os, sys, torch
from nano_loop import TorchNano, nano
OPTIONS = dict(num_processes=2, auto_lr=False, verbose=False, timeout=60)
args = argparse.Namespace(lr=0.1, epochs=2)
error = lambda output, target: (output - target).square().mean()

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.linear.weight, 0.5)
        torch.nn.init.zeros_(self.linear.bias)
    def forward(self, x):
        return self.linear(x)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, row):
        return torch.tensor([row % 3, row % 5, 1.0]), torch.tensor([row % 7 / 7])

def parts(batch_size):
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    return model, optimizer, torch.utils.data.DataLoader(Rows(), batch_size)

def ranks():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

def everywhere(value):
    gathered = [None] * ranks()
    torch.distributed.all_gather_object(gathered, value)
    return gathered

def fit(model, optimizer, loader):
    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            error(model(x), y).backward()
            optimizer.step()
    return ranks()

def weights(model):
    return [round(value, 6) for parameter in model.parameters() for value in parameter.flatten().tolist()]

def alone():
    ours = parts(8)
    fit(*ours)
    return weights(ours[0])

"""


def environment(**variables):
    """Return this process's environment with changed values; None removes a variable."""
    everything = {**os.environ, "PYTHONPATH": str(Path(nano_loop.__file__).parents[1]), **variables}
    return {name: str(value) for name, value in everything.items() if value is not None}


def run_python(*arguments, folder, stdin=None, **variables):
    """Run Python in `folder` until it exits, and return the JSON that it printed last, and its standard error."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment(**variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *map(str, options)]


def agents(*options):
    """Return the command lines of torchrun for two hosts, with one process on each."""
    address = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    return [
        torchrun("--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, *address, *options) for rank in range(2)
    ]


def run_together(commands, environments, folder):
    """Run programs concurrently until they exit, and return the exit code, output and errors of each."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*map(str, command)],
                    cwd=folder,
                    env=variables,
                    stdout=stack.enter_context((folder / f"out {number}").open("w")),
                    stderr=subprocess.STDOUT,
                )
            )
            for number, (command, variables) in enumerate(zip(commands, environments, strict=True))
        ]
        for process in processes:
            stack.callback(process.kill)
        codes = [process.wait(timeout=110) for process in processes]
    return [(code, (folder / f"out {number}").read_text()) for number, code in enumerate(codes)]


# In a separate process, because it leaves an event loop behind. Prints the streams by name, the result and the error
# of each cell.
RUN_CELLS = """
import json, sys
import nbformat
from nbclient import NotebookClient

def shown_by(cell):
    shown = {}
    for output in cell.outputs:
        if output.output_type == "stream":
            shown[output.name] = shown.get(output.name, "") + output.text
        elif output.output_type == "error":
            shown["error"] = output.ename
        else:
            shown["result"] = output.data["text/plain"]
    return shown

cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([shown_by(cell) for cell in notebook.cells]))
"""


def run_cells(cells, folder):
    shown, _ = run_python("-c", RUN_CELLS, folder=folder, stdin=json.dumps(cells), JUPYTER_PLATFORM_DIRS=1)
    return shown
