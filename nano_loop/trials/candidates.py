"""The options that trials vary, and in which order: first what changes most."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from nano_loop.cpu import Machine
from nano_loop.options import DEFAULTS, Options
from nano_loop.parts import Parts
from nano_loop.precisions import SHORT_NAMES
from nano_loop.settings import Settings

Changes = dict[str, Any]

#: Each on by default where it applies; a trial leaves one out.
STEPS_TO_LEAVE_OUT = (
    *("allocator", "fused_optimizer", "fast_dropout", "fast_attention", "fast_convolution"),
    *("fast_activation", "fast_linear", "fast_lstm", "fast_cross_entropy", "fast_norm", "tune_operators", "fast_fetch"),
)
#: The options that are varied.
VARIED = (
    *("precision", "channels_last", "use_ipex", "num_processes", "num_threads", "loader_workers"),
    *STEPS_TO_LEAVE_OUT,
    "compile",
)
#: With these a model may compute other numbers than in fp32; the others move rounding errors at most.
OF_NUMBERS = ("precision", "channels_last", "use_ipex", "compile")
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOT_IN_TRIALS = {"verbose": False, "verify": False, "log_casts": False, "step_time": False, "tune": False}
_LEFT_OUT_OF_LINES = ("tune", "log_casts", "step_time", "verify")


class Stage(NamedTuple):
    """Candidates that are compared with each other, and with the best one so far.

    Attributes
    ----------
    name : str
        What they vary.
    share : float
        The part of the time left that they may take.
    """

    name: str
    share: float


STAGES = (
    Stage("precision and layout", 0.4),
    Stage("ipex", 0.35),
    Stage("processes and threads", 0.4),
    Stage("loader", 0.35),
    Stage("steps", 0.6),
    Stage("compile", 1.0),
)


def alternatives(
    stage: str, now: Options, machine: Machine, steps: Mapping[str, list[str]], parts: Parts | None
) -> list[Changes]:
    """Return what a stage changes of the best options so far.

    Parameters
    ----------
    stage : str
        Its name in `STAGES`.
    now : Options
        The best options so far.
    machine : Machine
        The machine.
    steps : mapping
        The status and the detail of each step of the report with these options.
    parts : Parts or None
        What is trained, as far as it is known.
    """
    return [*_OF_STAGES[stage](now, machine, steps, parts)]


def _precisions(now: Options, machine: Machine, steps: Any, parts: Parts | None) -> Iterator[Changes]:
    fast = ["bf16-mixed"] * machine.has_fast_bf16 + ["16-mixed"] * machine.has_fast_fp16
    layouts = [False, True] if parts is None or _has_convolutions(parts) else [now.channels_last]
    for precision, channels_last in product(["32-true", *fast], layouts):
        yield {"precision": precision, "channels_last": channels_last}


def _ipex(now: Options, *_: Any) -> Iterator[Changes]:
    if find_spec("intel_extension_for_pytorch") is not None:
        yield {"use_ipex": not now.use_ipex}


def _processes(now: Options, machine: Machine, steps: Any, parts: Any) -> Iterator[Changes]:
    cores = machine.num_threads
    if now.cpu_for_each_process is None:
        yield from ({"num_processes": 2**each, "num_threads": None} for each in range(cores.bit_length()))
    fewer = dict.fromkeys([cores // 2, *([1] if cores <= _FEW else [])])
    yield from ({"num_processes": None, "num_threads": each} for each in fewer if 0 < each < cores)


_FEW = 4  # cores: with more, one thread is never the fastest for a step that is worth a trial


def _loaders(now: Options, machine: Machine, steps: Mapping[str, list[str]], parts: Any) -> Iterator[Changes]:
    # Whole batches out of memory are fetched faster than they are sent between processes.
    if steps.get("fast_fetch", ["applied"])[0] == "applied":
        return
    for count in dict.fromkeys([0, 1, 2, machine.num_threads]):
        yield {"loader_workers": count}


def _steps(now: Options, machine: Any, steps: Mapping[str, list[str]], parts: Any) -> Iterator[Changes]:
    for name in STEPS_TO_LEAVE_OUT:
        if steps.get(name, [""])[0] == "applied":
            yield {name: False}
        elif getattr(now, name) is False:
            yield {name: "auto"}


def _compile(now: Options, *_: Any) -> Iterator[Changes]:
    yield {"compile": not now.compile}


_OF_STAGES = {
    "precision and layout": _precisions,
    "ipex": _ipex,
    "processes and threads": _processes,
    "loader": _loaders,
    "steps": _steps,
    "compile": _compile,
}


def _has_convolutions(parts: Parts) -> bool:
    return any(isinstance(each, _CONVOLUTIONS) for model in parts.models for each in model.modules())


def changed(settings: Settings, changes: Changes) -> Settings:
    """Return settings with other values of some options."""
    return replace(settings, options=settings.options.changed(changes, settings.machine))


def for_trial(settings: Settings) -> Settings:
    """Return the settings of a trial, which prints and measures nothing besides."""
    return changed(settings, _NOT_IN_TRIALS)


def effective(changes: Changes, now: Options, fixed: Collection[str] = ()) -> Changes | None:
    """Return what really differs from the present options; None if it is nothing, or is fixed."""
    present = {name: getattr(now, name) for name in changes}
    differing = {name: each for name, each in changes.items() if _value(name, present[name]) != _value(name, each)}
    return differing if differing and not differing.keys() & {*fixed} else None


def _value(name: str, value: Any) -> Any:
    """Return a value by which equal choices are equal: one process is the same as none."""
    return value or 1 if name == "num_processes" else value


def as_text(values: Mapping[str, Any]) -> str:
    """Return options as a person writes them, such as ``precision="bf16", channels_last=True``."""
    return ", ".join(f"{name}={_literal(name, value)}" for name, value in values.items())


def differing(options: Options) -> dict[str, Any]:
    """Return the options that are not the default, besides those that only measure."""
    plain = Options()
    names = (name for name in DEFAULTS if name not in _LEFT_OUT_OF_LINES)
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(plain, name)}


def _literal(name: str, value: Any) -> str:
    if name == "precision":
        short = next((each for each, whole in SHORT_NAMES.items() if whole == value), value)
        value = int(short) if str(short).isdecimal() else short
    return f'"{value}"' if isinstance(value, str) else repr(value)
