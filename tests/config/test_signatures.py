"""The options are the parameters of the class and of the decorator, which do not repeat their documentation."""

import inspect
import pickle
from typing import get_type_hints

import pytest
from torch import nn

from nano_loop import TorchNano, nano
from nano_loop.config.declarations import DEFAULTS, OPTIONS
from nano_loop.config.options import Options

# BigDL-Nano's options, in its order, with its defaults.
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
# BigDL-Nano's nano accepts seven of them.
POSITIONAL = {
    TorchNano: FIRST_EIGHT,
    nano: {name: default for name, default in FIRST_EIGHT.items() if name != "process_group_backend"},
}
CALLS = pytest.mark.parametrize("call", [TorchNano, nano], ids=["TorchNano", "nano"])


def parameters(call):
    """Return the parameters that are options, without the unknown names, which raise an error."""
    return [each for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD]


@CALLS
def test_parameters_are_the_options_in_their_order_with_their_types(call):
    types = get_type_hints(Options)
    found = [(each.name, each.default, each.annotation) for each in parameters(call)]
    by_name = [name for name in OPTIONS if name not in POSITIONAL[call]]
    assert found == [(name, DEFAULTS[name], types[name]) for name in (*POSITIONAL[call], *by_name)]


@CALLS
def test_those_of_bigdl_nano_may_be_positional_in_its_order(call):
    positional = [each for each in parameters(call) if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert {each.name: each.default for each in positional} == POSITIONAL[call]
    assert [each.name for each in positional] == [*POSITIONAL[call]]
    assert {each.kind for each in parameters(call)[len(positional) :]} == {inspect.Parameter.KEYWORD_ONLY}


@CALLS
def test_more_positional_arguments_than_these_are_python_s_own_error(call):
    most = len(POSITIONAL[call])
    with pytest.raises(
        TypeError, match=rf"^\w+\(\) takes from 0 to {most} positional arguments but {most + 1} were given$"
    ):
        call(*POSITIONAL[call].values(), "auto")


@CALLS
def test_argument_in_order_and_by_name_is_python_s_own_error(call):
    with pytest.raises(TypeError, match=r"^\w+\(\) got multiple values for argument 'use_ipex'$"):
        call(1, False, use_ipex=False)


@pytest.mark.parametrize("thing", [TorchNano, nano, TorchNano.__init__], ids=["TorchNano", "nano", "method"])
def test_pickle_takes_them_by_name(thing):
    assert pickle.loads(pickle.dumps(thing)) is thing


def test_arguments_in_bigdl_nano_s_order_are_these_options():
    @nano(None, False, "subprocess", "bf16", None, True, False, verbose=False)
    def train(model): ...

    train(nn.Linear(2, 1))
    options = TorchNano(2, False, "spawn", "gloo", "bf16", None, True, False)._nano_settings.options
    assert options.process_group_backend == "gloo"
    for used in (train.report.options, options.as_dict()):
        assert (used["precision"], used["channels_last"], used["auto_lr"]) == ("bf16-mixed", True, False)


@CALLS
def test_docstring_has_an_entry_for_each_option(call):
    lines = inspect.getdoc(call).splitlines()
    start, end = lines.index("Parameters"), lines.index("**others")
    entries = [line.split(" : ") for line in lines[start + 2 : end] if not line.startswith(" ")]
    assert [name for name, _ in entries] == [*OPTIONS]
    kinds = dict(entries)
    assert kinds["num_processes"] == 'int or "auto" or None'
    assert kinds["fast_fetch"] == 'bool or "auto"'
    assert all(line.startswith("    ") for line in lines[start + 2 : end] if " : " not in line)
    assert max(map(len, lines)) <= 120
