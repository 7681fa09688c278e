"""A connection from each actor to rank 0, which breaks at once when one of the two processes ends.

Ray takes up to half a minute to notice that a node is lost. The kernel closes a connection when a process ends, and
finds out within seconds that the other host is silent. What travels besides is text: warnings, and where a rank is.
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
from typing import Any

from nano_loop.distributed.launch_local.frames import framed

_QUESTION = b"?"
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
                    _keep_alive(connection)
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


class ConnectionToRank0:
    """A worker's end. The process ends when rank 0's does.

    Parameters
    ----------
    place : (str, int)
        Where rank 0 listens.
    rank : int
        This process's.
    token : str
        See `RankConnections`.
    end : callable
        Ends this process; called when rank 0 has ended.
    """

    def __init__(self, place: tuple[str, int], rank: int, token: str, end: Callable[[], object]) -> None:
        self._socket = socket.create_connection(place, timeout=30)
        self._socket.sendall(f"{token}{rank:0{_RANK}}".encode())
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._end = end
        self._sending = threading.Lock()
        self._thread = threading.get_ident()  # of the loop
        threading.Thread(target=self._listen, name="nano_loop connection to rank 0", daemon=True).start()

    def send(self, header: dict[str, Any], content: bytes = b"") -> None:
        """Send text to rank 0, if that is still there."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(framed(header, content))

    def _listen(self) -> None:
        heard = _QUESTION
        while heard:
            try:
                heard = self._socket.recv(64)
            except OSError:
                heard = b""
            if _QUESTION in heard:
                frame = sys._current_frames().get(self._thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self.send({"kind": "whereabouts"}, stack[-_LONGEST_STACK:].encode())
        self._socket.close()
        self._end()


def ask(connection: socket.socket) -> None:
    """Ask a worker where it is in its Python code."""
    with contextlib.suppress(OSError):
        connection.send(_QUESTION)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):  # not on every Unix
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
