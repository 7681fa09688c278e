"""For each check of an option: accepted values and their normalized form, rejected values, and texts of variables."""

import enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from nano_loop.config import option_checks as checks
from nano_loop.config.op_names import SAFE

IMAGES = str(Path("images").absolute())
CASTS = str(Path("casts.json").absolute())


class Colour(enum.Enum):
    RED = "bf16"


async def awaited():
    pass


def generated():
    yield


SPELLINGS = {
    checks.boolean: [(True, True), (False, False)],
    checks.auto_or_boolean: [(True, True), (False, False), ("auto", "auto")],
    checks.num_processes: [(None, None), (1, 1), (np.int64(2), 2)],
    checks.num_threads: [(None, None), (1, 1), (np.int64(3), 3), ("auto", "auto")],
    checks.distributed_backend: [("subprocess", "subprocess"), ("spawn", "subprocess"), ("ray", "ray")],
    checks.process_group_backend: [(None, None), ("gloo", "gloo")],
    checks.precision: [
        *((value, "32-true") for value in (32, "32", np.int32(32), "32-true")),
        *((value, "64-true") for value in (64, "64-true")),
        *((value, "16-mixed") for value in (16, "16-mixed")),
        *((value, "bf16-mixed") for value in ("bf16", "bf16-mixed")),
        ("bf16-true", "bf16-true"),
        ("bf16-products", "bf16-products"),
        ("auto", "bf16-products"),
    ],
    checks.fp32_or_bf16: [("bf16", "bf16"), *((value, "32") for value in (32, "32", np.int32(32)))],
    checks.cpu_for_each_process: [
        *((None, None), ([[0, 1], [2]], ((0, 1), (2,))), (((0,), (1,)), ((0,), (1,))), ([range(2, 4)], ((2, 3),))),
        *(([[np.int64(1)]], ((1,),)), (2, 2), (np.int64(1), 1)),
    ],
    checks.compile_arguments: [
        *((value, value) for value in (True, False, "whole", {"mode": "max-autotune"})),
    ],
    checks.boolean_or_path: [(True, True), ("casts.json", CASTS), (Path("casts.json"), CASTS), (CASTS, CASTS)],
    checks.memory_limit: [(None, None), ("8 GB", 8 * 10**9), ("1.5GiB", 3 << 29), (8e9, 8 * 10**9), (1, 1)],
    checks.image_cache: [
        *((None, None), ("auto", None), (8_000_000_000, 8_000_000_000), (2e6, 2_000_000), ("8 GB", 8 * 10**9)),
        *(("1.5GiB", 3 << 29), ("500kB", 500_000), ("64B", 64), ("images", IMAGES), (Path("images"), IMAGES)),
    ],
    checks.operators: [
        *(([], ()), (["layer_norm", "softmax"], ("layer_norm", "softmax")), ({"softmax"}, ("softmax",))),
        *(("softmax", ("softmax",)), ("softmax, F.gelu", ("softmax", "F.gelu"))),
    ],
    checks.operators_or_safe: [(["exp"], ("exp",)), ("safe", SAFE), ("exp", ("exp",))],
    checks.seconds: [(30, 30.0), (0.5, 0.5), (np.float32(2), 2.0), (Fraction(1, 2), 0.5)],
    checks.verbosity: [(True, True), (False, False), ("all", "all")],
    checks.worker_init: [(None, None), (torch.get_num_threads, torch.get_num_threads), (dict, dict)],
}

