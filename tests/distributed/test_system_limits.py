"""If the system refuses a resource, the error names the limit and the remedy."""

import errno
import os

import pytest

from nano_loop import NanoError
from nano_loop.distributed.comm import system_limits
from nano_loop.distributed.comm.system_limits import limit_in_words, limits_in_words


@pytest.mark.parametrize(
    ("number", "limited", "helps"),
    [
        (errno.EMFILE, "files and pipes at a time", "ulimit -n"),
        (errno.EAGAIN, "limit of processes", "ulimit -u"),
        (errno.EFBIG, "bytes", "ulimit -f"),
    ],
)
def test_limit_is_named_with_what_helps(tmp_path, number, limited, helps):
    needed, advice = limit_in_words(OSError(number, os.strerror(number)), tmp_path)
    assert limited in needed
    assert helps in advice


def test_shared_memory_is_enlarged_and_tmpdir_would_not_help(tmp_path, monkeypatch):
    monkeypatch.setattr(system_limits, "SHARED_MEMORY", tmp_path)
    _, advice = limit_in_words(OSError(errno.ENOSPC, "full"), tmp_path / "nano_loop-1")
    assert "--shm-size" in advice
    assert "TMPDIR" not in advice


def test_file_system_of_the_file_that_was_refused_is_described(tmp_path):
    needed, _ = limit_in_words(OSError(errno.ENOSPC, "full", str(tmp_path / "new")), system_limits.SHARED_MEMORY)
    assert str(tmp_path) in needed


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), limits_in_words("nothing", tmp_path):
        (tmp_path / "missing").read_text()
    with pytest.raises(NanoError, match="two files are needed"), limits_in_words("two files are needed", tmp_path):
        raise OSError(errno.EMFILE, "too many")
