"""Describe the environment of a run: the machine, the versions and the commit."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fresh import ROOT
from benchmarks.systems import python_of
from nano_loop.cpu import read_machine

PACKAGES = (
    "nano-loop",
    "torch",
    "lightning-fabric",
    "transformers",
    "accelerate",
    "numpy",
    "pillow",
    "intel-extension-for-pytorch",
)
# Another Python reports its own versions: it may not have the packages imported here.
_ASKED = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def surroundings() -> dict[str, Any]:
    """Return the environment, with the time and the command line, for JSON."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": (_git("status", "--porcelain", "--untracked-files=no") or "").splitlines(),
        "versions": _versions(sys.executable),
        "versions_with_ipex": _versions(python_of("ipex")),
        "platform": platform.platform(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "machine": read_machine().as_dict(),
    }


def heading(found: dict[str, Any]) -> str:
    """Summarize the environment in one line."""
    machine, versions = found["machine"], found["versions"]
    bf16 = "with" if machine["has_fast_bf16"] else "without"
    return f"{machine['name']}, {machine['num_threads']} cores, {bf16} bf16 instructions, torch {versions['torch']}"


def _versions(python: str) -> dict[str, str | None] | None:
    """Return the versions of a Python and its packages, or None if there is no such Python."""
    if not Path(python).exists():
        return None
    done = subprocess.run([python, "-c", _ASKED, *PACKAGES], capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def _git(*arguments: str) -> str | None:
    """Return git's output, or None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()
