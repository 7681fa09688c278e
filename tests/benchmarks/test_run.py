import pytest
from command_line import OWN, results

from benchmarks import training
from benchmarks.run import arguments
from benchmarks.systems import DEFAULT, LEVERS, NOT_QUICK
from benchmarks.workloads import UNTUNED, USERS

FIGURES = {
    "median_ms",
    "ratio_to_best_peer",
    "ratio_to_best_peer_range",
    "ratio_to_plain",
    "matmul_share",
    "peak_rss_mb",
    "first_step_ms",
    "reason",
    "rounds",
}
WORKLOAD, CHATTY, FAILING = f"{OWN}linear", f"{OWN}chatty", f"{OWN}failing"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """What a run stored of two rounds of two systems and one that fails, its folder, and the finished process."""
    folder = tmp_path_factory.mktemp("full")
    systems = f"plain,nano_fp32,{FAILING}"
    return *results(folder, "--only", WORKLOAD, "--systems", systems, "--rounds", 2), folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What a quick run stored of the same systems and more."""
    systems = f"plain,nano_fp32,{FAILING},{OWN}dying"
    return results(tmp_path_factory.mktemp("quick"), "--quick", "--only", WORKLOAD, "--systems", systems)[0]


def systems_of(stored):
    return stored["workloads"][WORKLOAD]["systems"]


def test_a_system_has_its_figures_and_those_of_each_round(full):
    for name in ("plain", "nano_fp32"):
        row = systems_of(full[0])[name]
        assert set(row) == FIGURES
        assert row["reason"] is None
        assert all(row[key] > 0 for key in FIGURES - {"reason", "rounds", "ratio_to_best_peer_range"})
        assert [set(each) for each in row["rounds"]] == [{"median_ms", "first_step_ms", "peak_rss_mb"}] * 2
        assert row["peak_rss_mb"] == max(each["peak_rss_mb"] for each in row["rounds"])


def test_a_failing_system_is_recorded_with_its_reason_and_the_run_goes_on(full):
    row = systems_of(full[0])[FAILING]
    assert row["reason"] == "RuntimeError: this system is broken"
    assert all(row[key] is None for key in FIGURES - {"reason", "rounds"})
    assert "RuntimeError: this system is broken" in full[1].stdout


def test_the_machine_the_versions_and_the_commit_are_stored(full):
    stored = full[0]
    assert stored["machine"]["num_threads"] >= 1
    assert stored["versions"]["torch"]
    assert {"commit", "changed_files", "date", "command", "rounds", "quick"} <= set(stored)


def test_the_table_is_on_standard_output_and_the_progress_on_standard_error(full):
    process = full[1]
    assert "ms a step" in process.stdout
    assert "geometric mean" in process.stdout
    assert "case" in process.stderr
    assert "ms a step" not in process.stderr


def test_the_chart_is_a_png(full):
    assert (full[2] / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_a_quick_run_has_the_same_fields_of_the_small_workload(full, quick):
    assert set(quick) == set(full[0])
    assert set(systems_of(quick)["plain"]) == FIGURES
    assert systems_of(quick)["plain"]["median_ms"] > 0
    assert quick["workloads"][WORKLOAD]["flops_per_step"] == full[0]["workloads"][WORKLOAD]["flops_per_step"] / 2


def test_a_quick_run_leaves_out_what_takes_long_and_says_so(tmp_path):
    systems = systems_of(results(tmp_path, "--quick", "--only", WORKLOAD)[0])
    assert set(systems) == set(DEFAULT)
    assert {name for name, row in systems.items() if "not in --quick" in (row["reason"] or "")} == set(NOT_QUICK) & set(
        DEFAULT
    )


def test_a_quick_run_measures_what_is_asked_for_by_name(tmp_path):
    stored, _ = results(tmp_path, "--quick", "--only", f"{OWN}convolution", "--systems", "compile,nano")
    assert stored["workloads"][f"{OWN}convolution"]["systems"]["compile"]["median_ms"] > 0


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """What a run of --scaling stored, the finished process, and a line for each step of any process."""
    folder = tmp_path_factory.mktemp("scaled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_NOTES", str(folder / "notes"))
        found = results(folder, "--scaling", f"{OWN}noting_threads", "--rounds", 2)
    return *found, (folder / "notes").read_text().splitlines()


def test_scaling_has_a_line_for_each_number_of_threads_and_processes(scaled):
    stored, process, notes = scaled
    cores = stored["machine"]["num_threads"]
    several = {n for n in (2, cores) if 1 < n <= cores}
    names = {f"{n} threads" for n in several} | {f"{n} processes" for n in several}
    assert {"1 thread"} | names <= set(stored["scaling"][f"{OWN}noting_threads"])
    assert {"1 1"} | {f"1 {n}" for n in several} | {f"{n} 1" for n in several} <= set(notes)
    assert "efficiency" in process.stdout


def test_scaling_is_batches_a_second_over_those_of_one_core_round_by_round(scaled):
    rows = scaled[0]["scaling"][f"{OWN}noting_threads"]
    one = [each["median_ms"] for each in rows["1 thread"]["rounds"]]
    for name, row in rows.items():
        batches = int(name.split()[0]) if "process" in name else 1
        ratios = [batches * a / b["median_ms"] for a, b in zip(one, row["rounds"], strict=True)]
        assert row["speed_up"] == pytest.approx(sum(ratios) / 2)
        assert row["efficiency"] == pytest.approx(sum(ratios) / 2 / row["cores"])


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


def test_ways_of_measuring_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        arguments(["--scaling", WORKLOAD, "--systems", "plain"])
    assert "give one of them alone" in capsys.readouterr().err


def test_a_run_that_is_broken_off_at_once_leaves_no_results(tmp_path):
    (tmp_path / "kept.json").write_text("{}")
    for name in ("new", "kept"):
        arguments(["--output", str(tmp_path / name)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept.json": "{}"}


def test_the_name_of_a_list_stands_for_its_workloads():
    assert arguments(["--only", "untuned,mlp,t5"]).only == [*UNTUNED, "mlp"]
    assert arguments(["--only", "users"]).only == [*USERS]
    assert arguments([]).only is None  # those of the suite: see Plan
