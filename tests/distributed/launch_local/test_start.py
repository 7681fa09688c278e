"""The environment of a worker."""

from types import SimpleNamespace

import pytest

from nano_loop.config.environment import EXPORTS, Exports
from nano_loop.distributed.launch_local.start import environment_of

SLOT = SimpleNamespace(machine=SimpleNamespace(num_threads=3))
NOTE = Exports({"OMP_NUM_THREADS": None}, {"OMP_NUM_THREADS": "12"}).encoded()


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, "3"),
        ({"OMP_NUM_THREADS": "12"}, "12"),
        ({"OMP_NUM_THREADS": "12", EXPORTS: NOTE}, "3"),
        ({"OMP_NUM_THREADS": "2", EXPORTS: NOTE}, "2"),
        ({EXPORTS: NOTE}, "3"),
    ],
    ids=["not set", "by the user", "by the command line", "by the user afterwards", "unset afterwards"],
)
def test_threads_are_the_ranks_share_unless_the_user_has_set_their_number(environ, threads):
    assert environment_of(SLOT, environ)["OMP_NUM_THREADS"] == threads
