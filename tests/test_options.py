"""Each option's check: what it lets through, in which spelling, and what it refuses."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from nano_loop.config import OPTIONS, NanoConfig
from nano_loop.options import CHECKS, RefusedValueError

SPELLINGS = [
    ("num_processes", None, None),
    ("num_processes", 1, 1),
    ("num_processes", np.int64(2), 2),
    ("use_ipex", True, True),
    ("distributed_backend", "subprocess", "subprocess"),
    ("distributed_backend", "spawn", "subprocess"),
    ("distributed_backend", "ray", "ray"),
    ("process_group_backend", None, None),
    ("process_group_backend", "gloo", "gloo"),
    ("precision", 32, "32-true"),
    ("precision", "32", "32-true"),
    ("precision", np.int32(32), "32-true"),
    ("precision", "32-true", "32-true"),
    ("precision", 64, "64-true"),
    ("precision", "64-true", "64-true"),
    ("precision", 16, "16-mixed"),
    ("precision", "16-mixed", "16-mixed"),
    ("precision", "bf16", "bf16-mixed"),
    ("precision", "bf16-mixed", "bf16-mixed"),
    ("precision", "bf16-true", "bf16-true"),
    ("precision", "auto", "auto"),
    ("cpu_for_each_process", None, None),
    ("cpu_for_each_process", [[0, 1], [2]], ((0, 1), (2,))),
    ("cpu_for_each_process", ((0,), (1,)), ((0,), (1,))),
    ("cpu_for_each_process", [range(2, 4)], ((2, 3),)),
    ("cpu_for_each_process", [[np.int64(1)]], ((1,),)),
    ("channels_last", False, False),
    ("auto_lr", False, False),
    ("compile", True, True),
    ("compile", {"mode": "max-autotune"}, {"mode": "max-autotune"}),
    ("bf16_ops", [], ()),
    ("bf16_ops", ["layer_norm", "softmax"], ("layer_norm", "softmax")),
    ("fp32_ops", {"softmax"}, ("softmax",)),
    ("gradient_compression", None, None),
    ("gradient_compression", "bf16", "bf16"),
    ("timeout", 30, 30.0),
    ("timeout", 0.5, 0.5),
    ("timeout", np.float32(2), 2.0),
    ("timeout", Fraction(1, 2), 0.5),
    ("verbose", "all", "all"),
    ("verbose", False, False),
    *((name, value, value) for name in OPTIONS if name.startswith("fast_") for value in (True, False, "auto")),
    *((name, value, value) for name in ("fused_optimizer", "allocator") for value in (True, False, "auto")),
]


@pytest.mark.parametrize(("name", "value", "expected"), SPELLINGS, ids=lambda each: repr(each)[:30])
def test_value_is_put_into_its_one_spelling(name, value, expected):
    found = CHECKS[name](value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("name", "value", "expected"), SPELLINGS, ids=lambda each: repr(each)[:30])
def test_one_spelling_is_a_value_too(name, value, expected):
    assert CHECKS[name](expected) == expected


def test_every_option_has_a_check():
    assert tuple(CHECKS) == OPTIONS


def test_every_default_is_let_through():
    for name, value in NanoConfig().as_dict().items():
        assert CHECKS[name](value) == value


@pytest.mark.parametrize("backend", ["undefined", "backend", "gloo ", "GL00"])
def test_process_group_backend_has_to_be_one_of_this_torch(backend):
    with pytest.raises(RefusedValueError):
        CHECKS["process_group_backend"](backend)


def test_every_backend_of_this_torch_is_let_through():
    names = torch.distributed.Backend.backend_list
    usable = [name for name in names if name != "undefined" and torch.distributed.is_backend_available(name)]
    assert "gloo" in usable
    for name in usable:
        CHECKS["process_group_backend"](name)


def test_what_is_refused_says_what_is_allowed_and_what_to_do():
    for check in CHECKS.values():
        with pytest.raises(RefusedValueError) as caught:
            check(object())
        allowed, advice = caught.value.args
        assert allowed[0].islower()
        assert advice[0].isupper()
        assert not allowed.endswith(".")
        assert not advice.endswith(".")


def test_options_of_a_caller_are_copied():
    arguments = {"mode": "max-autotune"}
    found = CHECKS["compile"](arguments)
    arguments["mode"] = "default"
    assert found == {"mode": "max-autotune"}
