"""What lies between the products of a step is timed, and its bytes are those of the tensors read and written."""

import json

import pytest
from command_line import OWN, run
from profiling.events import Event

from benchmarks.between import largest, largest_savings, operators, rows_of, savings_of_models
from benchmarks.execution_trace import Operator, Used
from benchmarks.traffic import bytes_by_place, computing, is_product, moves

FLOATS = Used(1, 1, "fp32", 100, 4)
BF16 = Used(2, 2, "bf16", 100, 2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What is stored of a convolution with a flattened linear layer, and what was printed."""
    output = tmp_path_factory.mktemp("between") / "found"
    arguments = ("--small", "--threads", 1, "--rows", 100, "--output", output)  # all rows: some take hardly any time
    done = run("benchmarks.between", "--only", f"{OWN}convolution", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(output.with_suffix(".json").read_text())["between"][f"{OWN}convolution"], done.stdout


def test_operators_of_all_parts_have_calls_times_and_bytes(measured):
    rows = {(row["part"], row["operator"]): row for row in measured[0]["rows"]}
    assert {("forward", "_log_softmax"), ("backward", "_log_softmax_backward_data")} <= set(rows)
    assert ("optimizer", "_fused_adamw_") in rows
    assert all(row["calls"] >= 1 and row["ms"] > 0 and row["bytes"] > 0 for row in rows.values())
    assert rows["forward", "_log_softmax"]["bytes"] == 2 * 4 * 2 * 4  # fp32 logits of 4 images and 2 classes
    assert measured[0]["step_ms"] > sum(row["ms"] for row in rows.values()) / 2


def test_products_are_left_out(measured):
    assert not any(is_product(row["operator"]) for row in measured[0]["rows"])
    assert is_product("aten::mkldnn_convolution")
    assert is_product("aten::_scaled_dot_product_flash_attention_for_cpu")
    assert not is_product("aten::native_layer_norm")


def test_tables_have_the_operators_and_the_workload(measured):
    assert "| `_log_softmax` | forward | 1 |" in measured[1]
    assert f"\n| {OWN}convolution |" in measured[1]


def test_a_copy_reads_one_tensor_and_writes_one():
    assert moves(Operator("copy_", (FLOATS, BF16), (FLOATS,))) == 400 + 200
    assert moves(Operator("add", (FLOATS, BF16), (Used(3, 3, "fp32", 100, 4),))) == 400 + 200 + 400
    assert moves(Operator("add", (FLOATS, FLOATS), (Used(3, 3, "fp32", 100, 4),))) == 400 + 400


def test_an_operator_in_place_reads_what_it_writes_and_one_with_out_does_not():
    assert moves(Operator("add_", (FLOATS, BF16), (FLOATS,))) == 400 + 200 + 400
    assert moves(Operator("add", (BF16, FLOATS), (FLOATS,))) == 200 + 400


def test_an_embedding_reads_the_rows_that_it_returns():
    weight, indices, out = Used(1, 1, "fp32", 10**6, 4), Used(2, 2, "long int", 5, 8), Used(3, 3, "fp32", 50, 4)
    assert moves(Operator("embedding", (weight, indices), (out,))) == 200 + 40 + 200


def test_a_fused_optimizer_writes_all_but_the_gradients():
    tensors = tuple(Used(number, number, "fp32", 100, 4) for number in range(4))
    assert moves(Operator("_fused_adamw_", tensors, ())) == 4 * 400 + 3 * 400


def test_an_operator_that_only_calls_others_is_not_counted_beside_them():
    cast = Event("aten::to", self_cpu_time_total=1.0, cpu_time_total=10.0)
    copy = Event("aten::copy_", self_cpu_time_total=9.0, cpu_time_total=9.0, cpu_parent=cast)
    norm = Event("aten::native_layer_norm", self_cpu_time_total=4.0, cpu_time_total=10.0)
    memory = Event("aten::empty", self_cpu_time_total=6.0, cpu_time_total=6.0, cpu_parent=norm)
    mine = computing([cast, copy, norm, memory])
    assert mine == {"aten::copy_", "aten::native_layer_norm"}
    inner = Operator("copy_", (FLOATS, BF16), (FLOATS,), "backward")
    assert bytes_by_place([Operator("to", (BF16,), (FLOATS,), inner=[inner])], mine) == {("backward", "copy_"): 600}


def test_savings_are_against_the_memory_and_sorted_and_what_is_in_a_cache_saves_nothing():
    row = {"part": "forward", "operator": "slow", "calls": 1, "ms": 3.0, "bytes": 1e6}
    small = row | {"operator": "small", "ms": 30.0, "bytes": 1e5}
    cached = row | {"operator": "cached", "ms": 0.5}
    found = {"step_ms": 10.0, "memory_rate": 1e9, "rows": [cached, row]}
    rows = rows_of("mine", found)
    assert [each["operator"] for each in rows] == ["slow", "cached"]
    assert [each["saved_ms"] for each in rows] == [2.0, 0.0]
    assert rows[0]["of_step"] == 0.2
    assert "| 33% | 2.00 | 20.0% |" in operators(rows)
    assert "| 200%* | 0.00 |" in operators(rows)
    results = {"between": {"mine": found | {"rows": [*found["rows"], small]}, "gone": {"reason": "it died"}}}
    assert [each["operator"] for each in largest(results["between"])] == ["slow", "cached"]
    assert "| mine | `slow` | forward |" in largest_savings(results)
    assert "| gone | it died |" in savings_of_models(results)
