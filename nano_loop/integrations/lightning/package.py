"""The registration of the strategy with one of Lightning's packages, and the error where it is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from nano_loop.errors import error_message
from nano_loop.integrations.lightning.strategy import reports_by_name
from nano_loop.runtime.objects.report import SetupReport


class StrategyName(str):
    """The name of a strategy with options, for libraries that keep, copy and pickle the arguments of a Trainer.

    Each Trainer makes a new strategy by the name. Where the name is unpickled, it is registered, too.

    Parameters
    ----------
    kind : type
        The class of the strategy.
    options : dict
        Its options.
    """

    _kind: Any
    _options: dict[str, Any]

    def __new__(cls, kind: Any, options: dict[str, Any]) -> StrategyName:
        """Check the options, and register the name."""
        kind(**options)
        words = ", ".join([kind.__module__, *(f"{name}={value!r}" for name, value in sorted(options.items()))])
        # Lightning turns capitals into small letters, which values may differ by.
        name = super().__new__(cls, f"nano-{hashlib.sha256(words.encode()).hexdigest()[:16]}")
        name._kind, name._options = kind, options
        if name not in kind.nano_registry:
            kind.nano_registry.register(str(name), kind, description=_DESCRIPTION, nano_name=str(name), **options)
        return name

    @property
    def report(self) -> SetupReport | None:
        """The report of the last run of a Trainer with this strategy; None before the first."""
        return reports_by_name.get(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._kind, self._options)


_DESCRIPTION = "CPU training, accelerated by nano_loop"


def register(kind: Any, strategies: Any) -> Callable[..., StrategyName]:
    """Let Lightning's Trainer find the strategy by its name, and return what names it with options."""
    kind.nano_registry = strategies
    if "nano" not in strategies:
        strategies.register("nano", kind, description=_DESCRIPTION)

    def strategy(**options: Any) -> StrategyName:
        """Return the strategy "nano" with options, as a string: ``Trainer(strategy=strategy(precision="auto"))``.

        Parameters
        ----------
        **options
            Those of `NanoStrategyMixin`.

        Returns
        -------
        StrategyName
            It can be pickled and copied, and serves many Trainers. Its ``report`` is that of the last run.

        Raises
        ------
        NanoConfigError
            If options are invalid.
        """
        return StrategyName(kind, options)

    return strategy


_INSTALL = {
    "lightning.pytorch": 'pip install "nano-loop[lightning]"',
    "pytorch_lightning": 'pip install "nano-loop[pytorch-lightning]"',
}


def lightning_is_missing(package: str, needed_by: str) -> ImportError:
    """Return the error of a module of nano_loop that needs one of Lightning's packages."""
    expected = f"{needed_by} is over {package}"
    return ImportError(error_message(f"{package} is not installed", expected, f"Run {_INSTALL[package]}"))
