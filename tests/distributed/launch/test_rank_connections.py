"""A rank's connection to rank 0 ends with either process, takes only who knows the token, and carries reports."""

import socket
import threading
import time

from nano_loop.distributed.launch.reports import DUMP, Frames
from nano_loop.distributed.launch_ray.rank_connections import FORGET, ConnectionToRank0, RankConnections

TOKEN = "the token of the run"


def connected(rank=1, token=TOKEN, forget=lambda: None, end=lambda: None):
    """Return rank 0's listener, and the other end of a rank that has connected to it."""
    listener = RankConnections("127.0.0.1", TOKEN)
    return listener, ConnectionToRank0(listener.place, rank, token, forget, end)


def received(connection, frames, count=1):
    """Return the next messages."""
    found, deadline = [], time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        try:
            found += frames.feed(connection.recv(1 << 16))
        except BlockingIOError:
            time.sleep(0.01)
    return found


def test_reports_and_requests_travel():
    ended, forgotten = threading.Event(), threading.Event()
    listener, worker_s = connected(forget=forgotten.set, end=ended.set)
    worker_s.report("warning")  # before rank 0 has accepted the connection
    connection = listener.accept({1}, 5, lambda: None)[1]
    frames = Frames()
    ((header, _),) = received(connection, frames)
    assert header["kind"] == "warning"
    connection.send(FORGET + DUMP)
    ((header, content),) = received(connection, frames)
    assert header["kind"] == "stack"
    assert b"test_reports_and_requests_travel" in content
    assert forgotten.is_set()
    connection.close()
    listener.close()
    assert ended.wait(5)


def test_process_is_ended_when_rank_0_is_gone():
    ended = threading.Event()
    listener, _ = connected(end=ended.set)
    listener.accept({1}, 5, lambda: None)[1].close()
    assert ended.wait(5)
    listener.close()


def test_who_does_not_know_the_token_is_closed_out():
    ended = threading.Event()
    listener, _ = connected(token=TOKEN[::-1], end=ended.set)
    stranger = socket.create_connection(listener.place)
    stranger.sendall(b"1" * (len(TOKEN) + 8))
    silent = socket.create_connection(listener.place)
    silent.close()
    assert listener.accept({1}, 0.5, lambda: None) == {}
    assert stranger.recv(1) == b""
    stranger.close()
    listener.close()
    assert ended.wait(5)
