"""Errors of the system that name no limit stay as they are; tests/faults reaches each limit."""

import errno

import pytest

from nano_loop import NanoError
from nano_loop.distributed.comm.system_limits import limits_in_words


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), limits_in_words("nothing", tmp_path):
        (tmp_path / "missing").read_text()
    with pytest.raises(NanoError, match="two files are needed"), limits_in_words("two files are needed", tmp_path):
        raise OSError(errno.EMFILE, "too many")
