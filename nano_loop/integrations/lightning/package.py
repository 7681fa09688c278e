"""Common functions for both of Lightning's packages: names of the strategy, and errors of nano_loop's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nano_loop.errors import error_message


def register(kind: Any, strategies: Any) -> Callable[..., str]:
    """Register the strategy with Lightning's Trainer, and return a function that names it with options."""
    description = "CPU training, accelerated by nano_loop"
    strategies.register("nano", kind, description, override=True)

    def strategy(**options: Any) -> str:
        """Return a name for the strategy "nano" with options: ``Trainer(strategy=strategy(precision="auto"))``.

        It is for libraries that store, copy and pickle the arguments of their Trainers: each Trainer makes a new
        strategy from the name. A process that unpickles a name must first call this function with the same options.

        Parameters
        ----------
        **options
            The options of `NanoStrategyMixin`.

        Raises
        ------
        NanoConfigError
            If options are invalid.
        """
        kind(**options)
        values = [f"{name}={value!r}" for name, value in sorted(options.items())]
        name = ", ".join(["nano", *values]).lower()  # as Lightning looks it up
        if name not in strategies or strategies[name]["init_params"] != options:  # Lightning raises if it exists
            strategies.register(name, kind, description, **options)
        return name

    return strategy


def lightning_is_missing(package: str, needed_by: str) -> ImportError:
    """Return the error of a module of nano_loop that needs one of Lightning's packages."""
    got, extra = f"{package} is not installed", needed_by.rpartition(".")[2].replace("_", "-")
    return ImportError(error_message(got, f"{needed_by} is built on it", f'Run pip install "nano-loop[{extra}]"'))
