"""The answers of torch, in a separate process: what it was built with and which libraries it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from nano_loop.errors import NanoError, error_message

_SECONDS = 300
# A separate process, since the import takes seconds, may abort, and loads libraries that stay. torch may print. Of the
# working folder, which -c puts first on the path, a torch.py would be taken for torch.
_PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import json, re, torch
found = re.search(r"(?:oneDNN|MKL-DNN) v([0-9.]+)", torch.__config__.show())
print(json.dumps({
    "version": torch.__version__,
    "onednn": found[1] if found else None,
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "num_threads": torch.get_num_threads(),
    "maps": open("/proc/self/maps").read() if @MAPS@ else "",
}))
"""


def inspect_torch() -> dict[str, Any]:
    """Return what a process that has imported torch says.

    Raises
    ------
    NanoError
        If torch cannot be imported.
    """
    program = _PROGRAM.replace("@MAPS@", repr(sys.platform.startswith("linux")))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(f"it took more than {_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _failed(last)
    content: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return content


def _failed(why: str) -> NanoError:
    return NanoError(
        error_message("--torch", f"torch cannot be imported ({why})", "Leave --torch out, or repair torch")
    )
