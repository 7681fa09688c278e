"""Runs operators of the models in the dtypes of the user's lists: ``bf16_ops`` and ``fp32_ops``."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.torch_private_compiler import is_compiled
from nano_loop.precision.autocast.default_ops import in_force
from nano_loop.precision.autocast.op_lists import OpLists
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.step import SkipReason, Step

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
