"""accelerated: a context manager for loops outside a function, such as those of other libraries' trainers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.config.signatures import with_options
from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.distributed.launch.alone import Alone
from nano_loop.distributed.launch_external.environment import found_launch, local_size
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.runtime.objects.report import LastPrinted
from nano_loop.runtime.run import Run
from nano_loop.runtime.settings import Settings

_printed = LastPrinted()  # by all calls in this process, of which many have the same place in a loop


@with_options
def accelerated(model: Any = None, optimizer: Any = (), *dataloaders: DataLoader[Any], **options: Any) -> Any:
    """Accelerate the loop in the body of a ``with`` statement, in this process.

    The arguments are set up on entry. For objects that the body creates, call
    ``run.setup(model, optimizer, *dataloaders)``. On exit, all changes are undone. Under torchrun, srun or mpirun, each
    process runs its loop independently, and communication between the processes is up to the loop. torchrun's processes
    divide the threads of their host.

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

    Examples
    --------
    >>> import torch, nano_loop
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with nano_loop.accelerated(model, optimizer, precision="auto", verbose=False) as run:
    ...     model(torch.rand(8, 4)).sum().backward()
    ...     optimizer.step()
    >>> "fused_optimizer" in run.report.applied
    True
    """
    settings = Settings.read(options)
    if (settings.options.num_processes or 1) > 1:
        got, expected = settings.options.as_written["num_processes"], "accelerated runs in one process"
        advice = "Move the loop into a function and decorate it: @nano_loop.nano(num_processes=...)"
        raise NanoConfigError(error_message(got, expected, advice))
    return running(settings, Alone(settings.options, _processes_here()), model, optimizer, *dataloaders)


@contextmanager
def running(
    settings: Settings, launcher: Alone, model: Any, optimizer: Any, *dataloaders: DataLoader[Any]
) -> Iterator[Run]:
    """Accelerate these objects for the time of the context, as `accelerated` does, with settings that are known."""
    run = Run(settings, launcher=launcher, printed=_printed)
    try:
        with run:
            if model is not None or optimizer or dataloaders:
                run.setup(() if model is None else model, optimizer, *dataloaders)
            yield run
    finally:
        run.end()


def _processes_here() -> int:
    """Return how many processes torchrun has started on this host, which it binds to no CPUs; else 1."""
    launch = found_launch(os.environ)
    if launch is None or launch.launcher != "torchrun" or innermost() is not None:
        return 1
    return local_size(launch, os.environ)
