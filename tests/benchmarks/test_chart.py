"""The chart's bars are the ratios to the best peer, with their range, of what was measured."""

from benchmarks.chart import _drawn, draw


def row(ratio, low, high):
    return {"ratio_to_best_peer": ratio, "ratio_to_best_peer_range": [low, high]}


MISSING = {"ratio_to_best_peer": None, "ratio_to_best_peer_range": None}
WORKLOADS = {
    "bert": {"systems": {"plain": row(1.0, 1.0, 1.0), "nano": row(2.0, 1.5, 2.5), "ipex": MISSING}},
    "mlp": {"systems": {"plain": MISSING, "nano": row(3.0, 2.0, 4.0), "ipex": MISSING}},
}


def test_each_system_has_its_bars_at_the_workloads_where_it_was_measured():
    assert _drawn(WORKLOADS) == {"plain": {0: (1.0, 1.0, 1.0)}, "nano": {0: (2.0, 1.5, 2.5), 1: (3.0, 2.0, 4.0)}}


def test_chart_is_written(tmp_path):
    machine = {"name": "CPU", "num_threads": 2, "has_fast_bf16": True}
    results = {"workloads": WORKLOADS, "machine": machine, "versions": {"torch": "2.13.0"}}
    draw(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
