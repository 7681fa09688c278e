"""The module that Python imports before a script under `nano-loop run` or after `nano-loop env --install`.

It does not import nano_loop until the script creates its first optimizer or runs its first backward, which may
never happen. Before the script starts, `sys.path` is restored to its value under ``python``.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The modules that a script imports if it uses nano_loop explicitly.
_EXPLICIT = ("nano_loop.api.decorator", "nano_loop.api.torch_nano")
#: The commands that start a script and measure its training.
_COMMANDS = ("profile", "tune")


_PROCESS = os.getpid()
#: What to install: nothing, the name of a command, the default, or options as JSON.
_WANTED = os.environ.get("NANO_LOOP_INSTALL", "")


def _begin() -> None:
    folder = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != folder]
    sys.path_importer_cache.pop(folder, None)
    if _WANTED.lower() in ("1", "true", "yes", "on", *_COMMANDS) or _WANTED.startswith("{"):
        sys.meta_path.insert(0, _Finder())


def _install() -> None:
    is_explicit = "nano_loop" in sys.modules
    folder = __file__
    for _ in range(4):  # up to the folder of the package, which may not be in the script's path
        folder = os.path.dirname(folder)
    sys.path.append(folder)
    try:
        import nano_loop

        if _WANTED in _COMMANDS:
            from nano_loop.cli.tuning.in_script import begin_requested

            begin_requested(nano_loop.install, nano_loop.uninstall, is_explicit=is_explicit)
        elif _WANTED.startswith("{"):  # from a process that has called `install`
            import json

            nano_loop.install(**json.loads(_WANTED))
        else:
            nano_loop.install()
    except Exception as error:  # the script runs without it
        is_forked, stream = os.getpid() != _PROCESS, sys.__stderr__
        if is_forked or stream is None or any(module in sys.modules for module in _EXPLICIT):
            return  # in the last case, the options apply to the script's own runs only
        import contextlib  # here, since the script may never import it

        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            print(f"nano-loop: {error}", file=stream)
    finally:
        if sys.path[-1:] == [folder]:
            sys.path.pop()


class _Finder:
    """A finder that notices the import of torch's optimizers, which follows the import of its autograd."""

    def __init__(self) -> None:
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
            _install_at_first([(module.Optimizer, "__init__"), (sys.modules["torch.autograd"], "backward")])

        spec.loader.exec_module = exec_module
        return spec


def _leave_threads_to_children() -> None:
    """Unset `nano-loop env`'s number of threads, which OpenMP has read: joblib divides the cores if it is not set."""
    import base64
    import json

    try:
        note = json.loads(base64.urlsafe_b64decode(os.environ.get("NANO_LOOP_ENV_BEFORE", "")))
        exported = note["after"]["OMP_NUM_THREADS"]
    except (ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        return
    if exported == os.environ.get("OMP_NUM_THREADS"):
        os.environ.pop("OMP_NUM_THREADS", None)


def _install_at_first(functions: "list[tuple[Any, str]]") -> None:
    """Install nano_loop at the first call of one of these functions, given as attributes of classes and modules."""
    import functools
    import threading

    lock = threading.Lock()
    waiting: list[tuple[Any, str, Any, Any]] = []

    def waiting_for(owner: "Any", name: str, original: "Any") -> "Any":
        @functools.wraps(original)
        def call(*args: "Any", **kwargs: "Any") -> "Any":
            with lock:
                is_first = bool(waiting) and getattr(owner, name) is call  # otherwise an explicit run has replaced it
                if is_first:
                    for other, attribute, replacement, before in waiting:
                        if getattr(other, attribute) is replacement:
                            setattr(other, attribute, before)
                    waiting.clear()
                    _install()
            return (getattr(owner, name) if is_first else original)(*args, **kwargs)

        return call

    for owner, name in functions:
        original = getattr(owner, name)
        replacement = waiting_for(owner, name, original)
        waiting.append((owner, name, replacement, original))
        setattr(owner, name, replacement)


if __name__ == "sitecustomize":
    _begin()
    # Import the sitecustomize that this one shadows. Python expects an ImportError if there is none.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
