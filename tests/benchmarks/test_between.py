"""The time between the products of a step is measured, and its bytes are those of the tensors read and written."""

from profiling.events import Event

from benchmarks.between import largest, largest_savings, operators, rows_of, savings_of_models
from benchmarks.execution_trace import Operator, Used
from benchmarks.traffic import bytes_by_place, computing, moves

FLOATS = Used(1, 1, "fp32", 100, 4)
BF16 = Used(2, 2, "bf16", 100, 2)


def test_a_copy_reads_one_tensor_and_writes_one():
    assert moves(Operator("copy_", (FLOATS, BF16), (FLOATS,))) == 400 + 200
    assert moves(Operator("add", (FLOATS, BF16), (Used(3, 3, "fp32", 100, 4),))) == 400 + 200 + 400
    assert moves(Operator("add", (FLOATS, FLOATS), (Used(3, 3, "fp32", 100, 4),))) == 400 + 400


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
