"""Models that are traced, scripted or exported inside a run are the plain models."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.export import export as export_by_name
from torch.jit import trace as trace_by_name

from nano_loop import accelerated

DEPRECATED = pytest.mark.filterwarnings(
    "ignore:`torch.jit.*is deprecated",
    "ignore:`torch.jit.*is not supported in Python",
    "ignore:The given buffer is not writable",  # torch 2.12, when it loads an export
    "ignore:JIT pass will be deprecated",  # by IPEX, once another test has imported it
)


class Net(nn.Module):
    """A convolution, a view, which needs NCHW, and attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 36, 5)

    def forward(self, x):
        x = self.conv(x).relu()
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.sigmoid(self.head(x.view(x.size(0), -1)))


def again(program):
    """Save and reload a program."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


EXPORTS = {
    "trace": lambda model, x: torch.jit.trace(model, x),
    "trace of keywords": lambda model, x: torch.jit.trace(model, example_kwarg_inputs={"x": x}),
    "trace_module": lambda model, x: torch.jit.trace_module(model, {"forward": x}),
    "trace by name": lambda model, x: trace_by_name(model, x, check_trace=False),
    "script": lambda model, x: torch.jit.script(model),
    "script of a traced": lambda model, x: torch.jit.script(torch.jit.trace(model, x)),
    "export": lambda model, x: again(torch.export.export(model, (x,))),
    "strict export": lambda model, x: again(torch.export.export(model, (x,), strict=True)),
    "export by name": lambda model, x: again(export_by_name(model, (x,))),
    "fx": lambda model, x: copy.deepcopy(torch.fx.symbolic_trace(model)),  # shares the model's layers unless copied
}


@pytest.fixture(params=[{}, {"precision": "bf16", "channels_last": True}], ids=["fp32", "both"])
def running(request):
    """A model in a run, and a copy from before the run."""
    torch.manual_seed(0)
    model = Net().eval()
    plain = copy.deepcopy(model)
    with torch.no_grad(), accelerated(model, verbose=False, **request.param):
        yield model, plain


@DEPRECATED
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_exported_model_computes_what_the_plain_one_computes(running, export):
    model, plain = running
    x = torch.rand(2, 3, 6, 6)
    during = model(x)
    exported = export(model, x)
    y = torch.rand(2, 3, 6, 6)
    torch.testing.assert_close(exported(y), plain(y), rtol=1e-6, atol=1e-6)
    assert torch.equal(model(x), during), "the model itself goes on as before"


@DEPRECATED
def test_classes_and_functions_are_scripted_as_without_a_run(running):
    half = 0.5

    def halve(x: torch.Tensor):
        return x * half

    with pytest.raises(RuntimeError, match="half"):  # a closure's float, which TorchScript rejects
        torch.jit.script(halve)
    scripted = torch.jit.script(doubled)
    assert scripted(torch.ones(1)).item() == 2

    @torch.jit.script
    class Pair:
        def __init__(self, first: int):
            self.first = first

    assert Pair(3).first == 3


def doubled(x: torch.Tensor):
    return x * 2
