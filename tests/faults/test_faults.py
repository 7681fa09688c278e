"""Each fault in the table has its documented result, leaves nothing behind, and the process trains again."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from faults.apart import verdict_apart
from faults.page import rows
from faults.runs import train
from faults.table import FAULTS
from faults.verdict import twice_if_slow, verdict


@pytest.fixture(scope="module", autouse=True)
def private_temporary_folder(tmp_path_factory):
    """Set a private temporary folder, which also marks all processes that a row starts."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("temporary")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", str(folder))
        yield


@pytest.fixture(scope="module")
def warm(private_temporary_folder):
    """Initialize everything that torch and nano_loop make once per process."""
    list(DataLoader(TensorDataset(torch.ones(2)), num_workers=1))
    train()


def _marks(fault):
    if not fault.quick:
        yield pytest.mark.slow
    if fault.as_root:
        yield pytest.mark.skipif(os.geteuid() != 0, reason="only root can bring it about")


@pytest.mark.parametrize("fault", [pytest.param(each, id=each.name, marks=[*_marks(each)]) for each in FAULTS])
def test_fault(fault, warm, tmp_path):
    found = twice_if_slow(lambda: verdict_apart(fault, tmp_path) if fault.apart else verdict(fault))
    assert not found, "\n".join(found)


def test_there_are_a_hundred_faults_and_each_has_its_name():
    assert len(FAULTS) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_page_says_what_is_seen_of_each_fault():
    assert sorted(rows()) == sorted(fault.what for fault in FAULTS)
