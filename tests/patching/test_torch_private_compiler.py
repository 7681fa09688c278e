"""Tells when a name that `torch.compile` keeps for itself is gone."""

import torch
from torch import nn

from nano_loop.patching import torch_private_compiler as private


def test_function_is_marked_as_the_public_decorator_marks_it():
    def ours(): ...

    def theirs(): ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(private.constant_when_traced(ours)) == vars(theirs) != {}


def test_compiled_models_are_told_from_others_and_compiling_can_be_taken_back():
    model = nn.Linear(2, 2)
    assert not private.is_compiled(model)
    assert private.is_compiled(torch.compile(model, backend="eager"))
    before = dict(vars(model))
    model.compile(backend="eager")
    assert private.is_compiled(model)
    private.forget_compiled(model)
    assert not private.is_compiled(model)
    assert vars(model).keys() - before.keys() <= {"_compiled_call_impl"}
    private.call_compiled(model, lambda module, x: private.plain_call(module, x) + 1)
    assert private.is_compiled(model)
    compiled = model(torch.ones(2))
    private.forget_compiled(model)
    assert torch.equal(compiled, model(torch.ones(2)) + 1)


def test_modes_of_torch_compile_are_options():
    assert private.mode_options(None, None) == private.mode_options("default", None) == {}
    assert private.mode_options("max-autotune-no-cudagraphs", None)["max_autotune"] is True


def test_compiled_functions_are_found_and_compiled_again():
    def double(x):
        return 2 * x

    compiled = torch.compile(double, backend="eager")
    assert private.compile_context(double) is None
    assert private.uncompiled(compiled) is double
    assert private.compile_context(compiled)(double)(torch.ones(1)) == 2


def test_call_of_a_module_is_compiled_by_the_context_of_another():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert private.compiled_call(one) is None
    one.compile(backend="eager")
    private.compile_call(other, private.compile_context(private.compiled_call(one)))
    assert private.is_compiled(other)
    assert other(torch.ones(1, 1)).shape == (1, 1)
