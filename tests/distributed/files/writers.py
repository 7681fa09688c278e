"""The ways in which training loops write files: each writes to the working folder and returns what it reads back."""

import bz2
import contextlib
import csv
import glob
import gzip
import io
import json
import logging
import lzma
import mmap
import os
import shutil
import sqlite3
import tarfile
import tempfile
import zipfile
from logging.handlers import RotatingFileHandler
from os import replace as replace_by_name
from pathlib import Path

import matplotlib.figure
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from torch import save as save_by_name


def saved_by_path(value):
    for epoch in range(2):
        torch.save((value, epoch), "model.pt")
    torch.save(value, Path("path.pt"))
    torch.save(value, os.path.abspath("modèle.pt"))
    torch.save(torch.full((3,), value), "legacy.pt", _use_new_zipfile_serialization=False)
    mapped = torch.load("legacy.pt").tolist()
    return torch.load("model.pt"), torch.load("path.pt"), torch.load("modèle.pt"), mapped


def mapped(value):
    torch.save({"weight": torch.full((3,), value)}, "model.pt")
    return torch.load("model.pt", mmap=True)["weight"].tolist()


def saved_by_name(value):
    save_by_name(value, "new.pt")
    replace_by_name("new.pt", "model.pt")
    return torch.load("model.pt")


def best_copied(value):
    for copy in (shutil.copyfile, shutil.copy, shutil.copy2, os.link):
        torch.save(value, "model.pt")
        copy("model.pt", f"best {copy.__name__}.pt")
    shutil.move("model.pt", "last.pt")
    return [torch.load(each) for each in sorted(glob.glob("*.pt"))]


def saved_atomically(value):
    for _ in range(2):
        torch.save(value, "model.pt.new")
        os.replace("model.pt.new", "model.pt")
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        torch.save(value, file)
    os.rename(file.name, "renamed.pt")
    with tempfile.NamedTemporaryFile(dir=".") as file:
        torch.save(value, file)
    with tempfile.NamedTemporaryFile(delete=False) as file:
        torch.save(value, file)
    shutil.move(file.name, "moved.pt")
    return [torch.load(each) for each in sorted(os.listdir())]


def last_three_kept(value):
    Path("checkpoints").mkdir(exist_ok=True)
    for epoch in range(6):
        torch.save((value, epoch), f"checkpoints/{epoch}.pt")
        for old in sorted(Path("checkpoints").glob("*.pt"), key=lambda path: int(path.stem))[:-3]:
            old.unlink()
    return [torch.load(each) for each in sorted(glob.glob("checkpoints/*.pt"))]


def folder_renamed_when_complete(value):
    for step in range(3):
        os.makedirs("tmp-checkpoint")
        torch.save(value, "tmp-checkpoint/model.pt")
        os.rename("tmp-checkpoint", f"checkpoint-{step}")
        if step:
            shutil.rmtree(f"checkpoint-{step - 1}")
    return sorted(map(str, Path().rglob("*")))


def started_anew(value):
    """Start in a folder that an earlier run has left."""
    if os.path.exists("before"):
        shutil.rmtree("before")
    os.mkdir("before")
    Path("before/model").write_text(str(value))
    os.remove("old")
    return sorted(map(str, Path().rglob("*"))), Path("before/model").read_text()


def latest_linked(value):
    for epoch in range(2):
        os.makedirs(f"run/{epoch}", exist_ok=True)
        Path(f"run/{epoch}/model").write_text(f"{value} {epoch}")
        if os.path.islink("run/latest"):
            os.unlink("run/latest")
        os.symlink(str(epoch), "run/latest")
    Path("run/latest/more").write_text(str(value))
    return Path("run/latest/model").read_text(), os.readlink("run/latest"), os.listdir("run/1").sort()


def traced(value):
    with torch.profiler.profile(acc_events=True) as profile:
        torch.ones(2) + value
    profile.export_chrome_trace("trace.json")
    is_read = "traceEvents" in json.loads(Path("trace.json").read_text())
    os.remove("trace.json")  # differs between runs
    return is_read


def arrays(value):
    array = np.full(4, value)
    np.save("array.npy", array)
    np.savez("arrays.npz", array=array)
    np.savetxt("array.txt", array)
    array.tofile("array.raw")
    array.dump("array.pickle")
    memory = np.memmap("array.map", dtype=int, mode="w+", shape=4)
    memory[:] = array
    memory.flush()
    again = np.memmap("array.map", dtype=int, mode="r+")
    again[0] = 7
    again.flush()
    read = np.load("array.npy"), np.load("arrays.npz")["array"], np.loadtxt("array.txt"), np.fromfile("array.raw", int)
    return [each.tolist() for each in (*read, np.load("array.npy", mmap_mode="r"), np.memmap("array.map", dtype=int))]


