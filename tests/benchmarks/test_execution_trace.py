"""A trace has what this thread computes: operators in each other, with tensors, modules and parts of the loop."""

import threading

import torch
from torch import nn

from benchmarks.execution_trace import Recorder


def recorded(function, model=None):
    names = {} if model is None else {id(each): name for name, each in model.named_modules()}
    recorder = Recorder(names)
    assert recorder.is_recording
    function()
    return recorder.finish()


def names_of(operators):
    return [each.name for each in operators]


def test_operators_are_in_those_that_called_them():
    layer, x = nn.Linear(4, 3), torch.ones(2, 4)

    def cast_and_multiply():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)

    (linear,) = recorded(cast_and_multiply)
    assert names_of([linear, *linear.inner]) == ["linear", "to", "to", "to", "linear"]
    assert [each.dtype for each in linear.inputs] == ["fp32"] * 3
    assert [each.dtype for each in linear.inner[-1].inputs] == ["bf16"] * 3
    (output,) = linear.outputs
    assert (output.dtype, output.numel, output.itemsize, output.nbytes) == ("bf16", 6, 2, 12)
    assert {each.name for each in linear.all()} >= {"linear", "to", "_to_copy", "copy_", "addmm"}


def test_part_and_module_are_those_of_the_loop():
    model = nn.ModuleDict({'first "layer"': nn.Linear(4, 3), "others": nn.Sequential(nn.Tanh())})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model["others"](model['first "layer"'](torch.ones(2, 4))).sum().backward()
        optimizer.step()

    operators = recorded(step, model)
    places = {(each.name, each.part, each.module) for each in operators}
    assert places >= {
        ("ones", "forward", ""),
        ("linear", "forward", 'first "layer"'),
        ("tanh", "forward", "others.0"),
        ("sum", "forward", ""),
        ("tanh_backward", "backward", "others.0"),
        ("mm", "backward", 'first "layer"'),
    }
    assert {part for name, part, _ in places if name in ("_foreach_add_", "add_")} == {"optimizer"}


def test_other_threads_are_left_out():
    def other():
        thread = threading.Thread(target=lambda: torch.ones(3).exp())
        thread.start()
        thread.join()
        torch.ones(3).tanh()
