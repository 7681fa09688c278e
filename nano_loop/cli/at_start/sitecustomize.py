"""The module that Python imports before a script, where `nano-loop run` or `nano-loop env --install` says so.

It imports nothing of nano_loop until the script makes its first optimizer or runs its first backward, which it may
never do. Before the script begins, `sys.path` is what the script has under ``python``.
"""

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Which of them a script imports that uses nano_loop by itself.
_EXPLICIT = ("nano_loop.api.decorator", "nano_loop.api.torch_nano")
#: The commands that start a script and measure what it trains.
_COMMANDS = ("profile", "tune")


class _Start:
    """What is kept from the start of this process to its end."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.line = self.wanted = ""

    def begin(self) -> None:
        folder = os.path.dirname(__file__)
        self.wanted = os.environ.get("NANO_LOOP_INSTALL", "")
        installs = self.wanted.lower() in ("1", "true", "yes", "on", *_COMMANDS) or self.wanted.startswith("{")
        note = os.environ.pop("_NANO_LOOP_AT_START", None)  # see `nano_loop.cli.at_start`
        if note is not None:
            self.line, *path = note.split("\n", 1)
            if not installs and path:
                os.environ["PYTHONPATH"] = path[0]
            elif not installs:
                del os.environ["PYTHONPATH"]
        sys.path[:] = [path for path in sys.path if path != folder]
        sys.path_importer_cache.pop(folder, None)
        if installs:
            sys.meta_path.insert(0, _Finder(self))
        if installs or note is not None:
            atexit.register(self.end)  # the first to be registered is the last to be called

    def end(self) -> None:
        """Print a line, unless nano_loop may have been used here or in a child, or the script has failed."""
        times = os.times()
        is_alone = times.children_user + times.children_system == 0
        if is_alone and "nano_loop.runtime.run" not in sys.modules and not hasattr(sys, "last_type"):
            self.say(self.line)

    def say(self, line: str) -> None:
        """Print a line, unless this is a forked process."""
        if line and os.getpid() == self.process and sys.__stderr__ is not None:
            try:
                print(line, file=sys.__stderr__)
            except (OSError, ValueError):  # it is closed
                return

    def install(self) -> None:
        is_explicit = "nano_loop" in sys.modules
        folder = __file__
        for _ in range(4):  # the one that has the package, which this script may not have in its path
            folder = os.path.dirname(folder)
        sys.path.append(folder)
        try:
            import nano_loop

            if self.wanted in _COMMANDS:
                from nano_loop.cli.tuning.in_script import begin_requested

                begin_requested(nano_loop.install, nano_loop.uninstall, is_explicit=is_explicit)
            elif self.wanted.startswith("{"):  # from a process that has called `install`
                import json

                nano_loop.install(**json.loads(self.wanted))
            else:
                nano_loop.install()
        except Exception as error:  # the script goes on without it
            self.line = ""
            if not any(module in sys.modules for module in _EXPLICIT):  # else the options are for its own runs
                self.say(f"nano-loop: {error}")
        finally:
            if sys.path[-1:] == [folder]:
                sys.path.pop()


class _Finder:
    """Notices the import of torch's optimizers, which follows that of its autograd."""

    def __init__(self, start: _Start) -> None:
        self.start = start
        self.has_noticed = False  # the program may keep this finder, for example inside another one

    def find_spec(self, name: str, path: "Any", target: "Any" = None) -> "Any":
        if name != "torch.optim.optimizer" or self.has_noticed:
            return None
        self.has_noticed = True
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        from importlib.util import find_spec

        spec: Any = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: "Any") -> None:
            execute(module)
            _leave_threads_to_children()
            _install_at_first([(module.Optimizer, "__init__"), (sys.modules["torch.autograd"], "backward")], self.start)

        spec.loader.exec_module = exec_module
        return spec


def _leave_threads_to_children() -> None:
    """Take away the number of threads that `nano-loop env` has set, now that OpenMP has read it.

    joblib and others divide the cores among their workers only where the variable is not set.
    """
    import base64
    import json

    try:
        note = json.loads(base64.urlsafe_b64decode(os.environ.get("NANO_LOOP_ENV_BEFORE", "")))
        exported = note["after"]["OMP_NUM_THREADS"]
    except (ValueError, KeyError, TypeError, RecursionError):  # there is none, or it is damaged
        return
    if exported == os.environ.get("OMP_NUM_THREADS"):
        os.environ.pop("OMP_NUM_THREADS", None)


def _install_at_first(functions: "list[tuple[Any, str]]", start: _Start) -> None:
    """Install nano_loop at the first call of one of these functions, which are attributes of classes and modules."""
    import functools
    import threading

    lock = threading.Lock()
    waiting: list[tuple[Any, str, Any, Any]] = []

    def waiting_for(owner: "Any", name: str, original: "Any") -> "Any":
        @functools.wraps(original)
        def call(*args: "Any", **kwargs: "Any") -> "Any":
            with lock:
                is_first = bool(waiting) and getattr(owner, name) is call  # else an explicit run has replaced it
                if is_first:
                    for other, attribute, replacement, before in waiting:
                        if getattr(other, attribute) is replacement:
                            setattr(other, attribute, before)
                    waiting.clear()
                    start.install()
            return (getattr(owner, name) if is_first else original)(*args, **kwargs)

        return call

    for owner, name in functions:
        original = getattr(owner, name)
        replacement = waiting_for(owner, name, original)
        waiting.append((owner, name, replacement, original))
        setattr(owner, name, replacement)


if __name__ == "sitecustomize":
    _Start().begin()
    # The one that this one hides is imported; that there is none is the ImportError that Python expects then.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
