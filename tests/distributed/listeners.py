"""Watches a process and its children for new sockets that another user of the host could connect to.

Run as a program, it prints ``ready``, and when its standard input is closed, what it has found as JSON: the addresses,
and at which of them a process of another user was let in.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

NOBODY = 65534
LISTENS = "0A"


def main(root):
    ended, found, connected = threading.Event(), set(), set()
    # An earlier test in this process may have used gloo, which listens until its groups are garbage.
    before = {address for _, _, address in [*internet(), *unix()]}
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    while not ended.is_set():
        for family, inode, address in [*internet(), *unix()]:
            if address not in before | found and inode in inodes(tree(root)):
                found.add(address)
                connected |= {address} if connects(family, address) else set()
    print(json.dumps([sorted(found), sorted(connected)]))


def internet():
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in lines(f"/proc/net/{name}"):
            fields = line.split()
            if fields[3] == LISTENS:
                yield family, fields[9], f"{name} {fields[1]}"


def unix():
    for line in lines("/proc/net/unix"):
        fields = line.split()
        if int(fields[3], 16) & 0x10000:  # it accepts connections
            yield socket.AF_UNIX, fields[6], f"unix {fields[7] if len(fields) > 7 else '?'}"


def lines(path):
    return Path(path).read_text().splitlines()[1:] if Path(path).exists() else []


def tree(root):
    """The process and all that it has started."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def inodes(pids):
    found = set()
    for pid in pids:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return found


def connects(family, address):
    """Connect as another user where this one may become one, and as this one elsewhere."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            with socket.socket(family) as peer:
                peer.settimeout(1)
                peer.connect(where(family, address.split(" ", 1)[1]))
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def where(family, address):
    if family == socket.AF_UNIX:
        return "\0" + address[1:] if address.startswith("@") else address
    port = int(address.rpartition(":")[2], 16)
    return ("127.0.0.1" if family == socket.AF_INET else "::1", port)


class Watched:
    """``with Watched() as found:`` and afterwards `found.listened` and `found.connected`."""

    def __enter__(self):
        command = [sys.executable, "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.listened, self.connected = json.loads(self._process.communicate(timeout=60)[0])
        assert self._process.returncode == 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
