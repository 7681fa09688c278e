"""The codec between hosts: plain values, and pickles only with a proof that a process of this launch has sent them.

If the launch has a secret, each message carries an HMAC-SHA256 of the run, the number of the collective, the sender and
the content. So a message of another run, an earlier one, or one of another rank is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from nano_loop.config.environment import SECRET
from nano_loop.distributed.comm import plain
from nano_loop.distributed.comm.channel import PICKLE, REFUSAL, Codec
from nano_loop.errors import NanoError, error_message

_SHORTEST = 32  # characters
_PLAIN = b"v"  # the first byte of a message, in addition to those of `Codec`
_BOUND = struct.Struct("<QI")  # the number of the collective, and the sender
_DIGEST = hashlib.sha256().digest_size


def secret_of(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret of this launch, or None if it has none.

    Raises
    ------
    NanoError
        If it is too short.
    """
    secret = environ.get(SECRET)
    if secret is None:
        return None
    if len(secret) < _SHORTEST:
        got = f"{SECRET} has {len(secret)} characters"
        expected = f"a secret has at least {_SHORTEST}"
        hint = 'Make one with python -c "import secrets; print(secrets.token_hex(32))"'
        raise NanoError(error_message(got, expected, hint))
    return secret.encode()


class SignedCodec(Codec):
    """Encodes plain values, and with a secret any value. See `Codec`.

    Parameters
    ----------
    rank : int
        This rank.
    run : bytes
        What only this run has: each rank has contributed a random part.
    secret : bytes or None
        The secret of the launch. With one, a message without its proof is refused.
    """

    def __init__(self, rank: int, run: bytes, secret: bytes | None) -> None:
        self._rank = rank
        self._run = run
        self._secret = secret
        self._number = 0

    @override
    def begin(self) -> None:
        self._number += 1

    @override
    def dumps(self, value: Any) -> bytes:
        try:
            return self._signed(_PLAIN + plain.dumps(value))
        except plain.NotPlainError as error:
            if self._secret is None:
                raise NanoError(_needs_secret(str(error))) from error
        return self._signed(super().dumps(value))

    @override
    def refusal(self, reason: str) -> bytes:
        return self._signed(super().refusal(reason))

    @override
    def loads(self, data: bytes, sender: int) -> Any:
        """See `Codec.loads`.

        Raises
        ------
        NanoError
            If the message is malformed or forged, or a pickle where there is no secret; and what a `refusal` says.
        """
        content = self._verified(data, sender)
        kind, rest = content[:1], content[1:]
        if kind == REFUSAL:
            raise NanoError(rest.decode(errors="replace")[:2000])
        if kind == PICKLE and self._secret is not None:
            return pickle.loads(rest)  # a process with the secret has made it
        if kind != _PLAIN:
            raise NanoError(_refused(sender, "it is a pickle without a proof, or no message of nano_loop"))
        return plain.loads(rest)

    def _signed(self, content: bytes) -> bytes:
        return content if self._secret is None else self._proof(content, self._rank) + content

    def _verified(self, data: bytes, sender: int) -> bytes:
        if self._secret is None:
            return data
        proof, content = data[:_DIGEST], data[_DIGEST:]
        if not hmac.compare_digest(proof, self._proof(content, sender)):
            raise NanoError(_refused(sender, f"its proof was not made with this launch's {SECRET}, for this place"))
        return content

    def _proof(self, content: bytes, sender: int) -> bytes:
        assert self._secret is not None
        bound = self._run + _BOUND.pack(self._number, sender)
        return hmac.new(self._secret, bound + content, hashlib.sha256).digest()


def _needs_secret(kind: str) -> str:
    got = f"a value to send between hosts contains an object that is not plain ({kind})"
    expected = "between hosts, numbers, strings, tensors, and lists and dicts of them travel without a secret"
    hint = f"Convert it to these, or set {SECRET} to the same 32 or more random characters on all hosts"
    return error_message(got, expected, hint)


def _refused(sender: int, reason: str) -> str:
    got = f"a message in the name of rank {sender} was refused: {reason}"
    hint = f"Set the same {SECRET} on all hosts, and check who can reach the ranks' ports"
    return error_message(got, "nano_loop unpickles nothing from a peer that it cannot authenticate", hint)
