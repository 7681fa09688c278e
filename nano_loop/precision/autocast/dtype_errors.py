"""Adds advice to torch's errors about bf16 mixed with fp32 in a model that runs under autocast."""

from __future__ import annotations

import re
import traceback

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.user_code import users_frame

# torch has no exception class for these errors, and words each one differently.
_ABOUT_DTYPES = re.compile(
    r"bfloat16|\bHalf\b|expected scalar type|"
    r"same (dtype|type|scalar type)|equal to src\.dtype|dtypes match|expected dtype",
    re.IGNORECASE,
)
_ADVICE = "Put it under `with nano_loop.disable_casts():`, where it computes in fp32, or name it in fp32_ops"
_UNDER_AUTOCAST = "autocast gives it tensors that torch refuses, such as bf16 or fp16 with fp32"
_NO_KERNEL, _IN_FP32 = "torch has no kernel for it in this dtype", _ADVICE.partition(", or name")[0]


def explain(error: BaseException, expected: str = _UNDER_AUTOCAST, advice: str = _ADVICE) -> None:
    """Add the operation, the user's line and advice to an error about dtypes that is being raised.

    Parameters
    ----------
    error : BaseException
        The error. Other kinds of errors are not changed.
    expected, advice : str
        The last two parts of the text.

    Raises
    ------
    NanoError
        Raised instead in Python 3.10, whose exceptions have no notes.
    """
    # torch's error for a missing kernel, "not implemented", is also a RuntimeError.
    text = _explanation(error, expected, advice) if isinstance(error, RuntimeError) else None
    if text is None:
        return
    if not hasattr(error, "add_note"):
        raise NanoError(f"{error}\n{text}") from error
    error.add_note(text)


def _explanation(error: RuntimeError, expected: str, advice: str) -> str | None:
    if not _ABOUT_DTYPES.search(str(error)) or any(advice in note for note in getattr(error, "__notes__", ())):
        return None
    if "not implemented" in str(error):
        expected, advice = _NO_KERNEL, _IN_FP32
    frame = users_frame(traceback.extract_tb(error.__traceback__))
    got = "An operation of the model"
    if frame is not None:
        got = f"{frame.line or got} ({frame.filename}, line {frame.lineno})"
    return error_message(got, expected, advice)
