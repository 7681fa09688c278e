"""Each fault in the table has its documented result, leaves nothing behind, and the process trains again."""

import dataclasses
import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from faults.apart import verdict_apart
from faults.page import rows
from faults.runs import train
from faults.table import FAULTS
from faults.verdict import twice_if_slow, verdict

# torch 2.8 makes a folder when torch._dynamo is imported; a caller's process that ends with os._exit leaves it.
_FOLDER = ("temporary tmp",)
# torch 2.8 does not reap a loader process that has raised until multiprocessing starts another process.
_PROCESS = ("processes ", "descriptors ")
#: Other leftovers of torch 2.8, after rows in which a plain loop leaves them as well.
LEFT_BY_TORCH_2_8 = {
    "a run in a forked child of multiprocessing": _FOLDER,
    "a run fails in a pool of multiprocessing": _FOLDER,
    "a loader's process raises on rank 0": _PROCESS,
    "a loader's process hangs on rank 0, and the loader has a timeout": _PROCESS,
    "nobody reads standard output any more (| head)": _FOLDER,
}


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


def _rows(apart):
    chosen = [_with_what_torch_leaves(fault) for fault in FAULTS if fault.apart == apart]
    return [pytest.param(each, id=each.name, marks=[*_marks(each)]) for each in chosen]


def _with_what_torch_leaves(fault):
    more = LEFT_BY_TORCH_2_8.get(fault.what, ()) if torch.__version__ < "2.9" else ()
    return dataclasses.replace(fault, leaves=(*fault.leaves, *more))


def _marks(fault):
    if not fault.quick:
        yield pytest.mark.slow
    if fault.as_root:
        yield pytest.mark.skipif(os.geteuid() != 0, reason="only root can bring it about")


@pytest.mark.parametrize("fault", _rows(apart=False))
def test_fault(fault, warm):
    found = twice_if_slow(lambda: verdict(fault))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("fault", _rows(apart=True))
def test_fault_in_a_process_that_does_nothing_else(fault, tmp_path):
    found = twice_if_slow(lambda: verdict_apart(fault, tmp_path))
    assert not found, "\n".join(found)


def test_there_are_a_hundred_faults_and_each_has_its_name():
    assert len(FAULTS) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_rows_after_which_torch_leaves_something_are_in_the_table():
    assert {fault.what for fault in FAULTS} >= LEFT_BY_TORCH_2_8.keys()


def test_page_says_what_is_seen_of_each_fault():
    assert sorted(rows()) == sorted(fault.what for fault in FAULTS)
