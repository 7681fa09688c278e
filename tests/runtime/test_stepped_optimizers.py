"""Stepping an object without setup gives a warning at the step's line, an error, or a line in the report."""

import pytest
import torch
from distributed.small import OPTIONS
from torch import nn

from nano_loop import NanoConfigError, NanoError, NanoWarning, TorchNano, accelerated, nano

X = torch.ones(4, 3)


def fit(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()


def parts(kind=torch.optim.Adam):
    model = nn.Linear(3, 3)
    return model, kind(model.parameters(), 0.1)


class Fits(TorchNano):
    def train(self, *set_up):
        if set_up:
            self.setup(*set_up)
        fit(*parts())


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "fused_optimizer": True}], ids=str)
def test_run_without_setup_warns_by_the_line_of_the_first_step(options):
    with pytest.warns(NanoWarning, match="the loop steps Adam.*Call self.setup") as caught:
        Fits(verbose=False, **options).train()
    assert [warning.filename for warning in caught] == [__file__]
    assert ("fused_optimizer=True" in str(caught[0].message)) == bool(options)


@pytest.mark.slow
def test_several_ranks_without_setup_are_an_error():
    with pytest.raises(NanoError, match="no model or optimizer was set up"):
        Fits(**OPTIONS).train()


def test_run_inside_of_one_that_sets_nothing_up_is_not_its_concern():
    with accelerated(verbose=False):
        nano(verbose=False)(fit)(*parts())


def code_of(run):
    results = [result for result in run.report.results if result.name == "fused_optimizer"]
    return [(result.status, result.code) for result in results]


def test_optimizers_that_do_not_train_what_was_set_up_are_warned_of():
    applied, others = ("applied", None), "Adam does not train a model that was set up"
    with accelerated(parts()[0], verbose=False) as run:
        fit(*parts())
    assert code_of(run) == [("skipped", "not_set_up")]
    model, optimizer = parts()
    with accelerated(model, optimizer, verbose=False) as run:
        fit(model, optimizer)
    assert code_of(run) == [applied]
    with accelerated(model, parts()[1], verbose=False) as run:
        fit(model, optimizer)
    assert code_of(run) == [applied], "it trains a model that was set up"
    model, optimizer = parts()
    with accelerated(parts()[0], optimizer, verbose=False) as run, pytest.warns(NanoWarning, match=others) as caught:
        fit(model, optimizer)
    assert code_of(run) == [applied], "its model was not set up"
    assert [warning.filename for warning in caught] == [__file__]


def test_optimizer_of_a_tensor_is_that_of_no_model_and_in_the_report_alone():
    image = torch.zeros(2, 2, requires_grad=True)
    optimizer = torch.optim.SGD([image], 0.1)
    with accelerated(parts()[0], optimizer, verbose=False) as run:
        image.sum().backward()
        optimizer.step()
    assert code_of(run) == [("applied", None), ("skipped", "not_set_up")]


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 3)

    def forward(self, x):
        return self.gru(x)[0]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Gru, {"fast_fetch": True}),
        *((Gru, {"precision": "bf16", name: True}) for name in ("fast_attention", "fast_norm")),
    ],
    ids=str,
)
def test_option_that_applies_to_nothing_is_an_error_at_the_first_step(model, options):
    made = model()
    before = [parameter.clone() for parameter in made.parameters()]
    (name,) = options.keys() - {"precision"}
    with pytest.raises(NanoConfigError, match=f"{name}=True"):
        nano(verbose=False, **options)(fit)(made, torch.optim.Adam(made.parameters()))
    assert all(map(torch.equal, made.parameters(), before))


def test_option_applies_where_one_of_the_models_has_what_it_is_for():
    made = parts()
    with accelerated(*made, channels_last=True, verbose=False) as run:
        images = nn.Conv2d(3, 1, 1)
        run.setup(images, torch.optim.SGD(images.parameters(), 0.1))
        fit(*made)
    assert "channels_last" in run.report.applied
