"""What a search chooses is compared with every combination of some options."""

import re

from benchmarks import choices
from tests.benchmarks.command_line import OWN, run


def test_grid_has_each_combination_once():
    assert [*choices.grid(images=False, threads=1)] == [
        {"precision": precision, "channels_last": False, "num_threads": 1} for precision in (32, "bf16")
    ]
    assert len([*choices.grid(images=True, threads=4)]) == 8


def test_choice_of_a_search_takes_turns_with_the_grid():
    done = run("benchmarks.choices", "--only", f"{OWN}linear", "--small", "--seconds", "0.3")
    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[-1]
    assert re.match(rf"\| {re.escape(OWN)}linear \| `{{.*}}` \| \d+ \| `{{\"precision\": ", row)
    assert 0.05 < float(re.search(r"([\d.]+) \|$", row)[1]) < 20
    assert "ms a step" in done.stderr  # the table of the search
