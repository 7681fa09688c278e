"""Ranks of one host exchange bytes and tensors of all dtypes, and detect that their calls differ."""

import os
from pathlib import Path

import pytest
import torch

from nano_loop.distributed.comm.process_group_channel import ProcessGroupChannel
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.distributed.shared_memory.shared_file import make, map_whole
from nano_loop.distributed.shared_memory.shared_group import SharedGroup
from nano_loop.errors import NanoError, RankLeftError

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)
DTYPES += (torch.bfloat16, torch.float16, torch.complex64, torch.int64)


def opened(ranks, folder, piece=256):
    return SharedChannel(ranks, Path(folder), "small", piece=piece)


@pytest.mark.parametrize("kind", ["shared memory", "process group"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_and_tensors_of_all_dtypes_arrive(team, tmp_path, kind, size):
    lengths = (0, 1, 255, 256, 257, 503, 504, 505, 512, 700, 1025)

    def data(turn, rank):
        return bytes((turn + rank + n) % 256 for n in range(lengths[(turn * (rank + 1)) % len(lengths)]))

    def run(ranks):
        channel = opened(ranks, tmp_path) if kind == "shared memory" else ProcessGroupChannel(ranks)
        wrong = []
        for turn in range(len(lengths) * 3):
            source = turn % ranks.size
            mine = data(turn, ranks.rank)
            wrong += [turn] * (channel.exchange(mine, "all") != [data(turn, rank) for rank in range(ranks.size)])
            ours = channel.exchange(mine if ranks.rank == source else b"", "one")
            wrong += [turn] * (ours != [data(turn, rank) * (rank == source) for rank in range(ranks.size)])
            ranks.channel, dtype = channel, DTYPES[turn % len(DTYPES)]
            tensor = torch.full((turn * 31 % 400,), ranks.rank + 1).to(dtype)
            ranks.broadcast_tensors([tensor])
            wrong += [dtype] * (not tensor.float().eq(1).all())
        if kind == "shared memory":
            channel.close()
        return wrong

    assert team(size)(run) == [[]] * size


@pytest.mark.slow
def test_sums_are_made_in_the_order_of_ranks(team, tmp_path):
    def mine(rank):
        return torch.rand(999, generator=torch.Generator().manual_seed(rank))

    def run(ranks):
        channel, tensor = opened(ranks, tmp_path), mine(ranks.rank)
        SharedGroup(ranks, lambda: channel, "sums").allreduce([tensor])
        channel.close()
        return tensor

    for got in team(3)(run):
        assert got.equal(mine(0) + mine(1) + mine(2))


@pytest.mark.parametrize(("returned", "words"), [(True, "has returned from train"), (False, "has failed")])
def test_rank_that_left_is_named(team, tmp_path, returned, words):
    def run(ranks):
        channel, said = opened(ranks, tmp_path), None
        channel.exchange(b"", "barrier")
        if ranks.rank == 1:
            channel.leave(returned=returned)
        else:
            with pytest.raises(RankLeftError) as caught:
                channel.exchange(b"", "barrier")
            said = str(caught.value), caught.value.rank
        channel.close()
        return said

    (said, rank), _ = team(2)(run)
    assert said.startswith(f"rank 1 {words}, and rank 0 still exchanges values: ")
    assert rank == 1


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_file_is_this_user_s_alone_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        make(str(tmp_path / "file"), 10)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    map_whole(str(tmp_path / "file"), 10).close()


def test_file_that_is_there_is_never_taken_for_a_new_one(tmp_path):
    (tmp_path / "target").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "link"):
        make(str(tmp_path / name), 20)
    assert (tmp_path / "target").read_bytes() == bytes(10)
    assert (tmp_path / "link").is_symlink()
    assert len([*tmp_path.iterdir()]) == 2


def test_files_that_others_may_open_links_and_folders_are_refused(tmp_path):
    file = tmp_path / "file"
    make(str(file), 10)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(NanoError, match=r"has the mode l.*: it must be a regular file that only"):
        map_whole(str(tmp_path / "link"), 10)
    file.chmod(0o640)
    with pytest.raises(NanoError, match=r"has the mode -rw-r-----: it must be a regular file that only"):
        map_whole(str(file), 10)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(NanoError, match="regular file"):
        map_whole(str(tmp_path / "pipe"), 10)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make another user's file")
def test_file_of_another_user_is_refused(tmp_path):
    make(str(tmp_path / "file"), 10)
    os.chown(tmp_path / "file", 65534, -1)
    with pytest.raises(NanoError, match="belongs to user 65534"):
        map_whole(str(tmp_path / "file"), 10)
