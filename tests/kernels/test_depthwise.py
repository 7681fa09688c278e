"""Gradients of depthwise convolutions are those of every level of instructions; see `test_exactness`, too."""

import ctypes
import platform

import pytest
import torch

from kernels.compared.convolutions import DEPTHWISE, depthwise_case
from nano_loop.cpu import read_machine
from nano_loop.kernels import compiler
from nano_loop.kernels.convolution import depthwise


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_results_are_near_each_other_at_every_level_of_instructions(monkeypatch, tmp_path):
    results = []
    for level in compiler.LEVELS:
        if level.instruction_sets <= read_machine().instruction_sets:
            compiler.compile_library("depthwise", level, tmp_path / level.name)
            library = ctypes.CDLL(str(tmp_path / level.name))
            monkeypatch.setattr(depthwise.KERNEL, "_library", lambda library=library: library)
            call = depthwise_case(channels=40, kernel=(5, 5), padding=(2, 2), stride=(2, 1))
            results.append(DEPTHWISE.ours(call))
    for mine, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("groups", "fewest"), [(12, 1), (24, 1 << 20)])
def test_other_groups_and_few_elements_are_left_to_torch(monkeypatch, groups, fewest):
    assert depthwise.KERNEL.unavailable is None
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", fewest)
    assert not depthwise.supports(*depthwise_case(channels=24), groups)
