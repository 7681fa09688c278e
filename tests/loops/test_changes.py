"""A change that a program makes between two steps takes effect in the next step, as in the plain loop."""

from dataclasses import replace

import pytest
from kernels.conftest import compute_every_size

from nano_loop import nano
from nano_loop.config.declarations import EXACT as VALUES
from nano_loop.steps import models
from nano_loop.steps.kernel_table import KERNEL_STEPS

from .changes import ROWS, built, calls, changed_by, layers
from .pairs import EXACT, FUSED, NHWC_FUSED, PRODUCTS, SHIPPED_NHWC, Config, check
from .pairs import built as arguments_of

IN_FP32 = [step for step in KERNEL_STEPS if step.row.in_fp32 is not None]
#: Each step that uses a single kernel.
ALONE = [Config(step.name, VALUES | {step.name: True}, tolerance=FUSED.tolerance, subclass=True) for step in IN_FP32]
#: A row compares 400 tensors, of which one is always an outlier.
IN_BF16 = replace(SHIPPED_NHWC, spreads=2.0)
TOGETHER = (EXACT, PRODUCTS, NHWC_FUSED)
#: Parts of a call, tested with each kernel alone. In bf16, several loops have to be compared.
OF_CALLS = [name for name, row in ROWS.items() if row.change.__module__ in (calls.__name__, layers.__name__)]


@pytest.fixture(autouse=True)
def every_kernel_computes(monkeypatch):
    """Compute calls in C that are too small to benefit, or not measured to be faster."""
    monkeypatch.setattr(models, "LARGE_IN_FP32", 1)
    compute_every_size(monkeypatch)


def nothing(program):
    """Change nothing."""


def check_row(name, config):
    with ROWS[name].before():
        check(built, changed_by(ROWS[name].change), config)


@pytest.mark.parametrize("name", ROWS)
def test_change_holds_from_the_next_step_on(name):
    check_row(name, FUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, id=f"{name}-{config.name}")
        for name, row in ROWS.items()
        for config in (*TOGETHER, *(ALONE if name in OF_CALLS else ()))
    ],
)
def test_change_holds_with_each_step_and_kernel(name, config):
    if config.name not in ROWS[name].without:
        check_row(name, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CALLS)
def test_change_holds_in_bf16(name):
    if IN_BF16.name not in ROWS[name].without:
        check_row(name, IN_BF16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.is_seen])
def test_acceleration_that_goes_on_as_before_is_found(name):
    """Each row can fail: the accelerated loop runs first, without the change."""
    changes = [nothing, ROWS[name].change]
    with pytest.raises(AssertionError, match=r"off by| for |keys"), ROWS[name].before():
        check(built, changed_by(lambda program: changes.pop(0)(program)), EXACT)


def test_program_meets_all_that_is_on_by_default():
    functions = {step.name: step.row.in_fp32.kernel for step in IN_FP32}
    before = {name: kernel.calls for name, kernel in functions.items()}
    train = nano(verbose=False)(changed_by(nothing))
    seen = train(**arguments_of(built))
    status = {result.name: result.status for result in train.report.results}
    expected = {*functions, "fused_optimizer", "fast_dropout", "fast_fetch"}
    assert {name for name in expected if status.get(name) != "applied"} == set()
    assert {name for name, kernel in functions.items() if kernel.calls == before[name]} == set()
    assert not [each for each in seen if isinstance(each, tuple)]  # an error
