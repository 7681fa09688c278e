"""A program that changes files as a worker does: ``python redirected.py FOLDER CHECK ...`` prints the results.

Each check runs in a folder of its own name within FOLDER, which must be unchanged afterwards.
"""

import ctypes
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nano_loop.distributed.files import private_files

STRICT, ALL_IS_RANK_0S = 1 << 62, 0  # the start of the run: after or before all of the caller's files
CAPTURED = {"replace": os.replace, "libc": ctypes.CDLL(None, use_errno=True)}  # saved before anything is redirected


def outcome(do, *arguments, **options):
    try:
        return do(*arguments, **options)
    except OSError as error:
        return type(error).__name__


# A thread that starts before the process gives up access to the caller's files; it acts as rank 0.
RANK_0 = ThreadPoolExecutor(1)


def shell(command):
    """Change the caller's files in another process, as rank 0 does."""
    RANK_0.submit(subprocess.run, ["sh", "-c", command], check=True).result()


def functions():
    class Reader:
        opened, removed = open, os.remove

    Path("new").touch()
    with Reader().opened("new") as file, open("new", "rb", 0) as raw:
        return {
            "by name": [pickle.loads(pickle.dumps(each)) is each for each in (open, os.replace, shutil.rmtree)],
            "named": [pickle.dumps(each, 0).decode().split()[:2] for each in (open, os.replace, os.stat)],
            "names": [file.name, raw.name],
            "sets": [os.stat in os.supports_dir_fd, os.scandir in os.supports_fd, os.open in os.supports_dir_fd],
            "removed": outcome(Reader().removed, "nowhere"),
        }


def not_redirected():
    reading = os.open("before pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open("before pipe", "w") as pipe:
        pipe.write("through")
    with open(os.devnull, "w") as nothing:
        nothing.write("x")
    full = os.open("/dev/full", os.O_WRONLY)
    with open(f"/proc/self/fd/{sys.stderr.fileno()}", "a") as same:
        same.write("to standard error")
    Path(os.environ["XDG_CACHE_HOME"], "kept").write_text("x")
    Path("__pycache__").mkdir(exist_ok=True)
    return {"pipe": os.read(reading, 9).decode(), "full": outcome(os.write, full, b"x")}


def temporary():
    with tempfile.NamedTemporaryFile("w+") as file, tempfile.TemporaryDirectory() as folder:
        file.write("x")
        file.flush()
        read = subprocess.run(["cat", file.name], check=True, capture_output=True, text=True).stdout
        Path(folder, "inside").write_text("x")
        made = subprocess.run("mktemp", check=True, capture_output=True, text=True).stdout.strip()
        names = [file.name, folder, tempfile.mkdtemp(prefix=b"bytes").decode(), made]
    return {"names": names, "default": tempfile.gettempdir(), "read": read, "left": [*map(os.path.exists, names)]}


def _child(receiving, sending):
    Path("by child").write_text("1")
    os.remove("before")
    sending.send(None)
    receiving.recv()
    sending.send([Path("by parent").read_text(), sorted(os.listdir())])


def forked():
    Path("earlier").write_text("1")
    context = multiprocessing.get_context("fork")
    (receiving, to_child), (from_child, sending) = context.Pipe(False), context.Pipe(False)
    child = context.Process(target=_child, args=(receiving, sending))
    child.start()
    from_child.recv()
    found = [Path("by child").read_text(), os.path.exists("before"), sorted(os.listdir())]
    Path("by parent").write_text("2")
    to_child.send(None)
    found += from_child.recv()
    child.join()
    return found


def unseen():
    Path("here").touch()
    shell("echo 1 > theirs")
    errors = []
    for change in (
        lambda: CAPTURED["replace"]("theirs", "moved"),
        lambda: CAPTURED["libc"].rename(b"theirs", b"moved"),
    ):
        try:
            errors.append(change())
        except PermissionError as error:
            errors.append(type(error).__name__)
    shell("rm theirs")
    return errors


def behind():
    """An operation that rank 0 has already done in this run is not an error in the worker that repeats it."""
    done = {
        "mkdir": outcome(os.mkdir, "d"),
        "makedirs": outcome(os.makedirs, "d/new/e", exist_ok=True),
        "exclusive": outcome(lambda: open("before", "x").close()),
        "remove": outcome(os.remove, "removed"),
        "rmdir": outcome(os.rmdir, "removed"),
        "rmtree": outcome(shutil.rmtree, "removed"),
        "remove in a folder": outcome(os.remove, "removed/too"),
        "replace": outcome(os.replace, "moved before", "b"),
        "replace, to nowhere": outcome(os.replace, "moved", "nowhere/at all"),
        "symlink": outcome(os.symlink, "before", "before"),
    }
    shutil.rmtree("d/new")
    return done, outcome(os.rmdir, "d"), sorted(os.listdir())


def removed_and_made_again():
    os.remove("before")
    shutil.rmtree("f")
    gone = sorted(os.listdir()), outcome(os.listdir, "f")
    shell("rm -r before f; mkdir f; echo again > before; echo again > f/new")  # as rank 0 does later
    return gone, Path("before").read_text(), sorted(os.listdir()), os.listdir("f")


def safetensors():
    import torch
    from safetensors.torch import load_file, safe_open, save_file, save_model

    save_file({"weight": torch.full((2,), 3.0)}, "model.safetensors", metadata={"a": "b"})
    save_model(torch.nn.Linear(1, 1), "before")
    with safe_open("model.safetensors", framework="pt") as file:
        opened = file.get_tensor("weight").tolist()
    return (
        load_file("model.safetensors")["weight"].tolist(),
        opened,
        sorted(load_file("before")),
    )


def tensorboard():
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("runs") as writer:
        for step in range(3):
            writer.add_scalar("loss", 3.0 - step, step)
            writer.flush()
        writer.add_graph(torch.nn.Linear(1, 1), torch.ones(1, 1))
    read = EventAccumulator("runs").Reload()
    return [each.value for each in read.Scalars("loss")], len(os.listdir("runs")), len(read.Graph().node) > 0


def main(folder, *checks):
    RANK_0.submit(os.getpid).result()
    run = Path(f"{folder}.run")
    run.mkdir()
    os.mkdir(f"{folder}.private")
    (run / "files").symlink_to(f"{folder}.private")
    private_files.redirect_files(run, 1)
    private_files.guard_files()
    overlay = private_files._overlay
    found = {}
    for name in checks:
        overlay.since = ALL_IS_RANK_0S if name == "behind" else STRICT
        os.chdir(f"{folder}/{name}")
        found[name] = globals()[name]()
    print(json.dumps(found))


if __name__ == "__main__":
    main(os.path.realpath(sys.argv[1]), *sys.argv[2:])
