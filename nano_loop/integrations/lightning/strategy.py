"""The strategy by which Lightning's Trainer trains in a `Run`, without Lightning's base class.

The module is never wrapped: Lightning calls its ``training_step``, and the layers of the run are around that call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nano_loop.config.options import Options
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.tensor_collectives import gathered, reduced
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.integrations.fabric.strategy import RanksEnvironment
from nano_loop.integrations.lightning.launching import FITTING, RunLauncher
from nano_loop.integrations.lightning.precision import PRODUCTS, ProductsPrecisionMixin
from nano_loop.patching.torch_private import connect_again
from nano_loop.runtime.objects.checks import check_kinds
from nano_loop.runtime.objects.report import LastPrinted, SetupReport
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.runtime.run import Run
from nano_loop.runtime.settings import Settings

#: The report of the last run of each strategy that has a name: libraries drop their Trainers.
reports_by_name: dict[str, SetupReport] = {}
#: Options that Lightning's Trainer has itself, with what to write instead.
LIGHTNINGS = {"num_processes": "devices=", "precision": "precision="}
#: Precisions of Lightning in which a run has kernels for them; in others, Lightning's plugin does all.
_REDUCED = ("bf16-mixed", PRODUCTS)


def _read(options: dict[str, Any]) -> Settings:
    settings = Settings.read(options)
    if settings.options.verify:
        got = settings.options.as_written["verify"]
        expected = "training_step needs its Trainer, of which there is no copy"
        raise NanoConfigError(error_message(got, expected, "Call nano_loop.verify(module, loss_fn, batch)"))
    return settings


class _Devices(tuple[torch.device, ...]):
    """The devices of a Trainer, which count as none in a condition.

    Lightning takes devices that it finds in a strategy for the user's, and would not give it those of the next Trainer.
    """

    def __bool__(self) -> bool:
        return False


@dataclass
class _Connection:
    """What a Trainer sets on its strategy."""

    accelerator: Any = None
    precision_plugin: Any = None
    checkpoint_io: Any = None
    devices: _Devices = field(default_factory=_Devices)


class NanoStrategyMixin:
    """The strategy ``"nano"``: ``Trainer(accelerator="cpu", devices=4, strategy="nano", precision="bf16-mixed")``.

    Lightning's base class is `ParallelStrategy`. An object serves any number of Trainers: Lightning refuses one in
    which it finds what another Trainer has set, so that is kept where it does not look.

    Parameters
    ----------
    checkpoint_io : CheckpointIO, optional
        See Lightning.
    nano_name : str
        The name under which Lightning has the strategy with these options.
    **options
        Those of `nano_loop.nano`, but for the number of processes and the precision, which are the Trainer's. The
        precision may be ``"auto"``, for a Trainer in fp32.

    Attributes
    ----------
    report : SetupReport or None
        The steps that the last run applied and skipped. None before the first.

    Raises
    ------
    NanoConfigError
        If options are invalid.
    """

    def __init__(self, *, checkpoint_io: Any = None, nano_name: str = "", **options: Any) -> None:
        for name, instead in LIGHTNINGS.items():
            if name in options and options[name] not in ("auto", PRODUCTS):
                got = f"NanoStrategy({name}={options[name]!r})"
                raise NanoConfigError(
                    error_message(got, "Lightning's Trainer has it", f"Pass {instead} to the Trainer")
                )
        self._nano_connection, self._nano_trainers = _Connection(), 0
        super().__init__(checkpoint_io=checkpoint_io, cluster_environment=RanksEnvironment(Ranks()))  # type: ignore[call-arg]
        self._nano_options = options
        self._nano_name = nano_name
        self._nano_run: Run | None = None
        self.nano_printed = LastPrinted()
        self._nano_ranks = Ranks()
        self.report: SetupReport | None = None
        shares = options.get("cpu_for_each_process")
        several = {"num_processes": len(shares)} if isinstance(shares, (list, tuple)) and shares else {}
        _read({**options, **several})  # raises for an invalid option here

    # --- what a Trainer sets ---

    @property
    def accelerator(self) -> Any:
        """See Lightning."""
        return self._nano_connection.accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The first that a Trainer sets.
        if self._nano_run is not None:
            got = "Trainer(strategy=...) with the strategy of a Trainer that is running"
            raise NanoError(error_message(got, "it serves one at a time", "Pass another object of NanoStrategy"))
        self._nano_connection = _Connection(accelerator)
        self._nano_trainers += 1

    @property
    def precision_plugin(self) -> Any:
        """See Lightning."""
        plugin = self._nano_connection.precision_plugin
        return super().precision_plugin if plugin is None else plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        self._nano_connection.precision_plugin = precision_plugin

    @property
    def checkpoint_io(self) -> Any:
        """See Lightning, whose property makes the default, and completes what wraps another one."""
        users: Any = self._checkpoint_io  # type: ignore[has-type]
        self._checkpoint_io = self._nano_connection.checkpoint_io or users
        try:
            self._nano_connection.checkpoint_io = super().checkpoint_io  # type: ignore[misc]
        finally:
            self._checkpoint_io = users
        return self._nano_connection.checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._nano_connection.checkpoint_io = io

    @property
    def parallel_devices(self) -> Any:
        """See Lightning."""
        return self._nano_connection.devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        self._nano_connection.devices = _Devices(devices or ())

    def serve(self, trainer: Any) -> None:
        """Be the strategy of a Trainer that begins, also if another one has been made with it since."""
        if self._nano_trainers > 1:
            connect_again(trainer)

    # --- what Lightning asks before a run ---

    @property
    def root_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def launcher(self) -> RunLauncher:
        """What Lightning has each of its entry points run by."""
        return RunLauncher(self.serve, self.settings, self.in_run, self.nano_printed)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, for which Lightning divides the batches of map-style datasets."""
        return self.nano_ranks.size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Lightning gives the samplers that it makes."""
        return {"num_replicas": self.nano_ranks.size, "rank": self.nano_ranks.rank}

    @property
    def num_processes(self) -> int:
        """How many processes the Trainer trains in on this host."""
        return max(len(self.parallel_devices), 1)

    @property
    def nano_ranks(self) -> Ranks:
        """The ranks of the run that is under way, or of the one to come."""
        ranks: Ranks = self.cluster_environment.ranks  # type: ignore[attr-defined]
        return ranks

    def settings(self, *, alone: bool = False) -> Settings:
        """Return what a run is started with; `alone` in this process alone."""
        precision = self.precision_plugin.precision
        options = {"precision": 32, **self._nano_options}
        if precision in _REDUCED:
            options["precision"] = precision
        if alone:
            options.pop("cpu_for_each_process", None)  # lists for several processes
        elif self.num_processes > 1:
            options["num_processes"] = self.num_processes
        return _read(options)

    def _configure_launcher(self) -> None:
        """Check the options, as the last of what the Trainer sets up."""
        devices = [device.type for device in self.parallel_devices]
        if set(devices) - {"cpu"}:
            got = f"strategy='nano' with devices of type {', '.join(sorted(set(devices)))}"
            raise NanoConfigError(error_message(got, "it trains on CPUs", 'Pass accelerator="cpu" to the Trainer'))
        if isinstance(self.precision_plugin, ProductsPrecisionMixin):
            self.precision_plugin.is_left_to_run = True
        settings = self.settings()
        self._refuse_another(settings.options)
        self._nano_ranks = self.cluster_environment.ranks = settings.expected_ranks()  # type: ignore[attr-defined]

    def _refuse_another(self, options: Options) -> None:
        """Raise if the environment has another precision or number of processes than the Trainer."""
        precision = self.precision_plugin.precision
        for name, differs, own in (
            ("precision", options.precision != precision, f"precision={precision!r}"),
            ("num_processes", options.num_processes != self.num_processes, f"devices={self.num_processes}"),
        ):
            if differs and options.as_written[name] in options.from_environment:
                hint = f"Unset it, pass {LIGHTNINGS[name]} to the Trainer, or use nano_loop's Trainer, which obeys it"
                raise NanoConfigError(error_message(options.as_written[name], f"this Trainer has {own}", hint))

    # --- a run ---

    @contextmanager
    def in_run(self, run: Run) -> Iterator[None]:
        """Let Lightning's hooks set up what they are given in `run`, among its ranks."""
        self._nano_run, self.report = run, None
        self.cluster_environment.ranks = run.ranks  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._nano_run = None
            self.cluster_environment.ranks = self._nano_ranks  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """See Lightning: the process group is there already."""
        self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: Any) -> None:
        """See Lightning: set up the module, and its optimizers where it is trained."""
        super().setup(trainer)  # type: ignore[misc]
        fitting = trainer.state.fn == FITTING
        optimizers = list(self.optimizers) if fitting else []  # type: ignore[attr-defined]
        self._apply(TrainingObjects(models=[self.lightning_module], optimizers=optimizers))  # type: ignore[attr-defined]

    def process_dataloader(self, dataloader: Any) -> Any:
        """See Lightning: accelerate a loader. What is divided by its sampler is not divided again."""
        if isinstance(dataloader, DataLoader) and self._nano_run is not None:
            trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
            iterable = isinstance(dataloader.dataset, IterableDataset)
            training = trainer.training and not (trainer.sanity_checking or trainer.validating)
            self._apply(TrainingObjects(loaders=[dataloader], shard=iterable and training))
        return dataloader

    def model_to_device(self) -> None:
        """See Lightning: models are on the CPU."""
        self.model.to(self.root_device)  # type: ignore[attr-defined]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """See Lightning: gradients are averaged by the first backward after the body."""
        if self._nano_run is None or self.nano_ranks.size == 1:
            yield
            return
        with self._nano_run.without_averaging(self.lightning_module):  # type: ignore[attr-defined]
            yield

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Lightning."""
        return reduced(self.nano_ranks, tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """See Lightning: the tensors of all ranks, stacked; with one rank, the tensor."""
        return tensor if self.nano_ranks.size == 1 else gathered(self.nano_ranks, tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See Lightning."""
        return obj if self._nano_run is None else self.nano_ranks.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See Lightning."""
        if self._nano_run is not None:
            self.nano_ranks.barrier()

    # --- what travels, and how ---

    def _apply(self, parts: TrainingObjects) -> None:
        run = self._nano_run
        if run is None:
            got = "NanoStrategy was set up outside of the Trainer's fit, validate, test and predict"
            raise NanoError(error_message(got, "these start a run", "Call trainer.fit(module)"))
        check_kinds(("models", nn.Module, parts.models))
        try:
            run.apply(parts)
        finally:
            self.report = run.report
            if self.report is not None and self._nano_name:
                reports_by_name[self._nano_name] = self.report

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and sent: no run, and nothing of a training, which the next one sets anew."""
        bare: Any = object.__new__(type(self))
        vars(bare).update(vars(self), _nano_run=None, report=None, lr_scheduler_configs=[])
        bare.connect(None)
        bare.optimizers = []
        return dict(vars(bare))
