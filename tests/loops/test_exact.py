"""With ``exact=True``, loops compute bit for bit what they compute without a run; with the defaults they do not."""

import pytest
import torch
from distributed import small

from nano_loop import all_gather, nano
from nano_loop.config.declarations import EXACT as VALUES

from .changes import built, changed_by
from .nested import differences
from .pairs import EXACT, FUSED, check, is_model, run_accelerated, run_plain
from .pairs import built as arguments_of
from .tasks import ADAMW, ConvNet, Net, fit, images, job
from .test_changes import every_kernel_computes, nothing  # noqa: F401 - a fixture

#: A loop over a model that uses every kernel, with three optimizers.
WITH_EVERY_KERNEL = changed_by(nothing)


def test_an_exact_loop_computes_what_the_plain_one_does():
    check(built, WITH_EVERY_KERNEL, EXACT)


def test_a_loop_with_the_defaults_rounds_otherwise():
    """Otherwise the test above would prove nothing."""
    ours, plain = (
        run_accelerated(built, WITH_EVERY_KERNEL, FUSED)[0]["seen"],
        run_plain(built, WITH_EVERY_KERNEL)["seen"],
    )
    assert [*differences(ours, plain)]


def test_report_of_an_exact_run_has_no_step_that_changes_bits():
    train = nano(exact=True, verbose=False)(fit)
    train(**arguments_of(job(model=ConvNet, loader=images)))
    named = {result.name for result in train.report.results}
    assert {"allocator", "fast_dropout", "fast_fetch"} <= named
    assert not named & VALUES.keys()


@pytest.mark.usefixtures("nothing_left")
def test_two_ranks_are_alike_to_the_bit():
    def train(**arguments):
        losses = fit(**arguments)
        (model,) = filter(is_model, arguments.values())
        return losses, all_gather(small.weights(model))

    losses, weights = nano(**small.OPTIONS, exact=True)(train)(**arguments_of(job(model=Net, optimizer=ADAMW)))
    assert losses
    assert torch.equal(weights[0], weights[1])
