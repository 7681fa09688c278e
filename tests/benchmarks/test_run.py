"""A run stores the results of each system and each way of measuring; unknown names are rejected in one line."""

import pytest
from command_line import OWN, results

from benchmarks import training
from benchmarks.run import arguments
from benchmarks.systems import DEFAULT, LEVERS, NOT_QUICK

WORKLOAD, FAILING = f"{OWN}linear", f"{OWN}failing"


def systems_of(stored):
    return stored["workloads"][WORKLOAD]["systems"]


def test_systems_have_their_figures_and_those_of_each_round_and_one_that_fails_its_reason(tmp_path):
    systems = f"plain,nano_fp32,{FAILING}"
    stored, process = results(tmp_path, "--only", WORKLOAD, "--systems", systems, "--rounds", 2)
    assert {"machine", "versions", "commit", "changed_files", "date", "command", "rounds", "quick"} <= set(stored)
    for name in ("plain", "nano_fp32"):
        row = systems_of(stored)[name]
        bounds, rounds = row.pop("ratio_to_best_peer_range"), row.pop("rounds")
        assert row.pop("reason") is None
        assert all(value > 0 for value in (*row.values(), *bounds))
        assert [set(each) for each in rounds] == [{"median_ms", "first_step_ms", "peak_rss_mb"}] * 2
        assert row["peak_rss_mb"] == max(each["peak_rss_mb"] for each in rounds)
    failed = systems_of(stored)[FAILING]
    assert failed.pop("reason") == "RuntimeError: this system is broken"
    assert {*failed.pop("rounds")[0], *failed} - {"reason"} == {name for name in failed if failed[name] is None}
    for words in ("ms per step", "geometric mean", "RuntimeError: this system is broken"):
        assert words in process.stdout
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_is_batches_a_second_over_those_of_one_core_round_by_round(tmp_path):
    stored, process = results(tmp_path, "--scaling", WORKLOAD, "--rounds", 2)
    rows, cores = stored["scaling"][WORKLOAD], stored["machine"]["num_threads"]
    several = {n for n in (2, cores) if 1 < n <= cores}
    assert {"1 thread", *(f"{n} {kind}" for n in several for kind in ("threads", "processes"))} <= set(rows)
    one = [each["median_ms"] for each in rows["1 thread"]["rounds"]]
    for name, row in rows.items():
        batches = int(name.split()[0]) if "process" in name else 1
        ratios = [batches * a / b["median_ms"] for a, b in zip(one, row["rounds"], strict=True)]
        assert row["speed_up"] == pytest.approx(sum(ratios) / 2)
        assert row["efficiency"] == pytest.approx(sum(ratios) / 2 / row["cores"])
    assert "efficiency" in process.stdout


def test_a_quick_run_leaves_out_what_takes_long_and_says_so(tmp_path):
    systems = systems_of(results(tmp_path, "--quick", "--only", WORKLOAD)[0])
    assert set(systems) == set(DEFAULT)
    assert {name for name, row in systems.items() if "not in --quick" in (row["reason"] or "")} == set(NOT_QUICK) & set(
        DEFAULT
    )


def test_each_step_that_was_applied_is_left_out_once(tmp_path):
    stored, process = results(tmp_path, "--levers", f"{OWN}convolution", "--rounds", 2)
    rows = stored["levers"][f"{OWN}convolution"]
    assert {"", "channels_last", "fused_optimizer"} <= set(rows) <= set(LEVERS) - {"fast_attention"}
    whole = [each["median_ms"] for each in rows[""]["rounds"]]
    for row in rows.values():
        ratios = [each["median_ms"] / ms for each, ms in zip(row["rounds"], whole, strict=True)]
        assert row["worth"] == pytest.approx(sum(ratios) / 2)
        assert row["worth_range"] == [min(ratios), max(ratios)]
    assert "without" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "option", "value", "said"),
    [
        (training.arguments, "--only", "digit", "'digit': there are digits, char_gpt"),
        (training.arguments, "--modes", "fp8", "'fp8': there are plain, fp32, bf16"),
        (arguments, "--only", "bret", "'bret': there are resnet50, vit, bert"),
        (arguments, "--systems", "plain,nanoo", "'nanoo': there are plain, autocast, by_hand, "),
        (arguments, "--only", "no_such_module:linear", "No module named 'no_such_module'"),
        (arguments, "--systems", f"{OWN}nothing", "has no attribute 'nothing'"),
        (arguments, "--systems", ".a:b", "'.a:b': the 'package' argument is required"),
        (arguments, "--rounds", "0", "'0': a whole number, 1 or more"),
        (arguments, "--output", "/dev/null/results", "name a file that can be written"),
        (arguments, "--output", "/", "name a file that can be written"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(arguments, option, value, said, capsys):
    with pytest.raises(SystemExit) as left:
        arguments([option, value])
    assert left.value.code == 2
    assert said in capsys.readouterr().err
