"""The launch of Lightning's Trainer in a `Run`: ``fit`` in all processes, other entry points in the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from nano_loop.distributed.comm.ranks import Loop
from nano_loop.distributed.launch.alone import Alone
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.patching.torch_private import put_back_signal_handlers
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.steps import STEPS, ParameterDtype, Precision, Verify

#: `TrainerFn.FITTING` of Lightning, a string.
FITTING = "fit"
#: Lightning's precision plugin enters autocast and converts parameters itself.
_STEPS = tuple(step for step in STEPS if step not in (ParameterDtype, Precision, Verify))


class RunLauncher:
    """What Lightning calls a launcher; it needs no base class.

    Parameters
    ----------
    strategy : NanoStrategyMixin
        Whose Trainer is launched.
    """

    #: Lightning asks in a notebook.
    is_interactive_compatible = True

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Run an entry point of the Trainer, and return what it returns in this process.

        ``fit`` runs in all processes. The others run in this one, with all cores, unless torchrun or its like has
        started the processes: then they run in all.
        """
        alone = trainer.state.fn != FITTING and found_launch(os.environ) is None
        settings = self._strategy.settings(alone=alone)
        task = _EntryPoint(settings, trainer, function, args, kwargs)
        launcher = Alone(settings.options) if alone else None
        return Run(settings, task, launcher=launcher, printed=self._strategy.nano_printed).complete()

    def kill(self, signum: int) -> None:
        """See Lightning, which calls it at Ctrl-C: the run has ended its processes by then."""


class _EntryPoint(RunTask):
    """``function(*args, **kwargs)``, where the function is a method of a Trainer."""

    steps = _STEPS

    def __init__(self, settings: Settings, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__(settings, _names(trainer, args, kwargs), Loop("fit", "self"))
        self._trainer, self._call = trainer, (function, args, kwargs)

    def do(self, run: Run) -> Any:
        """See `RunTask.do`."""
        function, args, kwargs = self._call
        with self._trainer.strategy.in_run(run):
            try:
                return function(*args, **kwargs)
            except BaseException:
                # Lightning does it when the run has ended, and would set the run's own handler of Ctrl-C for good.
                put_back_signal_handlers(self._trainer)
                raise


def _names(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the user's objects that are sent to workers, by their names."""
    named: dict[str, Any] = {"model": trainer.lightning_module}
    state = {"callbacks": trainer.callbacks, "loggers": trainer.loggers, "datamodule": [trainer.datamodule]}
    for name, values in state.items():
        named |= {f"{name} ({type(one).__name__})": one for one in values}
    named |= {f"argument {place} of fit": value for place, value in enumerate(args[1:], 2)}
    return {name: value for name, value in {**named, **kwargs}.items() if value is not None}
