"""What a run's figures depend on: the machine, the versions and the commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from datetime import datetime, timezone
from typing import Any

import psutil

from benchmarks.fresh import ROOT
from nano_loop.cpu import read_machine

PACKAGES = ("nano-loop", "torch", "lightning-fabric", "transformers", "accelerate", "numpy", "pillow")


def surroundings() -> dict[str, Any]:
    """Return them, with the time and the command line, for JSON."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "machine": read_machine().as_dict(),
    }


def heading(found: dict[str, Any]) -> str:
    """Return what a person wants to know of them, in one line."""
    machine, versions = found["machine"], found["versions"]
    bf16 = "with" if machine["has_fast_bf16"] else "without"
    return f"{machine['name']}, {machine['num_threads']} cores, {bf16} bf16 instructions, torch {versions['torch']}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return what git says, or None without git or outside of a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()
