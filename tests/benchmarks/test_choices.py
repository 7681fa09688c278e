"""What a search chooses is compared with every combination of some options."""

import re

from benchmarks import choices
from tests.benchmarks.command_line import OWN, run


def test_grid_has_each_combination_once():
    assert [*choices.grid(images=False, threads=1)] == [
        {"precision": precision, "channels_last": False, "num_threads": 1} for precision in (32, "bf16")
    ]
    assert len([*choices.grid(images=True, threads=4)]) == 8


def test_choice_takes_turns_with_the_grid(monkeypatch, capsys):
    found = {"options": {"precision": "bf16"}, "seconds": 12.3, "images": False, "threads": 1}
    monkeypatch.setattr(choices, "searched", lambda workload, small: found)
    choices.main(["--only", f"{OWN}linear", "--small", "--seconds", "0.3"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f'| {OWN}linear | `{{"precision": "bf16"}}` | 12 | `{{"precision": ')
    assert 0.05 < float(re.search(r"([\d.]+) \|$", row)[1]) < 20


def test_search_prints_its_result(monkeypatch):
    done = run("benchmarks.choices", "--search", f"{OWN}linear", "--small")
    assert done.returncode == 0, done.stderr
    assert f'{choices.RESULT}{{"options": {{' in done.stdout
