"""accelerated and install: accelerate all training in a block or a process, including other libraries' trainers."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from nano_loop.cli.at_start import search_path
from nano_loop.config.declarations import Declarations
from nano_loop.config.protocol import INSTALL, is_json
from nano_loop.config.signatures import with_options
from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.distributed.launch.launcher import Alone
from nano_loop.distributed.launch_external.environment import found_launch, local_size
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.patch_table import until_undone
from nano_loop.patching.user_code import warn
from nano_loop.runtime.ambient import Ambient
from nano_loop.runtime.objects.report import SetupReport, print_lines
from nano_loop.runtime.run import Run
from nano_loop.runtime.settings import Settings

_printed: list[str] = []  # shared by all calls in this process, since a loop may call from one place many times
#: The run of `install`, kept after `uninstall`.
_last: list[Run] = []


@with_options
def accelerated(
    model: Any = None, optimizer: Any = (), *dataloaders: DataLoader[Any], **options: Any
) -> AbstractContextManager[Run]:
    """Accelerate the training in the body of a ``with`` statement, in this process.

    Without a model, whatever the body trains is set up when it trains, including inside other libraries: see `install`.
    With a model, the arguments are set up on entry, then the optimizers that train them in the body, and its loaders.
    For other objects that the body creates, call ``run.setup(model, optimizer, *dataloaders)``. On exit, all changes
    are undone. Under torchrun, srun or mpirun, each process runs its loop independently, and communication between the
    processes is up to the loop. torchrun's processes divide the threads of their host.

    Parameters
    ----------
    model : torch.nn.Module, or a list or tuple of them, optional
        The models. They run in the layout and the precision that the options select.
    optimizer : torch.optim.Optimizer, or a list or tuple of them, optional
        The optimizers. Those that support fused kernels are switched to them.
    *dataloaders : torch.utils.data.DataLoader
        The loaders. They keep their class and their attributes.
    {options}
    **options
        Any other name is an error.

    Returns
    -------
    context manager
        Yields the `Run`. ``run.report`` lists the steps that were applied, and ``run.setup`` sets up more objects.

    Raises
    ------
    NanoConfigError
        If options or arguments are invalid, or ``num_processes`` is greater than 1.

    Warns
    -----
    NanoWarning
        If the body has trained nothing that could be set up.

    Examples
    --------
    >>> import torch, nano_loop
    >>> def fit():
    ...     model = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.rand(8, 4)).sum().backward()
    ...     optimizer.step()
    >>> with nano_loop.accelerated(precision="auto", verbose=False) as run:
    ...     fit()
    >>> "fused_optimizer" in run.report.applied
    True
    """
    if TYPE_CHECKING:
        Declarations(**options)  # never runs: jedi completes arguments by the call that receives them
    settings = _settings_of_one_process(options, "accelerated")
    return running(settings, Alone(settings.options, _processes_here()), model, optimizer, *dataloaders)


@contextmanager
def running(
    settings: Settings, launcher: Alone, model: Any, optimizer: Any, *dataloaders: DataLoader[Any]
) -> Iterator[Run]:
    """Accelerate these objects within the context, as `accelerated` does, with the given settings."""
    run = Run(settings, launcher=launcher, printed=_printed)
    try:
        with run:
            if model is not None or optimizer or dataloaders:
                run.setup(() if model is None else model, optimizer, *dataloaders)
            mode = Ambient(run, finds_models=model is None)
            try:
                mode.open()
                yield run
            finally:
                mode.close()
            mode.warn_of_unused_options()
            _warn_if_unused(run)
    finally:
        run.end()


def _warn_if_unused(run: Run) -> None:
    assert run.stepped is not None
    if run.report is None and not run.stepped.saw_inner_run:
        got, expected = "accelerated() has set nothing up", "no model was trained in its body"
        warn(error_message(got, expected, "Put it around the training, or call run.setup(model, optimizer)"))


@with_options
def install(**options: Any) -> None:
    """Accelerate whatever this process trains from now on, until `uninstall`.

    Models, optimizers and loaders are set up when the program trains with them, in any thread and inside other
    libraries, for as long as they exist. The same holds in each Python process that it starts, unless
    ``NANO_LOOP_INSTALL=0`` is set. Outside training, their results do not change. Explicit runs (`nano`, `TorchNano`,
    `accelerated`, the Trainer) have their own options. Models that Fabric, `torch.compile` or several processes train
    are left unchanged. A second call replaces the options.

    Parameters
    ----------
    {options}
    **options
        Any other name is an error.

    Raises
    ------
    NanoConfigError
        If options are invalid, ``num_processes`` is greater than 1, or the precision converts parameters.

    See Also
    --------
    report : What was set up.

    Examples
    --------
    >>> import torch, nano_loop
    >>> nano_loop.install(verbose=False)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.rand(8, 4)).sum().backward()
    >>> optimizer.step()
    >>> nano_loop.uninstall()
    >>> "fused_optimizer" in nano_loop.report().applied
    True
    """
    if TYPE_CHECKING:
        Declarations(**options)
    settings = _settings_of_one_process(options, "install")
    if settings.options.kind.parameters is not None:
        got, expected = settings.options.as_written["precision"], "models keep their parameters in fp32"
        advice = 'Pass "auto" or "bf16", or put nano_loop.accelerated around the training'
        raise NanoConfigError(error_message(got, expected, advice))
    uninstall()
    launch = found_launch(os.environ)
    if launch is not None:
        got = f"{launch.launcher} has started {launch.size} processes"
        message = error_message(
            got, "install is for one, and does nothing", "Decorate the training function with @nano"
        )
        print_lines([f"nano-loop: {message}"])
        return
    with ExitStack() as stack:
        slot = stack.enter_context(Alone(settings.options).joined(settings.machine, None))
        run = stack.enter_context(Run(settings, slot=slot, in_all_threads=True))
        mode = Ambient(run)
        stack.callback(mode.warn_of_unused_options)
        stack.callback(mode.close)
        mode.open()
        stack.enter_context(_installed_in_children(options))
        _last[:] = [run]
        until_undone[install] = stack.pop_all()
    atexit.register(uninstall)  # runs before the interpreter tears down modules


@contextmanager
def _installed_in_children(options: Mapping[str, Any]) -> Iterator[None]:
    """Make each Python process that this one starts install nano_loop with these options when it trains."""
    if os.environ.get(INSTALL, "").lower() in ("0", "false", "no", "off"):
        yield
        return
    text = {name: value for name, value in options.items() if is_json(value)}
    variables = {INSTALL: json.dumps(text), "PYTHONPATH": search_path(os.environ)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) == variables[name]:  # otherwise the program has changed it
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def uninstall() -> None:
    """Undo `install` and everything that it has set up. Has no effect if `install` was not called."""
    atexit.unregister(uninstall)
    until_undone.pop(install, ExitStack()).close()


def report() -> SetupReport | None:
    """Return the report of `install`, also after `uninstall`; None if nothing was set up."""
    return _last[0].report if _last else None


def _settings_of_one_process(options: Mapping[str, Any], name: str) -> Settings:
    """Return the settings of a function that cannot run in several processes."""
    settings = Settings.read(options)
    if settings.options.num_processes not in (None, 1):
        got, expected = settings.options.as_written["num_processes"], f"{name} runs in one process"
        advice = "Move the loop into a function and decorate it: @nano_loop.nano(num_processes=...)"
        raise NanoConfigError(error_message(got, expected, advice))
    return settings


def _processes_here() -> int:
    """Return the number of processes that torchrun (which does not bind them to CPUs) started on this host, or 1."""
    launch = found_launch(os.environ)
    if launch is None or launch.launcher != "torchrun" or innermost() is not None:
        return 1
    return local_size(launch, os.environ)
