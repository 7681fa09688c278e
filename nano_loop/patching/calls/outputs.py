"""Converts the tensors that calls into a model return, whatever holds them, and leaves the model its own objects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.patching.nested_tensors import Substitution, attributes_with_names, holds_item, put_item
from nano_loop.patching.walk import items_of, walk

#: What every module has, which holds parameters, buffers, hooks and modules.
_OWN = frozenset(vars(nn.Module()))


class Outputs:
    """Converts the outputs of one model, in place.

    An object that the model keeps stays the same object. Its caller sees the converted tensors in it, and the model,
    during its calls, those that it has put there.

    Parameters
    ----------
    model : torch.nn.Module
        Its calls return the outputs. It is held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        #: The holder, the key, the model's item and the converted one, by the holder's id and the key.
        self._lent: dict[tuple[int, Any], tuple[Any, Any, Any, Any]] = {}

    def take_back(self) -> None:
        """Let the objects that the model keeps hold its own tensors, for a call into it."""
        for holder, key, own, converted in self._lent.values():
            if holds_item(holder, key, converted):
                put_item(holder, key, own)

    def lend(self) -> None:
        """Let these objects hold the converted tensors again, once the call has ended."""
        for holder, key, own, converted in self._lent.values():
            if holds_item(holder, key, own):
                put_item(holder, key, converted)

    def converted(self, outputs: Any, convert: Callable[[Tensor], Tensor]) -> Any:
        """Return what a call has returned, with its tensors converted."""
        if torch.compiler.is_compiling():
            return Substitution(convert)(outputs)
        substitution = Substitution(convert, everywhere=True)
        outputs = substitution(outputs)
        if any(not isinstance(holder, (list, dict)) for holder, *_ in substitution.items):
            lent = {**self._lent, **{(id(item[0]), item[1]): item for item in substitution.items}}
            model = self._model()
            attributes = () if model is None else _attributes_of(model)
            kept = {id(value) for value in walk(attributes, _contents)}
            self._lent = {key: item for key, item in lent.items() if id(item[0]) in kept}
        return outputs


def _attributes_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from (value for name, value in vars(module).items() if name not in _OWN)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        return ()
    return items_of(value) or (attribute for _, attribute in attributes_with_names(value))
