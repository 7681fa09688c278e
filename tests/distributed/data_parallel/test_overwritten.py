"""Changes that calls, loops and forked children make outside of averaging are averaged or reported by name."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from distributed.data_parallel.averaged import assert_pair, trained
from nano_loop.errors import NanoError, NanoWarning


def loop(setup, model, steps, lr, after_backward=lambda *_: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    setup.setup(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        mse_loss(model(setup.share(x)), setup.share(x[:, :3])).backward()
        after_backward(step, model, setup.share(x))
        optimizer.step()
    return model


def test_rows_that_an_embedding_renorms_by_its_batch_are_named_at_the_first_averaging(team):
    def loop(setup):
        model = nn.Sequential(nn.EmbeddingBag(40, 8, max_norm=0.5), nn.Linear(8, 4))
        setup.setup(model)
        with pytest.raises(NanoError, match=r"Sequential\.0\.weight is not the same .* an embedding's max_norm"):
            model(setup.share(torch.arange(40).view(10, 4))).sum().backward()
        return True

    assert team(2)(trained, loop) == [True, True]


def test_parameter_that_all_ranks_clamp_alike_is_trained(team):
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
            return super().forward(x)

    assert_pair(team(2), lambda setup: loop(setup, Clamped(6, 3), 5, 0.1))


# --- buffers ---


class _Counting(nn.Module):
    def __init__(self, name="codes", persistent=True):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.name = name
        self.register_buffer(name, torch.zeros(3), persistent=persistent)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        y = self.norm(self.linear(x))
        if not self.name.startswith("constant"):
            getattr(self, self.name).lerp_(y.detach().square().mean(0) * x.abs().max(), 0.5)
        return y


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, "_Counting.codes"), ({"name": "constant"}, None), ({"persistent": False}, None)],
    ids=str,
)
def test_buffer_that_parts_is_named_once_on_rank_0(team, settings, named):
    def counted(setup):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop(setup, _Counting(**settings), 3, 0.1)
        return [str(each.message) for each in caught if each.category is NanoWarning]

    first, second = team(2)(trained, counted)
    assert second == []
    assert [named in each and "nano_loop.all_reduce(value)" in each for each in first] == [True] * (named is not None)


# --- gradients written by the loop after the backward ---


def by_hand(setup, write, steps=3):
    return loop(setup, nn.Linear(6, 3), steps, 0.5, write)


def test_gradients_put_after_zero_grad_at_a_later_step_are_averaged(team):
    def write(step, model, x):
        if step == 2:
            model.zero_grad()
            model.weight.grad, model.bias.grad = x.mean(0).expand(3, 6).clone(), x[:, :3].mean(0)

    assert_pair(team(2), by_hand, write)


def test_gradients_that_are_replaced_alike_are_averaged_once(team):
    def write(step, model, x):
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clamp(-0.1, 0.1)

    def loop(setup):
        by_hand(setup, write)
        return setup.transport.counts

    assert team(2)(trained, loop) == [[2, 2, 2]] * 2
    assert_pair(
        team(2), lambda setup: by_hand(setup, lambda step, model, x: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    )
