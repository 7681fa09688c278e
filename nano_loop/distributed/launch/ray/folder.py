"""The private folder of one actor, which is deleted when the process ends, however it ends."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack

from nano_loop.distributed.files.folder import place_of, workers_files
from nano_loop.distributed.launch.local.worker import keep_sockets_in
from nano_loop.distributed.launch.shared_folder import private_folder

# It waits for the end of the process that holds the pipe. Ray kills the children of an actor, so it is no child: the
# first shell ends at once.
_WAIT_AND_DELETE = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$@") >/dev/null 2>&1 &'


class NodeFolder:
    """A folder in shared memory for this process, and one on disk for what it writes.

    Attributes
    ----------
    path : pathlib.Path
        The first; `nano_loop.distributed.files.folder.place_of` gives the second.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self.path = self._open.enter_context(private_folder())
        self._open.enter_context(workers_files(self.path))
        keep_sockets_in(self.path)
        places = [str(self.path), place_of(self.path)]
        command = ["/bin/sh", "-c", _WAIT_AND_DELETE, "sh", *places, *(f"{each}.gone" for each in places)]
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        shell.wait()
        self._pipe = shell.stdin  # open as long as this process lives

    def clear(self, name: str) -> None:
        """Delete something in the folder."""
        shutil.rmtree(self.path / name, ignore_errors=True)
