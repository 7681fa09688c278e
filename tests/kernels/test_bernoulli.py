"""Masks, and all later draws, are those of torch's own generator."""

import functools
import hashlib
import os
import threading

import pytest
import torch

from kernels.conftest import forget_libraries
from nano_loop.kernels import bernoulli
from nano_loop.kernels import build as compiled
from nano_loop.kernels.bernoulli import KERNEL, MIN_ELEMENTS, replacement, vectorized_draws
from nano_loop.patching.operators import overridden

LARGE = 100_003
RATES = [0.1, 0.5, 0.9, 1 / 3, 5e-6, 2**-17, 2**-53, 1e-300, 1 - 2**-53, 0.0, 1.0]
DTYPES = [*bernoulli._ONES]
same_draws = pytest.mark.skipif(KERNEL.unavailable is not None, reason=f"fast masks: {KERNEL.unavailable}")


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        yield


def drawn(make, p, seed=1, skipped=0, **kwargs):
    """Return draws from a seed after skipping some values, and what is drawn next."""
    torch.manual_seed(seed)
    torch.rand(skipped)
    return make().bernoulli_(p, **kwargs), torch.rand(3), torch.randn(17), torch.get_rng_state()


def check(make, p, **kwargs):
    expected = drawn(make, p, **kwargs)
    with vectorized_draws():
        actual = drawn(make, p, **kwargs)
    assert all(map(torch.equal, actual, expected))


@same_draws
@pytest.mark.parametrize("p", RATES)
def test_draws_of_any_rate_are_torchs(filled, p):
    check(lambda: torch.empty(LARGE), p)
    assert filled == [LARGE]


@same_draws
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_of_any_dtype_are_torchs(filled, dtype):
    check(lambda: torch.empty(LARGE, dtype=dtype), 0.9)
    assert filled == [LARGE]


@same_draws
@pytest.mark.parametrize("skipped", [0, 1, 2, 622, 623, 624, 625, 1247])
@pytest.mark.parametrize("count", [MIN_ELEMENTS, MIN_ELEMENTS + 1, 312 * 20])
def test_draws_from_any_place_in_the_generators_numbers_are_torchs(filled, skipped, count):
    """Also if an element uses the last value of a state and the first of the next."""
    check(lambda: torch.empty(count), 0.5, skipped=skipped)
    assert filled == [count]


LAYOUTS = {
    "transposed": lambda: torch.empty(200, 300).t(),
    "permuted": lambda: torch.empty(20, 30, 40).permute(2, 0, 1),
    "channels_last": lambda: torch.empty(8, 16, 20, 20).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda: torch.empty(200, 300)[:, ::2],
    "a part": lambda: torch.empty(3, 40_000)[1],
    "expanded away": lambda: torch.empty(1, 40_000),
    "small": lambda: torch.empty(100),
    "empty": lambda: torch.empty(0),
    "scalar": lambda: torch.empty(()),
}


@same_draws
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_draws_of_any_layout_are_torchs(make):
    check(make, 0.7)


@same_draws
def test_generator_of_the_users_is_drawn_from_and_advanced(filled):
    def of(generator):
        first = torch.empty(LARGE).bernoulli_(0.3, generator=generator)
        return first, torch.rand(5, generator=generator)

    expected = of(torch.Generator().manual_seed(9))
    before = torch.get_rng_state()
    with vectorized_draws():
        assert all(map(torch.equal, of(torch.Generator().manual_seed(9)), expected))
    assert torch.equal(torch.get_rng_state(), before)
    assert filled == [LARGE]


@same_draws
def test_normal_number_that_torch_keeps_for_later_is_kept():
    """`torch.randn` of an odd count keeps the second value of a pair in the generator's state."""

    def numbers():
        torch.manual_seed(2)
        return torch.randn(1), torch.empty(LARGE).bernoulli_(0.5), torch.randn(1), torch.randn(1)

    expected = numbers()
    with vectorized_draws():
        assert all(map(torch.equal, numbers(), expected))


@same_draws
@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_rate_that_torch_refuses_is_refused(p):
    with pytest.raises(RuntimeError) as expected:
        torch.empty(LARGE).bernoulli_(p)
    with vectorized_draws(), pytest.raises(RuntimeError) as caught:
        torch.empty(LARGE).bernoulli_(p)
    assert str(caught.value).partition("\n")[0] == str(expected.value).partition("\n")[0]


@same_draws
def test_without_torchs_kernel_the_draws_are_the_same():
    """torch 2.8 does not expose its kernels."""
    makes = [functools.partial(torch.empty, count) for count in (10, LARGE)]
    with overridden("bernoulli_.float", lambda _: replacement(None), "CPU"):
        actual = [drawn(make, 0.4) for make in makes]
    for one, make in zip(actual, makes, strict=True):
        assert all(map(torch.equal, one, drawn(make, 0.4)))


@same_draws
def test_threads_that_draw_at_once_share_no_number():
    with vectorized_draws():
        masks = []
        threads = [
            threading.Thread(target=lambda: masks.extend(torch.empty(LARGE).bernoulli_(0.5) for _ in range(20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks) == 80


# --- the compiler ---


def made():
    """Return the result of a new look-up."""
    forget_libraries()
    return compiled.compiled("bernoulli", False).draw_bernoulli


#: In addition to those of `tests/faults/damaged_files.py`.
DAMAGES = {
    "cut off in the middle of its last page": lambda library, content: library.write_bytes(content[:-40]),
    "empty": lambda library, content: library.touch(),
    "endless": lambda library, content: library.touch() or os.truncate(library, 1 << 40),
}


@same_draws
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_library_is_compiled_again(compiled_here, damage):
    assert made()
    (library,) = compiled_here.iterdir()
    content = library.read_bytes()
    library.unlink()
    damage(library, content)
    assert made()
    assert [*compiled_here.iterdir()] == [library]
    assert library.read_bytes()[-32:] == hashlib.sha256(library.read_bytes()[:-32]).digest()


@same_draws
def test_folder_that_others_may_write_to_is_not_loaded_from(compiled_here):
    compiled_here.mkdir(parents=True)
    compiled_here.chmod(0o777)
    assert made()
    assert not [*compiled_here.iterdir()]


def test_planted_difference_in_the_draws_is_noticed(monkeypatch):
    monkeypatch.setattr(
        bernoulli, "fill", lambda tensor, p, generator: tensor.bernoulli_(p, generator=generator).neg_()
    )
    assert not bernoulli._draws_as_torch()
