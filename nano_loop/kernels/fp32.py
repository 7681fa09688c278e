"""The choice between torch's kernel and a C function for operators of fp32 tensors.

For bf16 the functions are faster on every CPU that has it. For fp32 many of torch's kernels reach the memory's rate, so
each model has a rule, which takes the first guess or what `nano_loop.autotune` has measured. A model without the rule,
such as one of a run with ``exact=True``, has torch's kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.replacement import Algorithms, Arguments, Choose

TORCH, COMPILED = "torch", "compiled"


def rule_of(kernel: CompiledKernel) -> str:
    """Return the name of a model's rule, a `Choose`, that selects the functions of a C file for fp32 tensors."""
    return f"fp32 tensors by {kernel.name}"


def by_guess(call: Any, algorithms: Algorithms, guess: str) -> str:
    """Take the first guess: the rule where nothing is measured."""
    return guess


def always(call: Any, algorithms: Algorithms, guess: str) -> str:
    """Take the function: the rule in reduced precision, where tensors in fp32 are few."""
    return COMPILED


def is_compiled(rule: Choose | None, call: Arguments, algorithms: Algorithms, guess: str | None = None) -> bool:
    """Return whether the C function computes a call.

    Parameters
    ----------
    rule : callable or None
        The rule of the model for which torch computes.
    call : Arguments
        The call.
    algorithms : callable
        Returns both algorithms, which change nothing that others see.
    guess : str, optional
        The algorithm of calls that are not measured. By default the function, on CPUs with AVX-512.
    """
    return rule is not None and rule(call, algorithms, guess or _guess()) == COMPILED


@functools.cache
def _guess() -> str:
    """Return the algorithm of calls that are not measured. Times are those of CPUs with AVX-512."""
    return COMPILED if torch.backends.cpu.get_cpu_capability() == "AVX512" else TORCH
