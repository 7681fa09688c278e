"""Memory that is shared already is sent as the place where it is, and is mapped there by those who read it."""

import mmap
import os
import sys

import numpy as np
import pytest
import torch

from nano_loop import NanoError
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.distributed.payload.shared_files import mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory map of a process is Linux's")

MIB = 1 << 20


def shared_tensor(folder):
    return torch.full((4 * MIB,), 7, dtype=torch.uint8).share_memory_()


def part_of_a_shared_tensor(folder):
    return shared_tensor(folder)[MIB:]


def file_on_disk(folder):
    return torch.from_file(str(folder / "file"), shared=True, size=4 * MIB, dtype=torch.uint8).fill_(7)


def memory_without_a_name(folder):
    descriptor = os.memfd_create("of the test")
    os.ftruncate(descriptor, 4 * MIB + mmap.ALLOCATIONGRANULARITY)
    memory = mmap.mmap(descriptor, 4 * MIB, offset=mmap.ALLOCATIONGRANULARITY)
    os.close(descriptor)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    return array


@pytest.mark.parametrize("make", [shared_tensor, part_of_a_shared_tensor, file_on_disk, memory_without_a_name])
def test_shared_memory_is_not_copied_and_a_reader_s_changes_are_its_own(tmp_path, make):
    data, folder = make(tmp_path), tmp_path / "payload"
    folder.mkdir()
    dump(data, folder, {})
    assert sum(file.stat().st_size for file in folder.iterdir()) < MIB
    arrived = load(folder)
    assert type(arrived) is type(data)
    assert len(arrived) == len(data)
    assert (arrived == 7).all()
    arrived[0] = 1
    assert data[0] == 7


@pytest.mark.parametrize("make", [lambda: torch.ones(MIB), lambda: torch.nn.Parameter(torch.ones(MIB).share_memory_())])
def test_what_is_not_shared_or_is_trained_is_copied(tmp_path, make):
    data = make()
    dump(data, tmp_path, {})
    arrived = load(tmp_path)
    with torch.no_grad():
        data.fill_(3)
    assert (arrived == 1).all()


def test_private_pages_of_a_file_and_memory_beyond_a_mapping_are_not_taken_for_a_file_s(tmp_path):
    (tmp_path / "file").write_bytes(bytes(MIB))
    private = torch.from_file(str(tmp_path / "file"), shared=False, size=MIB, dtype=torch.uint8)
    shared = torch.ones(MIB, dtype=torch.uint8).share_memory_()
    assert mapped(private.data_ptr(), MIB) is None  # its pages may have been written
    assert mapped(0, MIB) is None
    assert mapped(shared.data_ptr(), MIB).size == MIB
    assert mapped(shared.data_ptr(), 1 << 40) is None


def test_file_that_is_gone_when_it_is_read_is_told(tmp_path):
    path = tmp_path / "file"
    tensor = torch.from_file(str(path), shared=True, size=MIB, dtype=torch.uint8)
    place = mapped(tensor.data_ptr(), MIB)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(NanoError, match="share"):
        place.load()
    path.write_bytes(bytes(MIB))
    with pytest.raises(NanoError, match="another file"):
        place.load()


def test_bytes_that_are_copied_are_counted(tmp_path):
    (tmp_path / "copied").mkdir()
    assert dump([torch.ones(MIB), shared_tensor(tmp_path)], tmp_path / "copied", {}) == 4 * MIB
