import pytest
import torch

from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.walk import find, items_of, length_of, named_attributes_of, walk


def test_find_looks_into_lists_that_are_nested_deeper_than_python_recurses():
    nested = "a"
    for _ in range(900):
        nested = [(nested,), {"key": [nested]}][0]
    assert list(find(str, nested)) == ["a"]


@pytest.mark.parametrize(
    ("bounds", "expected"), [({"depth": 0}, "ab"), ({"depth": 1}, "abc"), ({"most": 3}, "ab"), ({}, "abcd")]
)
def test_walk_takes_the_nearest_objects_first_and_ends_at_its_bounds(bounds, expected):
    reached = walk(["a", ["c", ["d"]], "b"], items_of, **bounds)
    assert "".join(value for value in reached if isinstance(value, str)) == expected


def test_attributes_are_read_without_running_code_of_the_object():
    class Base:
        __slots__ = ("__private", "slot", "unset")

        def __init__(self):
            self.__private = 3

    class Holder(Base):
        __slots__ = ("__dict__",)

        @property
        def refuses(self):
            raise AssertionError

    holder = Holder()
    holder.slot, holder.attribute = 1, 2
    assert sorted(value for _, value in named_attributes_of(holder) if isinstance(value, int)) == [1, 2, 3]


@pytest.mark.parametrize("kind", [tuple, list, set, frozenset, dict])
def test_containers_are_read_without_code_of_their_class(kind):
    def refuse(*_):
        raise AssertionError

    own = type("Own", (kind,), dict.fromkeys(("__iter__", "__len__", "values", "items", "keys"), refuse))
    held = own({"a": 1} if kind is dict else ["a"])
    assert [*items_of(held)] == ([1] if kind is dict else ["a"])
    assert length_of(held) == 1
    assert map_tensors(torch.neg, held) is held
    assert [*find(str, held)] == ([] if kind is dict else ["a"])
