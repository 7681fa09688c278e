"""Models are compiled in place, and are plain again when the run ends."""

import torch
from torch import nn

from nano_loop.parts import Parts
from nano_loop.steps.compile import Compile


class Net(nn.Module):
    """Of the user's own class: torch does not compile a layer of its own that stands alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def counting_backend(calls):
    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    return backend


def test_model_is_compiled_with_the_given_arguments_and_plain_afterwards(step):
    model, calls, x = Net(), [], torch.ones(1, 3)
    expected = model(x)
    made = step(Compile, compile={"backend": counting_backend(calls)})
    assert made.skip_reason(Parts([model])) is None
    made.apply(Parts([model]))
    assert torch.equal(model(x), expected)
    assert len(calls) == 1
    made.undo()
    model(torch.ones(5, 7, 3))
    assert len(calls) == 1
    torch._dynamo.reset()


def test_second_setup_of_a_model_compiles_nothing_and_says_the_same(step):
    model = nn.Linear(3, 2)
    made = step(Compile, compile=True)
    assert made.apply(Parts([model])) == made.apply(Parts([model]))
    assert made.skip_reason(Parts([model])) is None


def test_what_the_user_compiled_stays_compiled(step):
    model = nn.Linear(3, 2)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    made = step(Compile, compile=True)
    assert made.skip_reason(Parts([model])) == "the model is compiled already"
    made.undo()
    assert model._compiled_call_impl is compiled


def test_it_is_off_by_default(step):
    assert not step(Compile).asked
