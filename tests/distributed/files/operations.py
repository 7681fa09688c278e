"""File operations in the working folder, as any program does them; their results can be compared."""

import contextlib
import glob
import os
import shutil
import stat
import tempfile
from pathlib import Path

NAMES = ("a", "b", "c", "link", "d", "d/a", "d/b", "d/e", "d/e/a", "link/a", "f", "f/a", "d/../a", "./b", "d/e/../a")


def fill(folder):
    for name in ("d/e", "f"):
        (folder / name).mkdir(parents=True)
    for name in ("a", "b", "d/a", "d/e/a", "f/a"):
        (folder / name).write_text(f"{name} before")
    (folder / "link").symlink_to("d")
    (folder / "d/b").symlink_to("../a")


def opened(mode):
    def operate(path):
        with open(path, mode) as file:
            if mode in ("r", "rb"):
                return str(file.read())
            file.write("new" if "b" not in mode else b"new")
            if "+" in mode:
                file.seek(0)
                return str(file.read())
            return file.name

    return operate


def descriptor(flags):
    def operate(path):
        number = os.open(path, flags)
        try:
            if flags & (os.O_WRONLY | os.O_RDWR):
                os.write(number, b"!!")
            elif not stat.S_ISDIR(os.fstat(number).st_mode):
                return os.read(number, 99).decode()
        finally:
            os.close(number)

    return operate


def described(path):
    found = os.lstat(path)
    # A real folder keeps its mode, because it belongs to rank 0.
    return (oct(found.st_mode), found.st_size) if not stat.S_ISDIR(found.st_mode) else "folder"


def scanned(path):
    with os.scandir(path) as entries:
        return sorted(
            (each.name, each.path, each.is_dir(), each.is_file(), each.is_symlink(), each.is_dir(follow_symlinks=False))
            for each in entries
        )


def walked(path):
    return sorted((folder, sorted(folders), sorted(files)) for folder, folders, files in os.walk(path))


def temporary_replacing(path):
    with contextlib.suppress(FileExistsError), open(f"{path}.tmp", "x") as file:
        file.write("complete")
    os.replace(f"{path}.tmp", path)


def inside(path):
    before = os.getcwd()
    os.chdir(path)
    try:
        Path("made inside").write_text("x")
        return os.getcwd(), sorted(os.listdir()), os.path.abspath("z"), sorted(os.listdir(b"."))
    finally:
        os.chdir(before)


def temporary_in(path):
    with tempfile.TemporaryDirectory(dir=path) as folder, tempfile.NamedTemporaryFile(dir=path) as file:
        Path(folder, "x").write_text("x")
        file.write(b"y")
        file.flush()
        with tempfile.TemporaryFile(dir=path) as nameless:
            nameless.write(b"z")
        return os.listdir(folder), Path(file.name).read_text(), len(os.listdir(path))


def raw(path):
    with open(path, "r+b", 0) as file:
        file.write(b"raw")


def on_one():
    return {
        **{mode: opened(mode) for mode in ("r", "w", "a", "x", "r+", "w+", "rb", "wb", "ab", "xb", "a+")},
        "append": descriptor(os.O_WRONLY | os.O_APPEND),
        "create": descriptor(os.O_WRONLY | os.O_CREAT),
        "read": descriptor(os.O_RDONLY),
        "truncating": descriptor(os.O_WRONLY | os.O_TRUNC),
        "exists": os.path.exists,
        "lexists": os.path.lexists,
        "isdir": os.path.isdir,
        "isfile": os.path.isfile,
        "islink": os.path.islink,
        "size": lambda path: os.path.getsize(path) if not os.path.isdir(path) else None,
        "described": described,
        "listdir": lambda path: sorted(os.listdir(path)),
        "scandir": scanned,
        "walk": walked,
        "glob": lambda path: sorted(glob.glob(f"{path}/**", recursive=True)),
        "rglob": lambda path: sorted(map(str, Path(path).rglob("*"))),
        "realpath": os.path.realpath,
        "readlink": os.readlink,
        "remove": os.remove,
        "unlink": lambda path: Path(path).unlink(missing_ok=True),
        "rmdir": os.rmdir,
        "mkdir": os.mkdir,
        "makedirs": os.makedirs,
        "makedirs, again": lambda path: os.makedirs(path, exist_ok=True),
        "rmtree": shutil.rmtree,
        "truncate": lambda path: os.truncate(path, 2),
        "chmod": lambda path: os.chmod(path, 0o700),
        "utime": lambda path: (os.utime(path, (5, 6)), os.path.isdir(path) or os.stat(path).st_mtime),
        "touch": lambda path: Path(path).touch(),
        "write_text": lambda path: Path(path).write_text("text"),
        "access": lambda path: os.access(path, os.R_OK),
        "atomically": temporary_replacing,
        "inside": inside,
        "temporary in": temporary_in,
        "raw": raw,
        "disk": lambda path: shutil.disk_usage(path).total > 0,
    }


def on_two():
    return {
        "rename": os.rename,
        "replace": os.replace,
        "link": os.link,
        "symlink": lambda source, target: os.symlink(os.path.basename(source), target),
        "copy": shutil.copy,
        "copy2": shutil.copy2,
        "copyfile": shutil.copyfile,
        "copytree": shutil.copytree,
        "move": shutil.move,
        "samefile": os.path.samefile,
    }


def given(operate, *paths):
    """Return the result of an operation, or the kind of its error and the path in it."""
    try:
        return repr(operate(*paths))
    except (OSError, shutil.Error, RecursionError) as error:
        return type(error).__name__


def contents():
    found = []
    for folder, folders, files in os.walk("."):
        for name in sorted((*folders, *files)):
            path = os.path.join(folder, name)
            content = None
            with contextlib.suppress(OSError), open(path) as file:
                content = file.read()
            found.append((path, described(path), content))
    return sorted(found)
