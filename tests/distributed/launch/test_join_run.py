"""The options and the environment of the process select one launcher for each run."""

import pytest

from nano_loop.config.options import Options
from nano_loop.distributed.launch.join_run import choose
from nano_loop.distributed.launch.launcher import Alone
from nano_loop.distributed.launch_external.launcher import External
from nano_loop.distributed.launch_local.launcher import Local
from nano_loop.distributed.launch_ray import launcher as of_ray
from nano_loop.distributed.launch_ray.launcher import RayLauncher

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("options", "variables", "inside_run", "launcher", "place"),
    [
        ({}, {}, False, Alone, (0, 1, 0, 1)),
        ({"num_processes": 1}, {}, False, Alone, (0, 1, 0, 1)),
        ({"num_processes": 3}, {}, False, Local, (0, 3, 0, 3)),
        ({"num_processes": 3, "distributed_backend": "ray"}, {}, False, RayLauncher, (0, 3, 0, 3)),
        ({"num_processes": 1, "distributed_backend": "ray"}, {}, False, Alone, (0, 1, 0, 1)),
        ({}, TORCHRUN, False, External, (3, 4, 1, 2)),
        ({"num_processes": 4}, TORCHRUN, False, External, (3, 4, 1, 2)),
        ({"num_processes": 1}, TORCHRUN, True, Alone, (0, 1, 0, 1)),
    ],
)
def test_launcher_and_the_place_that_it_expects(monkeypatch, options, variables, inside_run, launcher, place):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(of_ray, "_refuse_missing_ray", lambda options: None)  # Ray is not in every environment
    chosen = choose(Options(**options), inside_run=inside_run)
    ranks = chosen.expected_ranks()
    assert type(chosen) is launcher
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == place
    assert chosen.needs_whole_process == (ranks.size > 1)


def test_list_of_cpus_needs_the_whole_process():
    assert choose(Options(cpu_for_each_process=[[0]]), inside_run=False).needs_whole_process
