"""Messages arrive whole and in order, however they are split in transit, without blocking anyone."""

import os
import socket
import threading

import pytest

from nano_loop.distributed.launch.stream import Stream

LARGE = os.urandom(3 << 20)


@pytest.fixture
def ends():
    first, second = map(Stream, socket.socketpair())
    yield first, second
    first.close()
    second.close()


def received(stream):
    return [(header["kind"], content) for header, content in stream.receive()]


def test_messages_go_both_ways_and_nobody_waits_for_one(ends):
    first, second = ends
    assert received(first) == received(second) == []
    first.send("start", b"with\ncontent", rank=1)
    first.send("kill")
    second.send("ready")
    assert received(first) == [("ready", b"")]
    assert received(second) == [("start", b"with\ncontent"), ("kill", b"")]
    assert first.is_open
    assert second.is_open


def test_content_larger_than_the_socket_arrives_in_pieces_as_one_message(ends):
    first, second = ends
    sending = threading.Thread(target=first.send, args=("exception", LARGE))
    sending.start()
    found = []
    while not found:
        found = received(second)
    sending.join()
    assert found == [("exception", LARGE)]


def test_descriptors_come_in_the_order_of_their_messages(ends):
    first, second = ends
    pipes = [os.pipe() for _ in range(3)]
    for _, writing in pipes:
        first.send("fork", descriptors=[writing])
        os.close(writing)
    assert [kind for kind, _ in received(second)] == ["fork"] * 3
    for number, ((reading, _), writing) in enumerate(zip(pipes, second.descriptors, strict=True)):
        os.write(writing, b"%d" % number)
        os.close(writing)
        assert os.read(reading, 9) == b"%d" % number
        os.close(reading)


def test_what_was_sent_before_an_end_was_closed_is_received_and_half_a_message_is_not():
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    Stream(theirs).send("finished")
    theirs.send(b'{"kind": "exception", "bytes": 5}\nhal')
    theirs.close()
    assert received(stream) == [("finished", b"")]
    assert not stream.is_open
    assert received(stream) == []
    with pytest.raises(OSError, match="Broken pipe"):
        stream.send("kill")
    stream.close()
