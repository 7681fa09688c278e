"""The strategy that makes Lightning's Trainer train in a `Run`, without Lightning's base class.

The module is never wrapped: Lightning calls its ``training_step``, and the wrappers of the run surround that call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nano_loop.config.options import Options
from nano_loop.distributed.comm.ranks import Loop, Ranks
from nano_loop.distributed.launch.launcher import Alone
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.integrations.fabric import RanksCollectives, RanksEnvironment
from nano_loop.patching.torch_private import put_back_signal_handlers
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.objects.training_objects import TrainingObjects, check_kinds
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.steps import STEPS
from nano_loop.steps.parameter_dtype import ParameterDtype
from nano_loop.steps.precision import Precision
from nano_loop.steps.verify import Verify

PRODUCTS = "bf16-products"
#: `TrainerFn.FITTING` of Lightning, a string.
_FITTING = "fit"
#: Lightning's precision plugin enters autocast and converts parameters itself.
_STEPS = tuple(step for step in STEPS if step not in (ParameterDtype, Precision, Verify))
#: Options that Lightning's Trainer has itself, with the arguments to use instead.
LIGHTNINGS = {"num_processes": "devices=", "precision": "precision="}


def _read(options: dict[str, Any], is_complete: bool = True) -> Settings:
    settings = Settings.read(options, is_complete)
    if settings.options.verify:
        got = settings.options.as_written["verify"]
        expected = "training_step needs its Trainer, which is not copied"
        raise NanoConfigError(error_message(got, expected, "Call nano_loop.verify(module, loss_fn, batch)"))
    return settings


class NanoStrategyMixin(RanksCollectives):
    """The strategy ``"nano"``: ``Trainer(accelerator="cpu", devices=4, strategy="nano", precision="bf16-mixed")``.

    Lightning's base class is `ParallelStrategy`. An object is for one Trainer.

    Parameters
    ----------
    checkpoint_io : CheckpointIO, optional
        See Lightning.
    **options
        The options of `nano_loop.nano`, except for the number of processes and the precision, which are the Trainer's.
        If that precision is fp32, the option may be ``"auto"`` or ``"bf16-products"``.

    Attributes
    ----------
    report : SetupReport or None
        The steps that the last run applied and skipped. None before the first.

    Raises
    ------
    NanoConfigError
        If options are invalid.
    """

    #: Set by Lightning.
    lightning_module: Any
    model: Any
    optimizers: Any
    parallel_devices: Any
    precision_plugin: Any

    def __init__(self, *, checkpoint_io: Any = None, **options: Any) -> None:
        for name, instead in LIGHTNINGS.items():
            if name in options and options[name] not in ("auto", PRODUCTS):
                got = f"NanoStrategy({name}={options[name]!r})"
                raise NanoConfigError(
                    error_message(got, "Lightning's Trainer has it", f"Pass {instead} to the Trainer")
                )
        super().__init__(checkpoint_io=checkpoint_io, cluster_environment=RanksEnvironment(Ranks()))  # type: ignore[call-arg]
        self._nano_options = options
        self._nano_accelerator: Any = None
        self._nano_run: Run | None = None
        self.nano_printed: list[str] = []
        self.report: SetupReport | None = None
        shares = options.get("cpu_for_each_process")
        several = {"num_processes": len(shares)} if isinstance(shares, (list, tuple)) and shares else {}
        # Raises for an invalid option here. The Trainer has the number of processes.
        _read({**options, **several}, is_complete=False)

    # --- called by Lightning before a run ---

    @property
    def accelerator(self) -> Any:
        """See Lightning. It is stored where a second Trainer does not find it, which would report a contradiction."""
        return self._nano_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if self._nano_accelerator is not None:
            got, expected = "Trainer(strategy=...) with the NanoStrategy of another Trainer", "each needs its own"
            advice = 'Make a new one, or pass a name: "nano", or the result of nano_loop.lightning.strategy(...)'
            raise NanoConfigError(error_message(got, expected, advice))
        self._nano_accelerator = accelerator

    @property
    def launcher(self) -> RunLauncher:
        """The launcher that runs Lightning's entry points."""
        return RunLauncher(self)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks. If so, Lightning divides the batches of map-style datasets."""
        return self.ranks.size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the samplers that Lightning creates."""
        return {"num_replicas": self.ranks.size, "rank": self.ranks.rank}

    @property
    def num_processes(self) -> int:
        """The number of the Trainer's processes on this host."""
        return len(self.parallel_devices or (None,))

    @property
    def nano_precision(self) -> str:
        """Lightning's precision, or ``"bf16-products"``, which is allowed in fp32."""
        precision: str = self.precision_plugin.precision
        return PRODUCTS if precision == "32-true" and "precision" in self._nano_options else precision

    def settings(self, *, alone: bool = False) -> Settings:
        """Return the settings of a run; with `alone`, of a run with one process."""
        # A run has kernels for these precisions. Lightning's plugin handles all others.
        precision = self.nano_precision if self.nano_precision in ("bf16-mixed", PRODUCTS) else 32
        options = {**self._nano_options, "precision": precision}
        if alone:
            options.pop("cpu_for_each_process", None)  # lists for several processes
        elif self.num_processes > 1:
            options["num_processes"] = self.num_processes
        return _read(options)

    def _configure_launcher(self) -> None:
        """Check the options, as the last step of the Trainer's initialization."""
        types = {device.type for device in self.parallel_devices}
        if types - {"cpu"}:
            got = f"strategy='nano' with devices of type {', '.join(sorted(types))}"
            raise NanoConfigError(error_message(got, "it trains on CPUs", 'Pass accelerator="cpu" to the Trainer'))
        settings = self.settings()
        self._refuse_another(settings.options)
        self.cluster_environment.ranks = settings.expected_ranks()

    def _refuse_another(self, options: Options) -> None:
        """Raise if the precision or the number of processes in the environment differs from the Trainer's."""
        own = (self.nano_precision, self.precision_plugin.precision)
        for name, differs, trainers in (
            ("precision", options.precision not in own, f"precision={own[0]!r}"),
            ("num_processes", options.num_processes != self.num_processes, f"devices={self.num_processes}"),
        ):
            if differs and options.as_written[name] in options.from_environment:
                hint = f"Unset it, pass {LIGHTNINGS[name]} to the Trainer, or use nano_loop's Trainer, which follows it"
                raise NanoConfigError(error_message(options.as_written[name], f"this Trainer has {trainers}", hint))

    # --- a run ---

    @contextmanager
    def in_run(self, run: Run) -> Iterator[None]:
        """Let Lightning's hooks set up objects in `run`, among its ranks."""
        self._nano_run, self.report = run, None
        try:
            with self.cluster_environment.among(run.ranks):
                yield
        finally:
            self._nano_run = None

    def setup(self, trainer: Any) -> None:
        """See Lightning: set up the module, and its optimizers if it is trained."""
        super().setup(trainer)  # type: ignore[misc]
        fitting = trainer.state.fn == _FITTING
        optimizers = list(self.optimizers) if fitting else []
        self._apply(TrainingObjects(models=[self.lightning_module], optimizers=optimizers))

    def process_dataloader(self, dataloader: Any) -> Any:
        """See Lightning: accelerate a loader. Loaders that their samplers divide are not divided again."""
        if isinstance(dataloader, DataLoader) and self._nano_run is not None:
            trainer = self.lightning_module.trainer
            iterable = isinstance(dataloader.dataset, IterableDataset)
            training = trainer.training and not (trainer.sanity_checking or trainer.validating)
            by_run = iterable or self._nano_run.options.split_batches
            self._apply(TrainingObjects(loaders=[dataloader], shard=by_run and training))
        return dataloader

    def model_to_device(self) -> None:
        """See Lightning: models are on the CPU."""
        self.model.to(self.root_device)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """See Lightning: gradients are averaged by the first backward after the body."""
        return self._run.without_averaging(self.lightning_module) if self.is_distributed else nullcontext()

    @property
    def _run(self) -> Run:
        if self._nano_run is None:
            got = "NanoStrategy was set up outside the Trainer's fit, validate, test and predict"
            raise NanoError(error_message(got, "these start a run", "Call trainer.fit(module)"))
        return self._nano_run

    def _apply(self, parts: TrainingObjects) -> None:
        check_kinds(("models", nn.Module, parts.models))
        try:
            self._run.apply(parts)
        finally:
            self.report = self._run.report

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the run and the state of training, which the next run sets."""
        bare: Any = object.__new__(type(self))
        vars(bare).update(vars(self), _nano_run=None, report=None, lr_scheduler_configs=[])
        bare.connect(None)
        bare.optimizers = []
        return dict(vars(bare))


# --- the launch of a run ---


class RunLauncher:
    """A launcher for Lightning, which needs no base class, for the Trainer of a strategy."""

    #: Lightning checks this in notebooks.
    is_interactive_compatible = True

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Run ``fit`` in all processes, and others only in this one with all cores, unless torchrun started them."""
        alone = trainer.state.fn != _FITTING and found_launch(os.environ) is None
        settings = self._strategy.settings(alone=alone)
        task = _EntryPoint(settings, trainer, function, args, kwargs)
        launcher = Alone(settings.options) if alone else None
        return Run(settings, task, launcher=launcher, printed=self._strategy.nano_printed).complete()

    def kill(self, signum: int) -> None:
        """Do nothing. Lightning calls it at Ctrl-C, when the run has already ended its processes."""


class _EntryPoint(RunTask):
    """A call of ``function(*args, **kwargs)``, a method of a Trainer."""

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
                # Lightning restores handlers after the run, and would permanently set the run's own handler of Ctrl-C.
                put_back_signal_handlers(self._trainer)
                raise


def _names(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the user's objects that are sent to workers, by name."""
    named: dict[str, Any] = {"model": trainer.lightning_module}
    state = {"callbacks": trainer.callbacks, "loggers": trainer.loggers, "datamodule": [trainer.datamodule]}
    for name, values in state.items():
        named |= {f"{name} ({type(one).__name__})": one for one in values}
    named |= {f"argument {place} of fit": value for place, value in enumerate(args[1:], 2)}
    return {name: value for name, value in {**named, **kwargs}.items() if value is not None}


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
    advice = f'Run pip install "{extra}>=2.5,!=2.6.2,!=2.6.3"'
    return ImportError(error_message(got, f"{needed_by} is built on it", advice))
