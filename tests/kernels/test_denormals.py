"""Backwards and optimizer steps treat denormal values as 0; all other code computes with them, before and after."""

import pytest
import torch
from torch import nn

from kernels.compared.norms import OURS, case_of
from nano_loop import accelerated
from nano_loop.kernels.denormals import count_of_threads, flush, restore
from nano_loop.patching.operators import gives_kernels

TINY = torch.finfo(torch.float32).tiny
DENORMAL = 1e-39
MANY = 1 << 20  # elements, which torch splits among its threads


def keeps_denormals():
    return torch.full((MANY,), DENORMAL).mul(0.5).count_nonzero() == MANY


def denormals(tensor):
    return int(((tensor != 0) & (tensor.abs() < TINY)).sum())


def test_results_of_all_threads_are_0_until_they_are_restored(for_each_number):
    def compute():
        threads = count_of_threads()
        flush(threads)
        product = torch.full((MANY,), DENORMAL) * 0.5
        restore(threads)
        assert keeps_denormals()
        return threads, int(product.count_nonzero())

    assert for_each_number(compute, 1, 2, 3) == [(1, 0), (2, 0), (3, 0)]


def test_thread_that_took_denormal_numbers_for_0_before_still_does():
    assert torch.set_flush_denormal(True)
    flush(1)
    restore(1)
    product = torch.tensor([DENORMAL]) * 0.5
    torch.set_flush_denormal(False)
    assert product == 0


@pytest.mark.parametrize("calls", [(restore,), (flush, flush, restore), (flush, restore, restore)])
def test_calls_that_an_interrupt_leaves_out_or_repeats_end_as_before(calls):
    for call in calls:
        call(2)
    assert keeps_denormals()
    assert torch.ones(1).div(0).isinf()  # a CPU exception would kill the process


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize(
    ("kind", "units", "in_c"), [(nn.RNN, 16, True), (nn.GRU, 16, True), (nn.LSTM, 16, True), (nn.LSTM, 300, False)]
)
def test_gradients_that_vanish_over_a_sequence_become_0(called, kind, units, in_c):
    torch.manual_seed(0)
    rnn, x = kind(8, units, batch_first=True), torch.randn(8, 400, 8, requires_grad=True)

    def gradients():
        rnn.zero_grad()
        x.grad = None
        rnn(x)[0][:, -1].square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in rnn.parameters())]

    expected = gradients()
    assert denormals(expected[0])
    with accelerated(rnn, precision="32", tune_operators=False, verbose=False):
        found = gradients()
    assert ("recurrence_backward" in called) == in_c  # otherwise in oneDNN
    assert not any(map(denormals, found))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert keeps_denormals()


@pytest.mark.parametrize("kind", ["batch_norm", "group_norm"])
@pytest.mark.parametrize("nhwc", [True, False])
def test_norms_have_no_denormal_gradients_but_outputs(kind, nhwc):
    case = case_of(kind, (4, 32, 16, 20), torch.float32, nhwc, groups=4)
    case.gradient.mul_(DENORMAL)
    *_, of_x, _, _ = case.by(OURS)
    assert not denormals(of_x)
    out, *_ = case._replace(weight=torch.zeros(32), bias=torch.full((32,), DENORMAL)).by(OURS)
    assert denormals(out) == out.numel()
    assert keeps_denormals()
