"""The table of libraries has ratios of times of one round, and is put between its marks."""

import pytest

from benchmarks.libraries.__main__ import BEGIN, END, lower_end, page, written

#: Seconds of fits by side; the machine was half as fast in the second round.
FITS = {"plain": [4.0, 8.0, 4.0], "fp32": [2.0, 4.0, 2.0], "auto": [1.0, 2.0, 2.0]}


def results_of(fits):
    return {side: [{"fit": value, "script": value + 4} for value in values] for side, values in fits.items()}


def test_ratios_are_of_the_same_round():
    rows = page({"bert": results_of(FITS), "gcn": results_of({**FITS, "fp32": FITS["plain"]})}, 3).splitlines()
    bert = next(row for row in rows if row.startswith("| transformers | BERT |"))
    assert [cell.strip() for cell in bert.split("|")[5:-1]] == [
        *("2.00 (2.00)", "1.33 (1.33)"),
        *("4.00 (2.00)", "1.60 (1.33)"),
        "2.00 (1.00)",
    ]
    assert rows[-1].split("|")[5].strip() == "1.41 (1.00)"  # the geometric mean of 2 and 1, and the lowest


def test_what_fails_has_its_reason_and_no_part_in_the_means():
    broken = {**results_of(FITS), "auto": [{"reason": "exit code 1: no such module"}] * 3}
    rows = page({"bert": broken, "gcn": results_of(FITS)}, 3).splitlines()
    assert "no such module" in next(row for row in rows if "BERT" in row)
    assert rows[-1].split("|")[5].strip() == "2.00 (2.00)"
    assert "mean" not in page({"bert": broken}, 3)


def test_lower_end_is_below_the_median_and_not_below_all():
    assert lower_end([1.0] * 7) == 1.0
    assert 1.0 <= lower_end([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]) < 1.3


def test_table_replaces_what_was_there():
    text = f"before\n{BEGIN}old\n{END}\nafter\n"
    assert written(text, "new\n") == f"before\n{BEGIN}new\n{END}\nafter\n"
    with pytest.raises(SystemExit):
        written("no marks", "new")
