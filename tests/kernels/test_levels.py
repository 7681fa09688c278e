"""Norms have the same bits at every instruction level; gradients of depthwise convolutions are close to each other."""

import ctypes
import itertools
import platform

import pytest
import torch

from kernels.compared.convolutions import DEPTHWISE, depthwise_case
from kernels.compared.norms import KINDS, OURS, case_of
from nano_loop.cpu import read_machine
from nano_loop.kernels import compiler
from nano_loop.kernels.convolution import depthwise
from nano_loop.kernels.norm import norms


def of_norms():
    """Without layer norms, which depend on whether the compiler fuses multiplications and additions."""
    for kind, dtype, nhwc in itertools.product(KINDS[:2], (torch.bfloat16, torch.float32), (False, True)):
        case = case_of(kind, (3, 48, 13, 41), dtype, nhwc, groups=4)
        case.x[0, 0, 0, 0] = torch.nan
        yield from case.by(OURS)


def of_depthwise_convolutions():
    return DEPTHWISE.ours(depthwise_case(channels=40, kernel=(5, 5), padding=(2, 2), stride=(2, 1)))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize(
    ("kernel", "compute", "tolerance"),
    [(norms.KERNEL, of_norms, 0), (depthwise.KERNEL, of_depthwise_convolutions, 1e-5)],
    ids=["norms", "depthwise convolutions"],
)
def test_results_are_those_of_every_level_of_instructions(monkeypatch, tmp_path, kernel, compute, tolerance):
    results = []
    for level in compiler.LEVELS:
        if level.instruction_sets <= read_machine().instruction_sets:
            compiler.compile_library(kernel.name, level, tmp_path / level.name)
            library = ctypes.CDLL(str(tmp_path / level.name))
            monkeypatch.setattr(kernel, "_library", lambda library=library: library)
            results.append([*compute()])
    for mine, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True)