NO_SIZES = ("", "8 GBs", "8", "0 GB", 10**400, 0, -1, True, float("nan"), [1])
REFUSED = {
    checks.boolean: [0, 1, "yes", "auto", 0.1, None, np.True_, torch.channels_last],
    checks.auto_or_boolean: [0, 0.5, 2, "AUTO", "jemalloc", None],
    checks.num_processes: [0, -1, True, 2.0, "2", [2], float("nan"), np.int64(0)],
    checks.num_threads: [0, -1, True, 2.0, "2", [2], "AUTO"],
    checks.distributed_backend: ["horovod", "Ray", None, 1],
    checks.process_group_backend: [
        *("glooo", "", 3, ["gloo"], "undefined", "backend", "gloo ", "GL00"),
        "nccl" if not torch.distributed.is_nccl_available() else "cncl",
    ],
    checks.precision: ["fp8", 8, 10**400, 32.0, None, True, "BF16", torch.bfloat16, Colour.RED],
    checks.fp32_or_bf16: ["auto", "fp32", 16, 32.0, True, None, torch.bfloat16, ["bf16"], np.zeros(2)],
    checks.cpu_for_each_process: [
        *([0, 1], [[]], [], [[-1]], [["0"]], [[0.5]], [[True]], "0-3", {0: [0]}, 0, -1, True, 1.5),
    ],
    checks.compile_arguments: ["inductor", None, {}, {1: "max-autotune"}],
    checks.boolean_or_path: ["", None, 3, 10**400, "no/such/folder/casts.json", ".", "a\0b"],
    checks.memory_limit: [*NO_SIZES, "auto", "images"],
    checks.image_cache: [*NO_SIZES, "9" * 400 + " GB", "~no_such_user/x", 0.5, float("inf"), "no/such/folder", "a\0b"],
    checks.operators: ["layer_nrm", "safe", "no/such/file", [torch.nn.functional.layer_norm], None, [""], ["a\0b"], 3],
    checks.operators_or_safe: ["unsafe", ["safe"], None, 3, "no_such.txt", "a\0/b"],
    checks.seconds: [0, -1.5, 10**400, "10", float("inf"), float("nan"), None, True],
    checks.verbosity: ["quiet", 2, None],
    checks.worker_init: ["patches", 1, lambda rank: None, awaited, generated],
}

# What the message has to name as allowed.
ALLOWED = {
    checks.boolean: ("True", "False"),
    checks.auto_or_boolean: ('"auto"', "True", "False"),
    checks.num_processes: ("None", "int", "1"),
    checks.num_threads: ("None", "int", "1", '"auto"'),
    checks.distributed_backend: ('"subprocess"', '"spawn"', '"ray"'),
    checks.process_group_backend: ("None", "backend"),
    checks.precision: (
        *("32", "64", "16", '"bf16"', '"auto"'),
        *("32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true"),
    ),
    checks.fp32_or_bf16: ("32", '"bf16"'),
    checks.cpu_for_each_process: ("list", "CPU ids", "each process"),
    checks.compile_arguments: ("True", "False", '"whole"', "dict", "torch.compile"),
    checks.boolean_or_path: ("path",),
    checks.memory_limit: ("None", "bytes", '"8 GB"'),
    checks.image_cache: ("bytes", "folder"),
    checks.operators: (),  # the faults of a path are not those of a list
    checks.operators_or_safe: (),
    checks.seconds: ("positive", "seconds"),
    checks.verbosity: ("True", "False", '"all"'),
    checks.worker_init: ("None", "function", "without arguments"),
}

TEXTS = {
    checks.boolean: [("false", False), ("True", True), ("off", False), ("1", True), ("0", False)],
    checks.auto_or_boolean: [("no", False), ("auto", "auto"), (" auto ", "auto"), ("1", True), ("yes", True)],
    checks.num_processes: [("1", 1), ("none", None)],
    checks.num_threads: [("1", 1), ("none", None), ("auto", "auto")],
    checks.distributed_backend: [("spawn", "subprocess")],
    checks.process_group_backend: [("gloo", "gloo")],
    checks.precision: [
        *(("bf16", "bf16-mixed"), ("32", "32-true"), ("64-true", "64-true"), ("bf16-mixed", "bf16-mixed")),
    ],
    checks.fp32_or_bf16: [("bf16", "bf16"), ("32", "32")],
    checks.cpu_for_each_process: [("[[0, 1]]", ((0, 1),))],
    checks.compile_arguments: [("{'mode': 'max-autotune'}", {"mode": "max-autotune"}), ("1", True), ("whole", "whole")],
    checks.boolean_or_path: [("yes", True), ("0", False), ("casts.json", CASTS)],
    checks.memory_limit: [("8 GB", 8 * 10**9), ("8000000000", 8 * 10**9), ("none", None)],
    checks.image_cache: [("8 GB", 8 * 10**9), ("8000000000", 8 * 10**9), ("images", IMAGES), ("none", None)],
    checks.operators: [
        ("['layer_norm', 'softmax']", ("layer_norm", "softmax")),
        ("layer_norm, softmax", ("layer_norm", "softmax")),
        ("softmax", ("softmax",)),
    ],
    checks.operators_or_safe: [("safe", SAFE), ("exp,log", ("exp", "log"))],
    checks.seconds: [("30", 30.0), ("1", 1.0)],
    checks.verbosity: [("all", "all"), ("0", False)],
    checks.worker_init: [("none", None)],
}


def cases(table):
    """Return each check of a table with each of its values."""
    return [(check, value) for check, values in table.items() for value in values]
