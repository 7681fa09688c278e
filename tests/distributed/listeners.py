"""Watch this process and its children for new sockets that other processes of the host could connect to."""

import glob
import os
import threading
from pathlib import Path

import psutil

from nano_loop.distributed.launch_local import server as servers

LISTENS = "0A"


class Watched:
    """Collects the new sockets: after ``with Watched() as found:``, `found.listened` has their kinds and addresses."""

    def __enter__(self):
        self.listened, self._ended = set(), threading.Event()
        # An earlier test in this process may have used gloo, which listens until its groups are collected.
        before = {address for _, address in listening()}
        self._thread = threading.Thread(target=self._watch, args=(before,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self, before):
        while not self._ended.wait(0.005):
            new = {inode: address for inode, address in listening() if address not in before | self.listened}
            mine = inodes() if new else ()
            self.listened |= {address for inode, address in new.items() if inode in mine}


def listening():
    """Yield the inode and the address of each socket of this host that accepts connections."""
    for name in ("tcp", "tcp6"):
        for fields in rows(name):
            if fields[3] == LISTENS:
                yield fields[9], f"{name} {fields[1]}"
    for fields in rows("unix"):
        if int(fields[3], 16) & 0x10000:
            yield fields[6], f"unix {fields[7] if len(fields) > 7 else '?'}"


def rows(name):
    path = Path("/proc/net", name)
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def inodes():
    """Return the sockets of this process and of its descendants, including the kept process and its workers."""
    found, roots = set(), [psutil.Process(), *(psutil.Process(server.pid) for server in servers.kept())]
    for process in [each for root in roots for each in (root, *root.children(recursive=True))]:
        links = [link_of(entry) for entry in glob.glob(f"/proc/{process.pid}/fd/*")]
        found |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return found


def link_of(path):
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
