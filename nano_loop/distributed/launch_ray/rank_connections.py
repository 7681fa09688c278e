"""A connection from each actor to rank 0, which breaks at once when one of the two processes ends.

Ray takes up to half a minute to notice that a node is lost. The kernel closes a connection when a process ends, and
finds out within seconds that the other host is silent. The reports of a rank travel on it.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from nano_loop.distributed.launch.reports import DUMP, Reporter

#: The request to delete the payload.
FORGET = b"f"
_GREETING = 5.0  # seconds that a new connection may take to say who it is
_RANK = 8  # digits of a rank, behind the token
_LONGEST_STACK = 20_000  # characters
# Seconds: of silence before the kernel asks, between questions; then how many, and what unread data may take.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 6000))


class RankConnections:
    """Rank 0's end: a listener at the address by which the other nodes reach this one.

    Parameters
    ----------
    address : str
        An address of this host.
    token : str
        What a rank has to know; connections without it are closed.
    """

    def __init__(self, address: str, token: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._token = token.encode()
        self.place: tuple[str, int] = (address, self._listener.getsockname()[1])

    def accept(self, ranks: set[int], timeout: float, check: Callable[[], None]) -> dict[int, socket.socket]:
        """Return the connections of these ranks, which have made them already; `check` is called on the way."""
        connections: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        self._listener.settimeout(0.1)
        while ranks - connections.keys() and time.monotonic() < deadline:
            check()
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                rank = self._rank_at(connection)
                if rank in ranks and rank not in connections:
                    connection.setblocking(False)
                    _configure(connection)
                    connections[rank] = connection
                else:
                    connection.close()
        return connections

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _rank_at(self, connection: socket.socket) -> int:
        """Return the rank at the other end; -1 for somebody else."""
        connection.settimeout(_GREETING)
        greeting, length = b"", len(self._token) + _RANK
        with contextlib.suppress(OSError, ValueError):
            while len(greeting) < length and (piece := connection.recv(length - len(greeting))):
                greeting += piece
            if hmac.compare_digest(greeting[:-_RANK], self._token):
                return int(greeting[-_RANK:])
        return -1


class ConnectionToRank0(Reporter):
    """A worker's end. The process ends when rank 0's does.

    Parameters
    ----------
    place : (str, int)
        Where rank 0 listens.
    rank : int
        This process's.
    token : str
        See `RankConnections`.
    forget : callable
        Deletes the payload; called when all ranks have read it.
    end : callable
        Ends this process; called when rank 0 has ended.
    """

    def __init__(
        self, place: tuple[str, int], rank: int, token: str, forget: Callable[[], object], end: Callable[[], object]
    ) -> None:
        self._socket = socket.create_connection(place, timeout=30)
        super().__init__(rank, self._socket.sendall)
        self._socket.sendall(f"{token}{rank:0{_RANK}}".encode())
        self._socket.settimeout(None)
        _configure(self._socket)
        self._forget, self._end = forget, end
        self._thread = threading.get_ident()  # of the loop
        threading.Thread(target=self._listen, name="nano_loop connection to rank 0", daemon=True).start()

    def _listen(self) -> None:
        while requests := self._requests():
            if FORGET in requests:
                self._forget()
            if DUMP in requests:
                frame = sys._current_frames().get(self._thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self.report("stack", stack[-_LONGEST_STACK:].encode())
        self._socket.close()
        self._end()

    def _requests(self) -> bytes:
        try:
            return self._socket.recv(64)
        except OSError:
            return b""


def _configure(connection: socket.socket) -> None:
    """Let the kernel ask for a silent host, and send each report at once: an exception comes right behind its words."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):  # not on every Unix
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
