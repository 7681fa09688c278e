"""After a signal to `nano-loop tune` or `profile`, no process and no file is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marked import MARK, processes_with

from cli.loops import looped

#: Writes a file when its loop begins, and trains for longer than a command measures.
SCRIPT = looped("(open('begun', 'w').close() or time.sleep(2.0) or torch.rand(4, 8) for _ in iter(int, 1))")
#: Processes of a command: its own, and the script's.
EXPECTED = 2


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a command on a script, waits for its processes, and returns both."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()

    def start(command):
        own = {MARK: str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
        process = subprocess.Popen(
            [sys.executable, "-m", "nano_loop", command, "train.py"],
            env={**os.environ, **own},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert wait_until(lambda: len(processes_with(str(tmp_path))) >= EXPECTED, 60), "it never came to work"
        assert wait_until((tmp_path / "begun").exists, 60), "its loop never began"
        time.sleep(0.5)
        return process, processes_with(str(tmp_path))

    yield start
    for each in processes_with(str(tmp_path)):
        each.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
@pytest.mark.parametrize("command", ["tune", "profile"])
def test_signal_ends_everything(started, tmp_path, command, number):
    process, all_of_it = started(command)
    process.send_signal(number)
    out, err = process.communicate(timeout=15)
    by_term = 143 if command == "profile" else -signal.SIGTERM  # the system kills the script of tune
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: by_term, signal.SIGKILL: -9}[number]
    assert wait_until(lambda: not processes_with(str(tmp_path)), 10), processes_with(str(tmp_path))
    assert not out
    traceback = "Traceback" in err
    assert traceback == (command == "profile" and number == signal.SIGINT), err  # the loop's, as under Python
    assert not [path for each in all_of_it for path in Path("/dev/shm").glob(f"nano_loop-{each.pid}-*")]
    assert {each.name.partition("_")[0] for each in (tmp_path / "tmp").iterdir()} <= {"torchinductor"}  # torch's own
    assert not [*tmp_path.glob("cache/**/*.json")]  # an unfinished search saves nothing
