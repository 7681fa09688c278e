"""Each planted fault is a line that occurs once in its file, and the tests that look for it exist."""

import ast

import pytest
from planted_faults import FAULTS, ROOT, is_found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_planted_fault_is_of_a_line_that_stands_there(fault):
    source = (ROOT / "nano_loop" / fault.file).read_text()
    assert source.count(fault.text) == 1
    assert all((ROOT / name).exists() for name in fault.tests.split())
    if fault.file.endswith(".py"):
        ast.parse(source.replace(fault.text, fault.planted))


def test_there_are_forty_in_most_rooms():
    assert len(FAULTS) >= 40
    assert len({fault.file.rpartition("/")[0] for fault in FAULTS}) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_a_fault_is_found_by_a_failing_test_alone(is_planted):
    fault = next(fault for fault in FAULTS if fault.file == "profiling/kinds.py")
    assert is_found(fault if is_planted else fault._replace(planted=fault.text)) is is_planted
