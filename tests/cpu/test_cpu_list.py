"""CPU lists are read and written in the short form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_loop.cpu.tree import HIGHEST_CPU_ID, format_cpu_list, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("0,16", (0, 16)),
        ("", ()),
        ("\n", ()),
        (" 1 , 3-4 ", (1, 3, 4)),
        ("4,0-2,1", (0, 1, 2, 4)),
        ("8191", (8191,)),
    ],
)
def test_a_cpu_list_reads_as_sorted_ids(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("cpus", "text"),
    [
        ((0, 1, 2, 3, 8), "0-3,8"),
        ((), ""),
        ((7,), "7"),
        ((0, 1), "0-1"),
        ((0, 16), "0,16"),
        ((3, 1, 2, 2), "1-3"),
    ],
)
def test_ids_are_written_as_ranges(cpus, text):
    assert format_cpu_list(cpus) == text


@given(st.sets(st.integers(0, HIGHEST_CPU_ID)))
def test_what_is_written_reads_back_the_same(cpus):
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    "text",
    ["all", "0-", "-1", "3-1", "0,,2", "0-3:2/4", "1.5", "0x3", "0-99999999999", "8192", "٣", "0 1", "0-3,"],
)
def test_what_is_no_cpu_list_has_no_ids(text):
    assert parse_cpu_list(text) == ()


@given(st.text(max_size=20))
def test_any_text_gives_ids_of_cpus(text):
    assert all(0 <= cpu <= HIGHEST_CPU_ID for cpu in parse_cpu_list(text))
