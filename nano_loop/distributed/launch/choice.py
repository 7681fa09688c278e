"""The choice of a run's launcher, by its options and by the launcher that has started this process.

Launchers of several processes are imported where they are chosen: a run of one process begins 25 ms earlier.
"""

from __future__ import annotations

import os

from nano_loop.config.options import Options
from nano_loop.distributed.launch.alone import Alone
from nano_loop.distributed.launch.launcher import Launcher
from nano_loop.distributed.launch_external.environment import found_launch


def choose(options: Options, *, inside_run: bool) -> Launcher:
    """Return the launcher of a run.

    Parameters
    ----------
    options : Options
        The options of the run.
    inside_run : bool
        Whether it begins inside another run of this thread, which the processes of an external launcher are for.
    """
    launch = None if inside_run else found_launch(os.environ)
    if launch is not None:
        from nano_loop.distributed.launch_external.launcher import External

        return External(options, launch)
    if (options.num_processes or 1) == 1:
        return Alone(options)
    if options.distributed_backend == "ray":
        from nano_loop.distributed.launch_ray.launcher import RayLauncher

        return RayLauncher(options)
    from nano_loop.distributed.launch_local.launcher import Local

    return Local(options)
