"""Tensors are found and changed at any nesting level; containers keep their classes."""

import dataclasses
import functools
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from nano_loop.patching.nested_tensors import Substitution, map_tensors
from nano_loop.patching.walk import find

Pair = namedtuple("Pair", "left right")


class Scored(tuple):
    """A tuple subclass with a two-argument constructor and an attribute."""

    def __new__(cls, tensor, score):
        made = super().__new__(cls, (tensor, score))
        made.name = "kept"
        return made


class Named(Pair):
    """A named tuple with a one-argument constructor."""

    def __new__(cls, left):
        return super().__new__(cls, left, "right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass
class Output(OrderedDict):
    """A mapping that is also a dataclass, like the outputs of transformers' models."""

    logits: torch.Tensor

    def __post_init__(self):
        self["logits"] = self.logits

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return Output, (self.logits,)


def double(tensor):
    return tensor * 2


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (ONE, lambda value: value),
        ((1, ONE), lambda value: value[1]),
        ([ONE, "text"], lambda value: value[0]),
        ({"a": {"b": [ONE]}}, lambda value: value["a"]["b"][0]),
        (OrderedDict(a=ONE), lambda value: value["a"]),
        (UserDict(a=ONE), lambda value: value["a"]),
        (Pair(ONE, 3), lambda value: value.left),
        (Named(ONE), lambda value: value.left),
        (Scored(ONE, 1.0), lambda value: value[value.name != "kept"]),
        (Frozen(ONE), lambda value: value.tensor),
        ({ONE}, lambda value: next(iter(value))),
        (deque([ONE], maxlen=3), lambda value: value[0]),
        (functools.partial(torch.add, ONE, other=1), lambda value: value.args[0]),
        (functools.partial(dict, a=ONE), lambda value: value.keywords["a"]),
        (Output(ONE), lambda value: value.logits),
        (Output(ONE), lambda value: value["logits"]),
        (pack_sequence([ONE]), lambda value: value.data),
        (torch.ones(2, 2).max(dim=0), lambda value: value.values),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensor_changes_in_a_container_of_the_same_class(value, inside):
    before = inside(value).clone()
    changed = map_tensors(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, value)
    assert type(changed) is type(value)
    assert torch.equal(inside(changed), before * 2)
    assert torch.equal(inside(value), before), "the given value must not be changed"


@pytest.mark.parametrize(
    "value",
    [
        *(ONE, (ONE,), [ONE], {"a": ONE}, Pair(ONE, 1), Frozen(ONE), pack_sequence([ONE]), None, "text", object(), 3),
        *({ONE}, deque([ONE]), functools.partial(print, ONE, sep=ONE)),
        lambda: ONE,
    ],
)
def test_what_needs_no_change_is_the_very_same_object(value):
    assert map_tensors(lambda tensor: tensor, value) is value


def test_dataclass_class_itself_is_left_alone():
    assert map_tensors(double, Frozen) is Frozen


@pytest.mark.parametrize(
    "container", [[ONE, "kept"], deque([ONE]), {0: ONE, 1: "kept"}, OrderedDict({0: ONE}), UserDict({0: ONE})]
)
def test_substitutes_stand_in_the_callers_containers_until_they_are_restored(container):
    substitution = Substitution(double)
    assert substitution(container) is container
    assert torch.equal(container[0], ONE * 2)
    substitution.restore()
    assert container[0] is ONE


def test_substitutes_stand_in_sets_and_in_what_a_function_has_from_around_it():
    def made(tensor):
        return lambda other=tensor, *, third=tensor: [tensor, inner(), other, third]

    inner = (lambda tensor: lambda: tensor)(ONE)
    items, function, substitution = {ONE, "kept"}, made(ONE), Substitution(double)
    substitution([items, function])
    assert torch.equal(next(find(torch.Tensor, [*items])), ONE * 2)
    assert torch.equal(function()[0], ONE * 2)
    assert len({*map(id, function())}) == 1
    substitution.restore()
    assert items == {ONE, "kept"}
    assert all(tensor is ONE for tensor in function())


@pytest.mark.parametrize("value", [(1, ONE), Pair(ONE, 2), Frozen(ONE)])
def test_substitutes_stand_in_copies_of_what_cannot_be_written_to(value):
    substituted = Substitution(double)(value)
    assert type(substituted) is type(value)
    assert substituted is not value
    items = vars(substituted) if isinstance(value, Frozen) else substituted
    assert torch.equal(next(find(torch.Tensor, items)), ONE * 2)


def test_an_object_at_several_places_stays_one_and_may_hold_itself():
    pair, items = (ONE, "kept"), [ONE]
    items.append(items)
    value = {"pair": pair, "tensor": ONE, "items": items, "again": [pair, items]}
    Substitution(double)(value)
    assert torch.equal(value["tensor"], ONE * 2)
    assert value["tensor"] is value["pair"][0] is items[0]
    assert value["again"][0] is value["pair"]
    assert value["again"][1] is value["items"] is items[1] is items


def test_what_a_call_writes_into_containers_stays():
    batch, items = {"image": ONE, "gone": ONE}, [ONE, ONE]
    substitution = Substitution(double)
    substitution((batch, {"nested": items}))
    batch["new"], items[1] = "written", "over"
    del batch["gone"]
    substitution.restore()
    assert batch == {"image": ONE, "new": "written"}
    assert items[0] is ONE
    assert items[1] == "over"


def test_what_a_call_writes_into_a_substitute_reaches_the_original():
    original = torch.ones(2)
    substitution = Substitution(torch.clone)
    substitution([original])
    substitution([original])[0].sub_(3)
    substitution.restore()
    assert original.tolist() == [-2, -2]


def test_substitutes_that_are_views_are_written_through_once():
    original = torch.ones(2, 3)
    substitution = Substitution(torch.t)
    substitution(original).mul_(2)
    substitution.restore()
    assert original.eq(2).all()


def test_writes_under_inference_mode_reach_the_original_too():
    with torch.inference_mode():
        original = torch.ones(2)
        substitution = Substitution(torch.clone)
        substitution(original).mul_(3)
        substitution.restore()
    assert original.tolist() == [3, 3]
