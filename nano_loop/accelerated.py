"""accelerated: a context manager for loops that are not in a function, such as those of other libraries' trainers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from nano_loop.distributed.launch.alone import Alone
from nano_loop.errors import NanoConfigError, problem
from nano_loop.run import Run, Settings
from nano_loop.signatures import with_options


@with_options
def accelerated(model: Any = None, optimizer: Any = (), *dataloaders: DataLoader[Any], **options: Any) -> Any:
    """Accelerate the loop in the body of a ``with`` statement, in this process.

    What is given here is set up at once; ``run.setup(model, optimizer, *dataloaders)`` sets up what is made in the
    body. Everything is as it was when the body has been left. Under torchrun, srun or mpirun each process runs its loop
    for itself, and the communication between them is the loop's.

    Parameters
    ----------
    model : torch.nn.Module, or a list or tuple of them, optional
        Gets the layout and the precision that the options ask for.
    optimizer : torch.optim.Optimizer, or a list or tuple of them, optional
        Is switched to fused kernels where they fit.
    *dataloaders : torch.utils.data.DataLoader
        Keep their class and their attributes.
    {options}
    **options
        Any other name is an error.

    Returns
    -------
    context manager
        Of the `Run`: its ``report`` says what was applied, and its ``setup`` accelerates more.

    Raises
    ------
    NanoConfigError
        If options or arguments cannot be used, or ``num_processes`` is more than 1.

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
        given, needed = settings.options.given["num_processes"], "accelerated runs in one process"
        advice = "Put the loop in a function, and decorate that: @nano_loop.nano(num_processes=...)"
        raise NanoConfigError(problem(given, needed, advice))
    return _running(settings, model, optimizer, dataloaders)


@contextmanager
def _running(settings: Settings, model: Any, optimizer: Any, dataloaders: tuple[DataLoader[Any], ...]) -> Iterator[Run]:
    with Run(settings, launcher=Alone(settings.options)) as run:
        models = () if model is None else model
        if model is not None or optimizer or dataloaders:
            run.setup(models, optimizer, *dataloaders)
        yield run
