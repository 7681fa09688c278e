"""The ambient mode: models, optimizers and loaders are set up when a program trains with them, without code changes.

Training is detected by a torch optimizer, or by parameters whose values change after a backward has reached them. Its
models are the modules with such parameters that the program calls with gradients enabled, outside calls of other
modules. So it does not matter how a model was created, or whether that was before the mode began. A loss that contains
the model, and a model in several parts, are set up when they are called.

Calls are watched from the creation of an optimizer until its first step, or until a later one if parameters without a
gradient are not in a model yet. Loading state into an optimizer restarts this, and so does adding a module to another
one, until an optimizer steps for the second time. Without a torch optimizer, calls are watched from the first backward
on.

Models that are already set up by DDP, FSDP, Fabric, `torch.compile` or several processes are left unchanged.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.errors import error_message
from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.backward import backwards_watched
from nano_loop.patching.calls.calls import new_modules_covered
from nano_loop.patching.calls.entry import is_exporting, through_interceptor
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.loaders import implicit_loaders_changed
from nano_loop.patching.members import has_shapes, parameters_of
from nano_loop.patching.optimizers import held_by, trained_by
from nano_loop.patching.ownership import call_state
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import in_dispatch_mode, in_functorch
from nano_loop.patching.torch_private_compiler import is_compiled
from nano_loop.patching.user_code import warn
from nano_loop.policy.product_precision import line_searches_in_fp32
from nano_loop.runtime.ambient_training import ChangedValues, Training
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.runtime.run import Run
from nano_loop.runtime.stepped_optimizers import SteppedOptimizers
from nano_loop.steps import LOADER_STEPS
from nano_loop.steps.step import SkipReason

_BY_PROCESSES = SkipReason("distributed", "several processes train it")
#: Why modules in wrappers of other libraries are not set up, by the class names of the wrappers.
_WRAPPERS = {
    "DistributedDataParallel": _BY_PROCESSES,
    "FullyShardedDataParallel": _BY_PROCESSES,
    "FSDPModule": _BY_PROCESSES,
    "_FabricModule": SkipReason("fabric", "Fabric has set it up"),
}


def reason_to_leave(model: nn.Module) -> SkipReason | None:
    """Return why a model that is already set up is left unchanged, or None."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return _BY_PROCESSES
    for module in model.modules():
        if is_compiled(module):
            return SkipReason("compiled", "torch.compile has compiled it")
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS:
                return _WRAPPERS[base.__name__]
    return None


_modes: list[Ambient] = process_wide("ambient modes", [])


