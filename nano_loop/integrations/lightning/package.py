"""What is the same for both of Lightning's packages: names of the strategy, and errors of nano_loop's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nano_loop.errors import error_message


def register(kind: Any, strategies: Any) -> Callable[..., str]:
    """Let Lightning's Trainer find the strategy by its name, and return what names it with options."""
    description = "CPU training, accelerated by nano_loop"
    strategies.register("nano", kind, description, override=True)

    def strategy(**options: Any) -> str:
        """Return a name of the strategy "nano" with options: ``Trainer(strategy=strategy(precision="auto"))``.

        It is for libraries that keep, copy and pickle the arguments of their Trainers: each makes a new strategy by the
        name. A process that unpickles one calls this function first, with the same options.

        Parameters
        ----------
        **options
            Those of `NanoStrategyMixin`.

        Raises
        ------
        NanoConfigError
            If options are invalid.
        """
        kind(**options)
        values = [f"{name}={value!r}" for name, value in sorted(options.items())]
        name = ", ".join(["nano", *values]).lower()  # as Lightning looks for it
        if name not in strategies or strategies[name]["init_params"] != options:  # Lightning raises in the second case
            strategies.register(name, kind, description, **options)
        return name

    return strategy


def lightning_is_missing(package: str, needed_by: str) -> ImportError:
    """Return the error of a module of nano_loop that needs one of Lightning's packages."""
    got, extra = f"{package} is not installed", needed_by.rpartition(".")[2].replace("_", "-")
    return ImportError(error_message(got, f"{needed_by} is built on it", f'Run pip install "nano-loop[{extra}]"'))
