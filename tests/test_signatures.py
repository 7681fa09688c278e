"""The options stand in three signatures, which say the same."""

import dataclasses
import inspect

import pytest

from nano_loop import TorchNano, nano
from nano_loop.config import NanoConfig
from nano_loop.options import CHECKS

# BigDL-Nano's, in its order, with its defaults.
FIRST_EIGHT = {
    "num_processes": None,
    "use_ipex": False,
    "distributed_backend": "subprocess",
    "process_group_backend": None,
    "precision": 32,
    "cpu_for_each_process": None,
    "channels_last": False,
    "auto_lr": True,
}
NO_OPTIONS = {"given", "from_environment"}  # what NanoConfig remembers beside the options
OURS = {
    "fused_optimizer": "auto",
    "allocator": "auto",
    "fast_dropout": "auto",
    "fast_attention": "auto",
    "fast_convolution": "auto",
    "fast_fetch": "auto",
    "compile": False,
    "bf16_ops": (),
    "fp32_ops": (),
    "gradient_compression": None,
    "timeout": 600.0,
    "verbose": True,
}


def parameters(function):
    """The parameters that are options: not `self`, and not the unknown names that are told in an error."""
    found = inspect.signature(function).parameters.values()
    return [each for each in found if each.name != "self" and each.kind is not each.VAR_KEYWORD]


@pytest.mark.parametrize("call", [TorchNano.__init__, nano, NanoConfig], ids=["TorchNano", "nano", "NanoConfig"])
def test_names_order_and_defaults_are_the_same(call):
    found = [(each.name, each.default, type(each.default)) for each in parameters(call)]
    options = [each for each in found if each[0] not in NO_OPTIONS]
    assert options == [(name, value, type(value)) for name, value in {**FIRST_EIGHT, **OURS}.items()]


@pytest.mark.parametrize("call", [TorchNano.__init__, nano], ids=["TorchNano", "nano"])
def test_the_first_eight_may_be_positional_and_ours_are_by_keyword(call):
    kinds = {each.name: each.kind for each in parameters(call)}
    assert {kinds[name] for name in FIRST_EIGHT} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert {kinds[name] for name in OURS} == {inspect.Parameter.KEYWORD_ONLY}


def test_class_and_decorator_have_the_same_annotations():
    subclass, decorator = ({each.name: each.annotation for each in parameters(f)} for f in (TorchNano.__init__, nano))
    subclass.pop("num_processes")
    decorator.pop("num_processes")  # stands also for the function under a bare @nano
    assert subclass == decorator


def test_class_and_decorator_take_unknown_names_to_tell_them():
    for call in (TorchNano.__init__, nano):
        *_, last = inspect.signature(call).parameters.values()
        assert last.kind is last.VAR_KEYWORD


def test_every_option_is_checked_and_documented():
    fields = [each.name for each in dataclasses.fields(NanoConfig) if each.name not in NO_OPTIONS]
    assert fields == [*CHECKS]
    for name in fields:
        assert name in TorchNano.__doc__
        assert name in NanoConfig.__doc__