class Ambient:
    """Sets up the objects that a program trains with, in the scope of a run, until `close`; see the module.

    Without `finds_models`, those passed to `Run.setup` are the models, and only loaders are set up.
    """

    def __init__(self, run: Run, *, finds_models: bool = True) -> None:
        self._run = run
        self._finds_models = finds_models
        self._lock = threading.RLock()
        self._optimizers: Any = WeakIdKeyDictionary()  # optimizers that were seen
        self._new: Any = WeakIdKeyDictionary()  # those whose modules are not found yet
        self._round: Any = None  # after a module was added: those that have stepped, until one steps again
        self._has_begun = False  # whether something may be trained
        self._is_watching = False  # whether calls of modules are watched
        self._watching = ExitStack()  # the replacements for watching
        self._beginnings = 0  # how often watching began
        self._called: Any = WeakIdKeyDictionary()  # modules, with the value of `_beginnings` when they were checked
        self._without_optimizer = ChangedValues()
        self._trains_others = False  # whether a model was set up that no torch optimizer trains
        self._trainings: Any = WeakIdKeyDictionary()  # by optimizer, and by module of a model
        self._postponed: Any = WeakIdKeyDictionary()  # optimizers
        self._loaders: Any = WeakIdKeyDictionary()
        self._loader_run: Run | None = None
        self._ending = ExitStack()

    def open(self) -> None:
        """Start to watch the program."""
        self._ending.callback(self._end_runs)
        if not self._finds_models:
            self._watch_loaders()
            return
        _modes.append(self)
        self._ending.callback(_modes.remove, self)
        self._ending.callback(self._look_away)
        for method in ("__init__", "__setstate__"):  # the second for loaded state and copies
            self._ending.enter_context(replaced(Optimizer, method, _noting))
        self._watching.enter_context(backwards_watched(_note_backward))
        if self._run.options.kind.products is not None:  # a model may be set up during a step
            self._ending.enter_context(line_searches_in_fp32())
        self._stepped.take = self._take

    def close(self) -> None:
        """End the mode, and undo all setups."""
        self._ending.close()

    def is_here(self) -> bool:
        """Whether the mode is active in this thread, outside nested runs."""
        return self._run.scope.is_here()

    def warn_of_unused_options(self) -> None:
        """Warn about options that are True but did not apply to anything, once the nested runs have ended."""
        for name, reason, hint in self._run.unmet_inside if self._finds_models else ():
            warn(error_message(f"{name}=True", reason, hint))

    def note(self, optimizer: Optimizer) -> None:
        """Watch for the modules that an optimizer trains."""
        with self._lock:
            self._optimizers[optimizer] = self._new[optimizer] = None
            self._begin()

    def note_backward(self) -> None:
        """Watch for modules that are trained without a torch optimizer: gradients arrive, then values change."""
        with self._lock:
            if not self._has_begun:
                self._begin()
            self._without_optimizer.note_backward()

    def note_module(self) -> None:
        """Watch again, since there may be a new model or a new part of one."""
        with self._lock:
            if self._has_begun:
                self._round = WeakIdKeyDictionary()
                self._begin()

    def look_at(self, module: nn.Module) -> None:
        """Set up a module that the program calls, if it is trained."""
        if self._called.get(module) == self._beginnings and module not in self._without_optimizer:
            waits = self._new or self._round is not None or self._without_optimizer.awaits_backward
            if self._optimizers and not waits:
                with self._lock:
                    self._look_away()
            return
        if is_exporting() or in_functorch() or in_dispatch_mode():
            return
        with self._lock:
            self._called[module] = self._beginnings if has_shapes(module) else None  # None: check it again
            self._set_up(module, by_others=self._without_optimizer.have_changed(module))
            if self._training_of([module]) is None and next(iter(parameters_of(module)), None) is not None:
                self._without_optimizer.add(module)

    def _begin(self) -> None:
        """Watch for modules. Nothing is replaced before the first call."""
        self._beginnings += 1
        self._stepped.forget()
        if not self._has_begun:
            self._has_begun = True
            self._watch_loaders()
            self._ending.enter_context(new_modules_covered())
            self._ending.callback(register_module_module_registration_hook(_note_module).remove)
        if not self._is_watching:
            self._is_watching = True
            self._watching.enter_context(backwards_watched(_note_backward))
            self._watching.enter_context(replaced(nn.Module, "__call__", through_interceptor))
            call_state.watchers.append(_watched)
            self._watching.callback(call_state.watchers.remove, _watched)

    def _look_away(self) -> None:
        self._is_watching = False
        self._watching.close()

    def _take(self, optimizer: Optimizer) -> bool:
        """Set up an optimizer that steps. Return False to be called again before its next step."""
        with self._lock:
            if optimizer not in self._optimizers:  # created before the mode
                self.note(optimizer)
            # In another dtype, the setup adds hooks for all steps, which is not allowed during a step.
            if self._training_of([optimizer]) is None and self._run.options.kind.parameters is None:
                # Include those called with other parameters, largest first.
                for module in sorted(self._called, key=lambda module: -sum(1 for _ in module.modules())):
                    self._set_up(module)
            if self._training_of([optimizer]) is None:
                if optimizer not in self._postponed:
                    self._postponed[optimizer] = None  # until its model is called, as by the closure of this step
                    return False
                training = self._trainings[optimizer] = Training(self._run)
                training.hold(optimizer)
                detail = f"{type(optimizer).__name__} does not train a module that is called"
                result = StepResult("model", "skipped", detail, code="no_module")
                training.apply(TrainingObjects(optimizers=[optimizer]), result)
            if not self._may_train_more(optimizer):
                self._new.pop(optimizer, None)
            if self._round is not None and optimizer in self._round:
                self._round = None
            elif self._round is not None:
                self._round[optimizer] = None
            return self._round is None and optimizer not in self._new

    def _may_train_more(self, optimizer: Optimizer) -> bool:
        """Whether there are parameters without a gradient so far that are not in a model."""
        rest = {*map(id, held_by(optimizer))}.difference(map(id, trained_by(optimizer)))
        models = [model for training in {*self._trainings.values()} for model in [*training.models]] if rest else []
        return not rest.issubset(id(parameter) for model in models for parameter in parameters_of(model))

    def _set_up(self, module: nn.Module, by_others: bool = False) -> None:
        if not has_shapes(module):
            return  # the steps depend on them
        held = set(map(id, parameters_of(module)))
        optimizers = [
            optimizer
            for optimizer in [*self._optimizers]
            if not held.isdisjoint(map(id, held_by(optimizer))) and not self._stepped.trains_set_up_model(optimizer)
        ]
        is_model = (bool(optimizers) or by_others) and self._training_of([module]) is None
        new = [optimizer for optimizer in optimizers if self._training_of([optimizer]) is None]
        if not is_model and not new:
            return
        training = self._training_of([module, *optimizers])
        if training is None:
            reason = reason_to_leave(module)
            training = Training(None if reason else self._run)
            if reason:
                detail = f"{class_name(module)} is left alone: {reason.detail}"
                self._run.note(StepResult("model", "skipped", detail, code=reason.code))
        for part in [*(module.modules() if is_model else ()), *new]:
            if self._training_of([part]) is None:
                self._trainings[part] = training
        for part in [*([module] if is_model else []), *new]:
            training.hold(part)
        if is_model:
            training.models[module] = None
        self._trains_others |= not optimizers
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)) or _OTHERS
        result = StepResult("model", "applied", f"{class_name(module)}, trained by {names}")
        training.apply(TrainingObjects([module] if is_model else [*training.models], new), result)

    def _training_of(self, parts: Iterable[nn.Module | Optimizer]) -> Training | None:
        """Return the training that one of the objects belongs to, unless it has ended."""
        trainings = (self._trainings.get(part) for part in parts)
        return next((training for training in trainings if training is not None and not training.has_ended), None)

    @property
    def _stepped(self) -> SteppedOptimizers:
        assert self._run.stepped is not None  # not a nested run
        return self._run.stepped

    def _watch_loaders(self) -> None:
        in_all_threads = self._run.in_all_threads
        self._ending.enter_context(implicit_loaders_changed(self._find_loader, in_all_threads=in_all_threads))

    def _find_loader(self, loader: DataLoader[Any]) -> None:
        """Set up a loader that is used while something may be trained."""
        may_train = self._optimizers or self._trains_others or not self._finds_models
        if loader in self._loaders or not self.is_here() or not may_train:
            return
        with self._lock:
            self._loaders[loader] = None
            if self._loader_run is None:
                # An option need not apply to every loader.
                names = [step.name for step in LOADER_STEPS if getattr(self._run.options, step.name, None) is True]
                self._loader_run = self._run.inner(LOADER_STEPS, **dict.fromkeys(names, "auto"))
            self._loader_run.apply(TrainingObjects(loaders=[loader]))

    def _end_runs(self) -> None:
        for training in {*self._trainings.values()}:
            training.end()
        if self._loader_run is not None:
            self._loader_run.__exit__(None, None, None)


_OTHERS = "an optimizer that is not a torch optimizer"


def _mode_here() -> Ambient | None:
    return next((mode for mode in reversed(_modes) if mode.is_here()), None)


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def noting(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        mode = _mode_here()
        if mode is not None:
            mode.note(self)

    return noting


def _note_backward() -> None:
    mode = _mode_here()
    if mode is not None:
        mode.note_backward()


def _note_module(*_: object) -> None:
    mode = _mode_here()
    if mode is not None:
        mode.note_module()


def _watched(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Set up a module if necessary, and call it."""
    if torch.is_grad_enabled() and (mode := _mode_here()) is not None:
        mode.look_at(module)
        interceptors = call_state.interceptors.get(id(module))
        if interceptors is not None:
            return interceptors[0].enter(original, module, *args, **kwargs)
    call_state.watched = True
    try:
        return original(module, *args, **kwargs)
    finally:
        call_state.watched = False
