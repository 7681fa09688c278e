"""The output of a worker, and the part of it that a message keeps."""

import io
import os

from nano_loop.distributed.launch_local.output import Output, pipe


def relayed(written: bytes) -> Output:
    reading, writing = pipe()
    os.write(writing, written)
    os.close(writing)
    output = Output(reading, io.StringIO(), "[rank 1] ")
    output.relay()
    os.close(reading)
    return output


def test_long_last_line_does_not_push_the_cause_out_of_the_last_words():
    names = ", ".join(f"scipy.module_{n}" for n in range(800))  # the end of faulthandler's output if scipy is imported
    found = relayed(f"Fatal Python error: Segmentation fault\n\nExtension modules: {names} (total: 800)\n".encode())
    assert found.last_words.startswith("[rank 1] Fatal Python error: Segmentation fault\n[rank 1] \n")
    assert found.last_words.endswith("scipy.module_799 (total: 800)\n")
    assert names in found._stream.getvalue()  # the displayed output is complete


def test_line_without_an_end_is_shown_in_pieces():
    reading, writing = pipe()
    output = Output(reading, io.StringIO(), "[rank 1] ")
    for _ in range(5):
        os.write(writing, b"x" * 30_000)
        output.relay()
    shown = output._stream.getvalue()
    assert [line.count("x") for line in shown.splitlines()] == [90_000]
    os.close(writing)
    output.relay()
    os.close(reading)
    assert output._stream.getvalue() == f"[rank 1] {'x' * 90_000}\n[rank 1] {'x' * 60_000}\n"


def test_last_words_are_the_end_of_what_was_written():
    found = relayed(b"".join(b"line %d\n" % n for n in range(2000)))
    assert found.last_words.endswith("[rank 1] line 1999\n")
    assert len(found.last_words) == 4000
