"""Kernels are as exact as torch's for all sizes, strides and numbers of threads, and leave unsupported calls to it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.compared import ROWS, convolutions, products
from kernels.compared.oracle import assert_as_exact_as_torch, assert_within, errors_of, same_bits
from nano_loop.kernels.convolution import weight_gradient
from nano_loop.kernels.linear import product

#: The rows, and whether their kernels may use AMX. A kernel that uses AMX is also tested without.
VARIANTS = [
    pytest.param((row, uses_amx), id=name + " without AMX" * (not uses_amx))
    for name, row in ROWS.items()
    for uses_amx in ([True, False] if row.kernel.uses_amx else [True])
]


def of_each(what):
    """Test each row with each of its named cases of a kind. With many threads, most are slow."""

    def params():
        for variant in VARIANTS:
            row, _ = variant.values[0]
            having = getattr(row, what)
            having = having if isinstance(having, dict) else {str(each): each for each in having}
            for place, (name, value) in enumerate(having.items()):
                marks = [pytest.mark.slow] * (what == "large" and max(row.threads) > 4 and place >= 2)
                yield pytest.param(variant.values[0], value, id=f"{variant.id}, {name}", marks=marks)

    return pytest.mark.parametrize(("row", "given"), [*params()], indirect=["row"])


@pytest.fixture
def row(request, monkeypatch):
    """A row whose kernel is available, with its patches applied."""
    found, uses_amx = request.param
    if found.needs_kernel and found.kernel.unavailable is not None:
        pytest.skip(found.kernel.unavailable)
    if not uses_amx:
        monkeypatch.setattr(found.kernel, "uses_amx", False)
    for place, name, value in found.patches:
        monkeypatch.setattr(place, name, value)
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("row", VARIANTS, indirect=True)
def test_any_sizes_are_as_exact_as_torchs(threads, row, data):
    sizes = data.draw(row.sizes)
    threads(sizes.pop("threads", torch.get_num_threads()))
    assert row.supports(row.make(**sizes))
    assert_as_exact_as_torch(row, sizes)


@of_each("cases")
def test_calls_of_a_kind_are_as_exact_as_torchs(row, given):
    call = row.make(**given)
    assert row.supports(call)
    assert_within(errors_of(row, call))


@of_each("large")
def test_results_are_exact_and_do_not_depend_on_the_number_of_threads(threads, row, given):
    call, first = row.make(**given), None
    for count in row.threads:
        threads(count)
        found = row.ours(call)
        if first is None or not row.same_bits:
            first = found
            assert_within(errors_of(row, call, found))
            found = row.ours(call)  # the same bits, even in reused memory
        assert same_bits(found, first)


@of_each("ends")
def test_nothing_is_written_behind_results_and_memory(threads, behind_memory, row, given):
    call = row.make(**given)
    for count in (1, 3, 8):
        threads(count)
        behind_memory.clear()
        (row.behind or row.ours)(call)
        assert len(behind_memory) == (row.memories or len(behind_memory)) > 0
        assert all((each == 7).all() for each in behind_memory)


@of_each("others")
def test_other_calls_are_left_to_torch(row, given):
    assert row.supports(row.make())
    assert not row.supports(given(row.make()))


@pytest.mark.parametrize(
    ("row", "module"),
    [(products.IN_BF16, product), (convolutions.WEIGHT_GRADIENT, weight_gradient)],
    ids=["products in bf16", "gradient of weights in bf16"],
)
def test_without_a_compiler_and_with_more_memory_than_the_bound_it_is_torchs(monkeypatch, row, module):
    for owner, name, value in (
        (module, "SCRATCH_BOUND", 1),
        (module.KERNEL, "unavailable", "no C compiler was found"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not row.supports(row.make())


@of_each("undefined")
def test_what_is_no_number_reaches_what_depends_on_it_alone(row, given):
    call = given()
    for mine, truth in zip(row.ours(call), row.of_fp64(call), strict=False):
        assert torch.equal(mine.isfinite(), truth.isfinite())
