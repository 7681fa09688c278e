"""Compiles the C kernels for all levels of a machine, for wheels and editable installations. `setup.py` calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SECONDS = 600.0  # time limit of the compiler per file


def compile_levels(compiler: Any, folder: Path) -> list[Path]:
    """Compile each file for each level of a machine into a folder, in parallel, and return the libraries.

    The machine is this one, unless ``_PYTHON_HOST_PLATFORM`` names another, for which ``CC`` must compile. Files in the
    folder or in the package are not recompiled. Libraries of other sources are removed.

    Parameters
    ----------
    compiler : module
        The module ``nano_loop/kernels/compiler.py``.
    folder : pathlib.Path
        The folder of the libraries.

    Raises
    ------
    UnavailableError
        If the compiler is not gcc for Linux on x86-64 or ARM, or does not support all levels.
    """
    levels = [level for level in compiler.LEVELS if sysconfig.get_platform() == f"linux-{level.machine}"]
    if not levels:
        raise compiler.UnavailableError("libraries are built for Linux on x86-64 and ARM only")
    files = {
        compiler.library_name(source.stem, level): (source.stem, level)
        for level in levels
        for source in sorted(compiler.SOURCES.glob("*.c"))
    }
    if not all((folder / file).exists() or compiler.packaged(file).exists() for file in files):
        _refuse_clang(compiler)
    folder.mkdir(parents=True, exist_ok=True)
    for library in folder.iterdir():
        if library.name not in files:
            library.unlink()

    def provide(file: str) -> Path:
        library, unfinished = folder / file, folder / f"{file}.unfinished"
        if not library.exists():
            if compiler.packaged(file).exists():
                shutil.copyfile(compiler.packaged(file), unfinished)
            else:
                with tempfile.TemporaryDirectory() as making:
                    compiler.compile_library(*files[file], Path(making, file), _SECONDS)
                    shutil.copyfile(Path(making, file), unfinished)
            os.replace(unfinished, library)
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(provide, files))


def _refuse_clang(compiler: Any) -> None:
    command = compiler.compiler_command()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", check=False)
    if "clang" in version.stdout:
        raise compiler.UnavailableError(f"{command[0]} is clang, whose OpenMP is not torch's; use gcc")
