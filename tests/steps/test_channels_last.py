"""Images, and the weights that meet them, lie as NHWC during a run."""

import pytest
import torch
from torch import nn

from nano_loop.parts import Parts
from nano_loop.steps.channels_last import ChannelsLast


def strides(model):
    return {name: tensor.stride() for name, tensor in model.state_dict().items()}


class Recorder(nn.Module):
    """Remembers how its inputs lie."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.rand(1, 3, 6, 6))

    def forward(self, batch, *, mask=None):
        self.seen = [batch["image"], mask]
        return self.conv(batch["image"] - self.mean)


def is_nhwc(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_parameters_buffers_and_nested_inputs_are_nhwc_and_go_back(step):
    model = Recorder()
    before, identities = strides(model), [id(parameter) for parameter in model.parameters()]
    made = step(ChannelsLast, channels_last=True)
    made.apply(Parts([model]))
    model({"image": torch.rand(2, 3, 6, 6)}, mask=torch.rand(2, 3, 6, 6))
    assert all(map(is_nhwc, [model.conv.weight, model.mean, *model.seen]))
    made.undo()
    assert strides(model) == before
    assert [id(parameter) for parameter in model.parameters()] == identities


def test_volumes_become_ndhwc(step):
    model = nn.Conv3d(2, 3, 2)
    made = step(ChannelsLast, channels_last=True)
    assert made.apply(Parts([model])) == "1 of 2 parameters, 5-D inputs"
    assert model.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_values_and_gradients_are_those_of_nchw(step):
    model, x = Recorder(), torch.rand(2, 3, 6, 6, requires_grad=True)
    expected = model({"image": x})
    gradients = torch.autograd.grad(expected.sum(), [x, *model.parameters()])
    step(ChannelsLast, channels_last=True).apply(Parts([model]))
    out = model({"image": x})
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), [x, *model.parameters()]), gradients)


def test_gradient_that_is_there_already_moves_with_its_parameter(step):
    model = nn.Conv2d(3, 4, 3)
    model(torch.rand(1, 3, 5, 5)).sum().backward()
    before = model.weight.grad.clone()
    made = step(ChannelsLast, channels_last=True)
    made.apply(Parts([model]))
    assert model.weight.grad.stride() == model.weight.stride()
    assert torch.equal(model.weight.grad, before)
    made.undo()
    assert model.weight.grad.stride() == model.weight.stride() == before.stride()


@pytest.mark.parametrize("kwargs", [{}, {"fused": True}])
def test_optimizer_state_moves_there_and_back(step, kwargs):
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.Adam(model.parameters(), **kwargs)
    model(torch.rand(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    made = step(ChannelsLast, channels_last=True)
    for change, laid_out in (
        (lambda: made.apply(Parts([model], [optimizer])), is_nhwc),
        (made.undo, torch.Tensor.is_contiguous),
    ):
        change()
        assert laid_out(model.weight)
        assert laid_out(optimizer.state[model.weight]["exp_avg"])


def test_view_behind_a_convolution_works_as_in_the_plain_loop(step):
    model, x = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 6, 6)
    expected = model(x).view(2, -1)
    step(ChannelsLast, channels_last=True).apply(Parts([model]))
    torch.testing.assert_close(model(x).view(2, -1), expected)
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(model.parameters()), torch.cat([p.flatten() for p in model.parameters()])
    )


def test_view_that_is_wrong_in_any_layout_raises_what_torch_raises(step):
    step(ChannelsLast, channels_last=True).apply(Parts([nn.Conv2d(1, 1, 1)]))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        torch.ones(2, 3).view(5)
    with pytest.raises(RuntimeError, match=r"self.stride\(-1\) must be 1"):
        torch.ones(2, 3).T.view(torch.int16)


def test_memory_that_other_processes_share_is_left_where_it_is(step):
    model = nn.Conv2d(3, 4, 3).share_memory()
    pointer = model.weight.data_ptr()
    step(ChannelsLast, channels_last=True).apply(Parts([model]))
    assert model.weight.data_ptr() == pointer


def test_model_without_images_is_skipped(step):
    made = step(ChannelsLast, channels_last=True)
    assert made.skip_reason(Parts([nn.Linear(2, 2)])) == "the model has no 4-D or 5-D parameters"
    assert not made.required


def test_it_is_off_by_default(step):
    assert not step(ChannelsLast).asked
