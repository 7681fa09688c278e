"""Figures summarize rounds: medians, ratios per round, and the faster of nano_loop's variants."""

import pytest

from benchmarks.rounds import Measured
from benchmarks.summary import geometric_means, set_matmul_shares, summarize
from benchmarks.table import table


def measured(**times):
    """Return the results of two rounds, from each system's milliseconds; None is a missing system."""
    rounds = [
        {
            system: {"median_ms": ms[number], "first_step_ms": 9.0, "peak_rss_mb": 1.0} if ms else {"reason": "none"}
            for system, ms in times.items()
        }
        for number in range(2)
    ]
    matmul = [{"float32": 1.0, "bfloat16": 4.0}] * 2
    return Measured("tiny", {"flops": 2e6}, rounds, matmul)


def test_best_peer_is_none_of_ours():
    found = summarize(measured(plain=(4.0, 4.0), ipex=(2.0, 3.0), nano=(1.0, 2.0), nano_ipex=(1.0, 1.0)))
    assert found["best_peer"] == "ipex"
    assert found["systems"]["nano"]["ratio_to_best_peer"] == pytest.approx(1.75)
    assert found["systems"]["nano"]["ratio_to_best_peer_range"] == [1.5, 2.0]


def test_limit_is_no_peer_and_the_least_ratio_stands_beside_the_mean():
    times = [{"plain": (4.0, 4.0), "jax": (0.5, 0.5), "nano_auto": (own, own)} for own in (1.0, 4.0)]
    first, second = (summarize(measured(**each)) for each in times)
    assert first["best_peer"] == "plain"
    means = geometric_means({"first": first, "second": second})["nano_auto"]
    assert means["over_best_peer"] == pytest.approx(2)
    assert means["least_over_best_peer"] == pytest.approx(1)


def test_share_is_of_the_best_rate_of_the_run():
    quiet, busy = summarize(measured(nano=(1.0, 3.0), plain=None)), summarize(measured(nano=(4.0, 4.0)))
    busy["matmul_gflops"] = [{"float32": 1.0, "bfloat16": 2.0}, {"reason": "it took more than 9 s"}]
    set_matmul_shares({"one": quiet, "other": busy})
    assert quiet["systems"]["nano"]["matmul_share"] == pytest.approx(2 / 2 / 4)
    assert busy["systems"]["nano"]["matmul_share"] == pytest.approx(2 / 4 / 4)
    assert quiet["systems"]["plain"]["matmul_share"] is None


@pytest.mark.parametrize(("nano", "faster"), [((1.0, 2.0), "nano"), ((3.0, 3.0), "nano_ipex")])
def test_ipex_and_native_are_held_against_each_other(nano, faster):
    summary = summarize(measured(plain=(4.0, 4.0), ipex=(4.0, 6.0), nano=nano, nano_ipex=(2.0, 2.0)))
    found = summary["use_ipex"]
    assert found["ratio_to_ipex_by_hand"] == 2.5
    assert found["ratio_to_ipex_by_hand_range"] == [2.0, 3.0]
    assert found["faster"] == faster
    assert f"2.50× the speed of IPEX by hand (2.00 to 3.00), and {sum(nano) / 4:.2f}× nano's; {faster} is faster" in (
        table("tiny", summary)
    )
