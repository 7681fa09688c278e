"""Values derived from measurements: medians, ratios per round, differences per seed."""

import math
from itertools import pairwise

import pytest
import torch

from benchmarks import first_steps, head, hosts, learning, products, shapes
from benchmarks.attention import BLOCKS, TORCH, Shape, measure, row
from benchmarks.layers import LAYERS
from benchmarks.libraries.__main__ import page
from benchmarks.losses import difference
from benchmarks.rounds import in_turn
from benchmarks.training import End, markdown
from nano_loop.kernels.linear import product


def test_ratio_of_attention_is_torchs_time_over_that_of_a_way():
    found = {TORCH: [4.0, 6.0, 5.0], BLOCKS: [1.0, 1.0, 1.0]}
    assert row(Shape(1, 2, 3, 4), found) == ["1, 2, 3, 4", "5", "1", "5 (4 to 6)"]
    assert row(Shape(1, 2, 3, 4), {TORCH: [4.0]}) == ["1, 2, 3, 4", "4", "–", "–"]
    assert TORCH in measure(Shape(1, 2, 64, 16, "causal"), 2)


@pytest.mark.skipif(product.KERNEL.unavailable is not None, reason=str(product.KERNEL.unavailable))
def test_products_are_those_of_a_linear_layer_and_its_gradients(capsys):
    sizes = products.shape("16,48,32")
    for kind, (algorithms, flops) in products.products(sizes, torch.float32).items():
        by_torch, in_c = (compute() for compute in algorithms.values())
        assert by_torch.shape == dict(zip(products.KINDS, [(16, 32), (16, 48), (32, 48)], strict=True))[kind]
        assert flops == 2 * 16 * 48 * 32
        assert (by_torch - in_c).norm() < 0.01 * by_torch.norm()
    products.main(["--shapes", "16,48,32", "--rounds", "1", "--threads", str(torch.get_num_threads())])
    assert capsys.readouterr().out.count("| 16, 48, 32 |") == 2 * len(products.KINDS)


def test_first_steps_are_compared_round_by_round_and_the_second_run_has_what_the_first_has_saved(capsys, monkeypatch):
    caches = []

    def fresh(workload, precision, count, threads, small, cache):
        is_second = precision == "auto" and cache in caches
        caches.append(cache)
        return {"32": 2.0, "auto": 1.0 if is_second else 2.5}[precision]

    monkeypatch.setattr(first_steps, "_fresh", fresh)
    first_steps.main(["--only", "lenet,gnn", "--steps", "100", "--rounds", "2"])
    assert "| gnn | 20 | 0.80 (0.80 to 0.80) | 2.00 (2.00 to 2.00) |" in capsys.readouterr().out
    assert first_steps.train("lenet", "auto", 2, torch.get_num_threads(), True) > 0


def test_difference_of_losses_is_the_largest_relative_one_or_no_number():
    assert difference([2.0, 4.0], [2.0, 4.5]) == 0.125
    assert difference([-2.0], [-1.0]) == 0.5
    assert math.isnan(difference([1.0, 1.0, 1.0], [1.0, math.nan, 2.0]))


def test_systems_take_turns_so_that_none_always_begins_or_follows_the_same():
    names = ["plain", "compile", "nano"]
    rounds = [in_turn(names, number) for number in range(6)]
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == set(names)
    first, second = (set(pairwise(each)) for each in rounds[:2])
    assert not first & second


def test_table_of_hosts_has_medians_and_the_ratios_of_each_round():
    times = {way: [100.0, 200.0, 300.0] for way in hosts.WAYS} | {"buckets at the end": [150.0, 400.0, 300.0]}
    rows = hosts.table({"lstm": times}).splitlines()
    assert rows[0] == "| | lstm |"
    assert "| buckets at the end | 300 ms, 1.50× (1.00 to 2.00) |" in rows
    assert "| buckets | 200 ms, 1.00× (1.00 to 1.00) |" in rows


#: Seconds of fits of libraries by side; the machine was half as fast in the second round.
FITS = {"plain": [4.0, 8.0, 4.0], "fp32": [2.0, 4.0, 2.0], "auto": [1.0, 2.0, 2.0]}


