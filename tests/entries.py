"""The entry points of nano_loop behind one call: each runs a loop over its parts, and has a report."""

from itertools import chain

import pytest

import nano_loop
from nano_loop import TorchNano, accelerated, nano


def decorated(loop, **options):
    return nano(**options)(loop)


class Trains(TorchNano):
    """Sets up its arguments, and runs a loop over them."""

    def __init__(self, loop, **options):
        super().__init__(**options)
        self.loop = loop

    def train(self, *parts):
        for each in zip(*parts, strict=True) if type(parts[0]) is list else [parts]:
            self.setup(*each)
        return self.loop(*parts)

    def __call__(self, *parts):
        return self.train(*parts)


class InContext:
    """Runs a loop in the body of a `with` statement."""

    report = None

    def __init__(self, loop, **options):
        self.loop, self.options = loop, options

    def taken(self, model, optimizers, *loaders):
        if type(model) is list:  # with a list of optimizers for each
            return model, [*chain.from_iterable(optimizers)], *loaders[0]
        return model, optimizers, *loaders

    def __call__(self, *parts):
        with accelerated(*self.taken(*parts), **self.options) as run:
            self.report = run.report
            return self.loop(*parts)


class Installed(InContext):
    """Runs a loop without any reference to nano_loop, which is installed."""

    def __call__(self, *parts):
        nano_loop.install(**self.options)
        try:
            return self.loop(*parts)
        finally:
            self.report = nano_loop.report()
            nano_loop.uninstall()


EXPLICIT = pytest.mark.parametrize("entry", [decorated, Trains, InContext])
ENTRIES = pytest.mark.parametrize("entry", [decorated, Trains, InContext, Installed])
