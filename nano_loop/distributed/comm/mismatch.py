"""Messages about ranks in different collectives: what each rank is doing, and in which line of the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nano_loop.distributed.comm.ranks import ITERATION, Loop
from nano_loop.errors import error_message
from nano_loop.patching.user_code import users_line

#: The operation of a rank that averages gradients.
AVERAGING = "the averaging of gradients"
#: The operation of a rank that normalizes its part of a batch; details are appended.
BATCH_NORM = "a batch norm in train mode"
#: The operation of a rank that computes a mean over the rows of its part of a batch.
MEAN_LOSS = "a mean of cross-entropy"
_ALONE_IN = {BATCH_NORM: "after model.eval()", MEAN_LOSS: "under torch.no_grad()"}

_DIVIDED = "every rank must iterate a loader that is divided"
_ALONE = "code for one rank only under torch.no_grad(), where each rank gets all batches"


class CallSite(NamedTuple):
    """The collective that a rank is in, and the line of the user's code that called it."""

    what: str
    line: str

    @classmethod
    def of_this_rank(cls, what: str) -> CallSite:
        """Return the call site of this rank."""
        return cls(what, users_line())

    def pack(self) -> bytes:
        """Return the call site as bytes."""
        return "\n".join(self).encode(errors="replace")

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> CallSite:
        """Unpack the result of `pack`. If bytes are missing at the end, the line is truncated."""
        what, _, line = data.decode(errors="replace").partition("\n")
        return cls(what, line)


def mismatch_message(own_rank: int, all_ranks: Mapping[int, CallSite]) -> str:
    """Return the message of rank `own_rank` for ranks that are in different collectives, given all their call sites."""
    iterating = [rank for rank, where in all_ranks.items() if where.what == ITERATION]
    others = [rank for rank, where in all_ranks.items() if where.what != all_ranks[own_rank].what]
    if not others:
        got = f"ranks {', '.join(map(str, sorted(all_ranks)))} wait for each other in different process groups"
        expected = "ranks in several groups must use them in the same order"
        message = error_message(
            got, expected, "Make the loop call the collectives of its groups in the same order on every rank"
        )
    elif iterating:
        other = next(rank for rank in all_ranks if rank not in iterating)
        got = f"rank {iterating[0]} iterates a loader, and rank {other} does not"
        message = error_message(got, _DIVIDED, f"Iterate it on every rank, or put {_ALONE}")
    else:
        got = f"rank {own_rank} is in a collective ({all_ranks[own_rank].what}) that rank {others[0]} is not in"
        expected = "all ranks must call the same collectives, with tensors of the same shape and dtype"
        hint = "Make the loop do the same on every rank; only printing and saving may differ"
        for what, where_alone in _ALONE_IN.items():
            if any(where.what.startswith(what) for where in all_ranks.values()):
                hint = f"{hint}, and computations {where_alone}"
        message = error_message(got, expected, hint)
    return "\n\n".join([message, *(_place(rank, where.line) for rank, where in all_ranks.items() if where.line)])


def left_behind(own_rank: int, rank: int, still: str, loop: Loop) -> str:
    """Return the message for a rank that has returned while this one `still`, a verb or `ITERATION`, waits for it."""
    got, (expected, hint) = f"rank {rank} has returned from {loop.name}, and rank {own_rank}", loop.same_steps
    if still == ITERATION:
        message = error_message(f"{got} iterates a loader", f"{expected}, and {_DIVIDED}", f"{hint}. Put {_ALONE}")
    else:
        message = error_message(f"{got} still {still}", expected, hint)
    return with_own_line(message, own_rank)


def with_own_line(message: str, rank: int) -> str:
    """Add the line of the user's code that this rank is at, if there is one."""
    line = users_line()
    return f"{message}\n\n{_place(rank, line)}" if line else message


def _place(rank: int, line: str) -> str:
    return f"rank {rank}:\n{line}"
