"""What a program changes between two steps of its loop holds from the next step on, as in the plain loop."""

import pytest
import torch

from nano_loop import nano
from nano_loop.kernels import fp32
from nano_loop.kernels.activation import activations
from nano_loop.kernels.attention import fp32_attention
from nano_loop.kernels.dropout import bernoulli
from nano_loop.kernels.embedding import lookup
from nano_loop.kernels.linear import fp32_product
from nano_loop.kernels.loss import cross_entropy
from nano_loop.kernels.norm import norm_arguments, rms_norm
from nano_loop.steps.kernels import KERNEL_STEPS, fast_linear

from .changes import ROWS, built, changed_by
from .nested import differences
from .pairs import EXACT, FUSED, check, run_plain
from .pairs import built as arguments_of

MINIMUM_SIZES = (
    *((place, "MIN_ELEMENTS") for place in (activations, bernoulli, lookup, norm_arguments, rms_norm)),
    *((place, "MIN_MULTIPLICATIONS") for place in (fp32_attention, fp32_product)),
    *((cross_entropy, "MIN_LOGITS"), (fast_linear, "_LARGE_IN_FP32")),
)


@pytest.fixture(autouse=True)
def every_kernel_computes(monkeypatch):
    """Let what is too small to pay, or not measured to be faster, be computed in C."""
    for place, name in MINIMUM_SIZES:
        monkeypatch.setattr(place, name, 1)
    monkeypatch.setattr(fp32, "_guess", lambda: fp32.COMPILED)
    for place in (fp32_attention, fp32_product):
        monkeypatch.setattr(place, "is_compiled", lambda rule, *_: rule is not None)


def nothing(program):
    pass


@pytest.mark.parametrize("name", ROWS)
def test_change_holds_from_the_next_step_on(name):
    check(built, changed_by(ROWS[name].change), FUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_plain_loop_sees_the_change(name):
    a = run_plain(built, changed_by(ROWS[name].change))
    b = run_plain(built, changed_by(nothing))
    for e in a["seen"]["result"]:
        if isinstance(e, tuple) and len(e)==2 and isinstance(e[0], type) and issubclass(e[0], Exception):
            print("ERROR", name, e)
    assert [*differences(a["seen"], b["seen"], 1e-4)]