def logs(value):
    for row in range(3):
        with open("log.csv", "a", newline="") as file:
            csv.writer(file).writerow([row, value])
    handlers = [logging.FileHandler("train.log"), RotatingFileHandler("rotated.log", maxBytes=20, backupCount=1)]
    for handler in handlers:
        for row in range(3):
            handler.emit(logging.LogRecord("train", 20, "", 0, "row %s of %s", (row, value), None))
        handler.close()
    descriptor = os.open("opened", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"%d" % value)
    os.close(descriptor)
    with open("before.log", "a") as file:  # an existing file
        file.write(f"{value} after\n")
    with open("before.txt", "r+") as file:
        file.write(str(value))
    return {path.name: path.read_text() for path in sorted(Path().iterdir())}


def compressed(value):
    for package, name in ((gzip, "gz"), (bz2, "bz2"), (lzma, "xz")):
        with package.open(f"text.{name}", "wt") if package is not gzip else fixed_gzip() as file:
            file.write(str(value))
    with zipfile.ZipFile("files.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("text"), str(value))
    with tarfile.open("files.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("text"), io.BytesIO())
    with gzip.open("text.gz", "rt") as zipped, bz2.open("text.bz2", "rt") as squeezed, lzma.open("text.xz") as packed:
        return zipped.read(), squeezed.read(), packed.read(), zipfile.ZipFile("files.zip").read("text")


def fixed_gzip():
    return io.TextIOWrapper(gzip.GzipFile("text.gz", "wb", mtime=0))


def images(value):
    Image.new("L", (2, 2), value).save("image.png")
    matplotlib.figure.Figure(figsize=(1, 1), facecolor=(value, 0, 0)).savefig("figure.png")
    with Image.open("image.png") as image, Image.open("figure.png") as figure:
        return image.getpixel((0, 0)), figure.size


def descriptors(value):
    with os.fdopen(os.open("opened", os.O_RDWR | os.O_CREAT), "w") as file:
        file.write(str(value))
    with open("before.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 65 + value
    return Path("opened").read_text(), Path("before.bin").read_bytes()


def by_fsspec(value):
    files = LocalFileSystem()
    files.makedirs("a/b")
    with files.open("a/b/file", "w") as file:
        file.write(str(value))
    files.copy("a/b/file", "copy")
    files.mv("a/b/file", "moved")
    files.rm("a", recursive=True)
    return sorted(os.path.basename(path) for path in files.ls(".")), files.cat("moved"), files.exists("a")


def database_read(value):
    with contextlib.closing(sqlite3.connect("before.db")) as connection:
        return connection.execute("select name from runs").fetchall()


def folders(value):
    os.makedirs("a/b/c")
    Path("a/b/c/file").write_text(str(value))
    shutil.copytree("a/b/c", "copy")
    os.chdir("a/b")
    Path("relative").write_text(str(value))
    inside = os.getcwd(), sorted(os.listdir()), os.path.exists("c/file")
    os.chdir("../..")
    os.removedirs("empty/inside")
    found = [(entry.name, entry.is_dir(), entry.stat().st_size > 0) for entry in os.scandir("a/b")]
    walked = [(folder, sorted(folders), sorted(files)) for folder, folders, files in os.walk(".")]
    return inside, sorted(found), sorted(walked)


# In these, a worker that lags behind appends to rank 0's content.
ADDING = ("logs",)
WRITERS = {
    each.__name__: each
    for each in (
        *(saved_by_path, mapped, saved_by_name, best_copied, saved_atomically, last_three_kept),
        *(traced, descriptors, by_fsspec, database_read),
        *(folder_renamed_when_complete, started_anew, latest_linked, arrays, logs),
        *(compressed, images, folders),
    )
}


def prepare(folder):
    """Make a folder for each writer, with files of an earlier run."""
    for name in WRITERS:
        (folder / name).mkdir(parents=True)
    before = folder / "started_anew"
    (before / "before/deep").mkdir(parents=True)
    for name in ("before/deep/model", "before/model", "old"):
        (before / name).write_text("before")
    for name in ("before.log", "before.txt"):
        (folder / "logs" / name).write_text("before\n")
    (folder / "folders/empty/inside").mkdir(parents=True)
    (folder / "descriptors/before.bin").write_bytes(b"before")
    with contextlib.closing(sqlite3.connect(folder / "database_read/before.db")) as connection, connection:
        connection.execute("create table runs (name)")
        connection.execute("insert into runs values ('first')")


def written(name, folder, value):
    """Run one writer in its folder, and return the values it reads back, or its error."""
    before = os.getcwd()
    os.chdir(folder / name)
    try:
        return repr(WRITERS[name](value))
    except Exception as error:  # errors are results here
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
