"""The codec between ranks of one host: pickles, which only processes of this user can have written."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle

from nano_loop.errors import NanoError

_VALUE, _REFUSAL = b"v", b"r"


class PickleCodec:
    """Pickles any value; see `Codec`. Only for channels that nobody else can write to."""

    def begin(self) -> None:
        """See `Codec.begin`."""

    def dumps(self, value: Any) -> bytes:
        """See `Codec.dumps`."""
        data: bytes = cloudpickle.dumps(value)
        return _VALUE + data

    def refusal(self, reason: str) -> bytes:
        """See `Codec.refusal`."""
        return _REFUSAL + reason.encode()

    def loads(self, data: bytes, sender: int) -> Any:
        """See `Codec.loads`."""
        if data[:1] == _REFUSAL:
            raise NanoError(data[1:].decode())
        return pickle.loads(memoryview(data)[1:])
