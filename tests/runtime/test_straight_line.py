"""Modules whose `forward` only calls children in turn are known by their source, and no others."""

import pytest
from torch import nn

from nano_loop.runtime.objects.straight_line import children_in_turn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))
        self.calls = 0

    @property
    def alias(self):
        return self.first


class Nested(Net):
    def forward(self, x):
        """Return what the third returns."""
        return self.third(self.first(x))


class Assigned(Net):
    def forward(self, x):
        x = self.second(x)
        y = self.first(self.second(x))
        return y  # noqa: RET504


class Returned(Net):
    def forward(self, x):
        return self.first(x)


class Counting(Net):
    def forward(self, x):
        self.calls += 1
        return self.first(x)


class Forked(Net):
    def forward(self, x):
        y = self.first(x)  # noqa: F841
        return self.second(x)


class Joined(Net):
    def forward(self, x):
        return self.first(x) + x


class TwoArguments(Net):
    def forward(self, x, y=None):
        return self.first(x)


class Keyword(Net):
    def forward(self, x):
        return self.first(input=x)


class OfAnother(Net):
    other = nn.Linear(2, 2)

    def forward(self, x):
        return self.other(x)


class ByProperty(Net):
    def forward(self, x):
        return self.alias(x)


class Looping(Net):
    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x)
        return x


class Empty(Net):
    def forward(self, x):
        return None


def decorated(function):
    return lambda self, x: 2 * function(self, x)


class Decorated(Net):
    @decorated
    def forward(self, x):
        return self.first(x)


def test_children_are_in_the_order_of_their_calls():
    nested, assigned = Nested(), Assigned()
    assert children_in_turn(nested) == (nested.first, nested.third)
    assert children_in_turn(assigned) == (assigned.second, assigned.second, assigned.first)
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert children_in_turn(layers) == (*layers,)


@pytest.mark.parametrize(
    "kind",
    [Counting, Forked, Joined, TwoArguments, Keyword, OfAnother, ByProperty, Looping, Empty, Decorated],
)
def test_other_code_is_left_alone(kind):
    assert children_in_turn(kind()) is None


def test_other_containers_and_other_forwards_are_left_alone():
    class Own(nn.Sequential):
        pass

    replaced = Returned()
    replaced.forward = lambda x: x
    for module in (Own(nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)]), nn.Bilinear(2, 2, 2), replaced):
        assert children_in_turn(module) is None
    assert children_in_turn(Returned()) is not None