def results_of(fits):
    return {side: [{"fit": value, "script": value + 4} for value in values] for side, values in fits.items()}


def test_ratios_of_libraries_are_of_the_same_round_and_what_fails_has_no_part_in_the_means():
    rows = page({"bert": results_of(FITS), "gcn": results_of({**FITS, "fp32": FITS["plain"]})}, 3).splitlines()
    bert = next(row for row in rows if row.startswith("| transformers | BERT |"))
    cells = ["2.00 (2.00)", "1.33 (1.33)", "4.00 (2.00)", "1.60 (1.33)", "2.00 (1.00)"]
    assert [cell.strip() for cell in bert.split("|")[5:-1]] == cells
    assert rows[-1].split("|")[5].strip() == "1.41 (1.00)"  # the geometric mean of 2 and 1, and the lowest
    broken = {**results_of(FITS), "auto": [{"reason": "exit code 1: no such module"}] * 3}
    rows = page({"bert": broken, "gcn": results_of(FITS)}, 3).splitlines()
    assert "no such module" in next(row for row in rows if "BERT" in row)
    assert rows[-1].split("|")[5].strip() == "2.00 (2.00)"
    assert "mean" not in page({"bert": broken}, 3)


def test_training_has_a_row_a_mode_with_the_differences_seed_by_seed_and_the_memory():
    memory = {"parameters": 2_000_000, "gradients": 1_000_000, "state": 4_000_000, "resident": 500_000_000}
    ends = {
        mode: [End(each, memory) for each in found] for mode, found in (("fp32", (0.9, 0.92)), ("bf16", (0.91, 0.92)))
    }
    rows = markdown({"digits": ends}).splitlines()
    assert rows[2] == "| digits | fp32 | 2 | accuracy 91.00% ± 1.41% |  | 2 | 1 | 4 | 500 |"
    differences = "0.50% ± 0.71% (0.00% to 1.00%)"
    assert rows[3] == f"| digits | bf16 | 2 | accuracy 91.50% ± 0.71% | {differences} | 2 | 1 | 4 | 500 |"
    assert "loss 1.5000 ± – |" in markdown({"char_gpt": {"bf16": [End(1.5, memory)]}})  # one seed has no spread


def test_differences_of_curves_are_those_of_each_seed_and_one_seed_has_no_error():
    plain, nano = [[(2.0, 0.5)], [(2.2, 0.4)]], [[(1.0, 0.505)], [(1.0, 0.404)]]
    row = learning.ends({"digits": {"plain": plain, "nano": nano}}).splitlines()[-1]
    assert row.endswith("| 2 | 0.4500 | 0.4545 | +1.00% ± 0.00% | 2.10 |")
    assert "| +1.00% | 2.00 |" in learning.ends({"digits": {"plain": plain[:1], "nano": nano[:1]}})


def test_slower_is_slower_by_the_fastest_and_by_the_medians():
    def row(fp32, bf16):
        return shapes.Row(
            LAYERS[0], "NCHW", {"fp32": [(each, 1.0) for each in fp32], "bf16": [(each, 1.0) for each in bf16]}
        )

    assert row([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 1.0, 1.0], [1.0, 2.0, 2.0]).is_slower
    assert not row([1.0, 2.0, 2.0], [2.0, 2.0, 2.0]).is_slower
    assert row([1.0], [2.0]).ratio(min) == pytest.approx(2 / 3)
    assert "**0.67**" in shapes.markdown([row([1.0], [2.0]).as_dict()])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="it needs torch 2.13")
def test_ways_to_compute_a_head_have_one_loss():
    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(8, 40, bias=False), torch.randn(300, 8)
    labels = torch.randint(40, (300,))
    losses = {name: loss(layer, hidden, labels).item() for name, loss in head.PEERS.items()}
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["plain"], rel=1e-2 if "bf16" in name or "autocast" in name else 1e-5)
    assert head.measure("nano_fp32", rows=64, width=8, words=40, repeats=2)["s"] > 0
