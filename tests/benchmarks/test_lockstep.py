"""Two live processes take steps in turn, and the ratio is that of their times."""

from pathlib import Path

import pytest

from benchmarks import lockstep
from tests.benchmarks.command_line import OWN, ROOT, run


def speeds(output):
    """The cells of the table's rows, the last as a number."""
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith(f"| {OWN}")]
    return [(name, float(first), float(second), float(speed.partition(" ")[0])) for name, first, second, speed in rows]


def test_a_system_that_sleeps_is_slower_by_the_time_it_sleeps():
    options = ("--only", f"{OWN}linear,{OWN}of_two_batches", "--systems", f"plain,{OWN}sleeping")
    done = run("benchmarks.lockstep", *options, "--small", "--seconds", 1, "--restarts", 1, "--busy", 1)
    assert done.returncode == 0, done.stderr
    found = speeds(done.stdout)
    assert [name for name, *_ in found] == [f"{OWN}linear", f"{OWN}of_two_batches"]
    for _, plain, sleeping, speed in found:
        assert sleeping >= 50
        assert speed == pytest.approx(plain / sleeping, rel=0.9)


def test_two_checkouts_run_their_own_nano_loop(tmp_path):
    for name in ("benchmarks", "tests", "nano_loop"):
        (tmp_path / name).symlink_to(ROOT / name)
    options = ("--only", f"{OWN}linear", "--small", "--seconds", 0.5, "--restarts", 1)
    done = run("benchmarks.lockstep", *options, "--against", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "that checkout" in done.stdout
    assert len(speeds(done.stdout)) == 1


def test_a_system_that_has_to_start_with_settings_gets_them(monkeypatch):
    monkeypatch.setattr(lockstep.systems, "settings_of", {f"{OWN}with_setting": {"SET_FOR_IT": "1"}}.get)
    side = lockstep.Live(f"{OWN}linear", f"{OWN}with_setting", True, Path(ROOT))
    assert side.take(1) > 0
    side.end()


@pytest.mark.parametrize(
    ("systems", "said"),
    [("plain,expert_jemalloc", "--systems expert_jemalloc: it is not installed"), ("plain", "--systems takes two")],
)
def test_systems_that_cannot_be_measured_are_refused(monkeypatch, capsys, systems, said):
    monkeypatch.setattr(lockstep.systems, "why_not", {"plain": None, "expert_jemalloc": "it is not installed"}.get)
    with pytest.raises(SystemExit):
        lockstep.main(["--systems", systems])
    assert said in capsys.readouterr().err
