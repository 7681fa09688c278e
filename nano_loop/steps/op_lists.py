"""Runs operators of the models in the dtypes of the user's lists: ``bf16_ops`` and ``fp32_ops``.

Operators in no list follow three rules, as in Habana's mixed precision: an operator runs in the dtype of its input;
with inputs of several dtypes, in the widest; in place, in the dtype of the tensor that it writes to. torch does this
itself, and `widest_dtype` does if torch refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from nano_loop.config.op_names import operators_of, overloads_of
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.operators import ruled
from nano_loop.patching.ownership import OperatorRule
from nano_loop.patching.torch_private import arguments_of
from nano_loop.patching.torch_private_compiler import is_compiled
from nano_loop.precision.autocast.default_ops import TORCHS, as_torch_does, below, cast_like_autocast, in_force
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.step import SkipReason, Step

#: Normalizations. Their weights and running statistics are not cast: torch accepts them in fp32 with bf16 inputs.
_NORMS = frozenset(
    f"{prefix}{kind}_norm{suffix}"
    for prefix in ("", "native_", "_native_")
    for kind in ("batch", "instance", "layer", "group")
    for suffix in ("", "_legit")
)
#: Arguments that an operator updates although its schema does not declare it. A cast would be updated instead.
_UPDATED = ("running_mean", "running_var")


class OpLists:
    """The operator lists of a run, with names that `nano_loop.config.op_names.operators_of` accepts."""

    def __init__(self, bf16_ops: Collection[str], fp32_ops: Collection[str]) -> None:
        self.kinds: dict[str, str] = {}  # by listed overload: "low" (autocast's dtype) or "fp32"
        self.rules: dict[str, OperatorRule] = {}  # for operators that torch's autocast would run differently
        self.idle: list[str] = []  # without a dtype to choose: views, and operators without tensor inputs
        for names, kind in ((bf16_ops, "low"), (fp32_ops, "fp32")):
            for name in names:
                before = len(self.kinds)
                for operator in operators_of(name):
                    self._add(operator, kind)
                if len(self.kinds) == before:
                    self.idle.append(name)

    def registered(self) -> AbstractContextManager[None]:
        """Return a context in which operators follow the rules, in calls whose interceptors have the rules."""
        return ruled(frozenset(self.rules), as_torch_does)

    def _add(self, operator: str, kind: str) -> None:
        for name, overload in overloads_of(operator):
            arguments = arguments_of(overload)
            written = [place for place, argument in enumerate(arguments) if _is_written(argument)]
            is_view = any(argument.alias_info is not None for argument in arguments) and not written
            has_tensors = any("Tensor" in str(argument.type) for argument in arguments)
            out = any(arguments[place].kwarg_only or str(arguments[place].type) != "Tensor" for place in written)
            if is_view or not has_tensors or out:
                continue  # a view has the dtype of its input, and an out= operator that of its output
            self.kinds[name] = kind
            if written[:1] == [0]:
                self.rules[name] = _following(overload)
            elif TORCHS.get(name) != kind:
                self.rules[name] = _casting(name, overload, kind)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _casting(name: str, overload: Any, kind: str) -> OperatorRule:
    first_only = kind == "low" and name.partition(".")[0] in _NORMS
    kept = frozenset(
        place
        for place, argument in enumerate(arguments_of(overload))
        if (first_only and place) or argument.name in _UPDATED or _is_written(argument)
    )

    def rule(function: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        if dtype is torch.float32:  # in `disable_casts`
            return function(keys, *args, **kwargs)
        wanted = dtype if kind == "low" else torch.float32

        def casting(tensor: Tensor) -> Tensor:
            return cast_like_autocast(tensor, wanted)

        args = tuple(arg if place in kept else map_tensors(casting, arg) for place, arg in enumerate(args))
        return below(overload, args, map_tensors(casting, kwargs))

    return rule


def _following(overload: Any) -> OperatorRule:
    def rule(function: Any, keys: Any, written: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda tensor: cast_like_autocast(tensor, written.dtype), (args, kwargs))
        return below(overload, (written, *args), kwargs)

    return rule


#: Maximum number of names of a list in the report.
_MOST_NAMES = 4


class OperatorLists(Step):
    """Adds a rule for each listed operator to the calls into the models. Another step enables autocast."""

    name = "op_lists"

    @override
    def begin(self) -> None:
        self._lists: OpLists | None = None

    @property
    @override
    def enabled(self) -> bool:
        return any(self.options.listed_operators.values())

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self.options.kind.autocast is not None:
            return None
        detail = f'lists apply to autocast, as with precision="bf16", and the precision is {self.options.precision}'
        return SkipReason("no_autocast", detail)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self._lists is None:
            self._lists = OpLists(*self.options.listed_operators.values())
            self.undoing.enter_context(self._lists.registered())
            self.undoing.enter_context(in_force(self._lists.kinds))
        for model in parts.models:
            if any(map(is_compiled, model.modules())):
                got = f"{class_name(model)} is compiled, and there are bf16_ops or fp32_ops"
                expected = "compiled models use only torch's lists"
                raise NanoConfigError(error_message(got, expected, "Remove the lists, or pass the model uncompiled"))
            interceptor = self.interceptors.for_model(model, self.name)
            rules = {**interceptor.rules.operators, **self._lists.rules}
            interceptor.rules = interceptor.rules._replace(operators=rules)
        idle = self._lists.idle
        shown = [_shown(names, dtype) for dtype, names in self.options.listed_operators.items() if names]
        return "; ".join([*shown, *([f"no effect on {', '.join(idle)}"] if idle else [])])


def _shown(names: Collection[str], dtype: str) -> str:
    most = list(names)[:_MOST_NAMES]
    more = f" and {len(names) - len(most)} more" if len(names) > len(most) else ""
    return f"{', '.join(most)}{more} in {dtype}"
