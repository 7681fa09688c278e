"""Watch this process and its children for new sockets that other processes of the host could connect to."""

import contextlib
import socket
import threading

import psutil

from nano_loop.distributed.launch_local import server as servers


class Watched:
    """Collects the new sockets: after ``with Watched() as found:``, `found.listened` has their kinds and addresses."""

    def __enter__(self):
        self.listened, self._ended = set(), threading.Event()
        # An earlier test in this process may have used gloo, which listens until its groups are collected.
        self._thread = threading.Thread(target=self._watch, args=({*listening()},))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self, before):
        while not self._ended.wait(0.005):
            self.listened |= {*listening()} - before


def listening():
    """Yield the sockets with an address of this process and its descendants, the kept process and its workers too."""
    roots = [psutil.Process(), *(psutil.Process(server.pid) for server in servers.kept)]
    for process in [each for root in roots for each in (root, *root.children(recursive=True))]:
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("all"):
                if each.status == psutil.CONN_LISTEN or (each.family is socket.AF_UNIX and each.laddr):
                    yield "unix" if each.family is socket.AF_UNIX else "tcp", each.laddr
