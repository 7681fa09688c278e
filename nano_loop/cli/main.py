"""The entry point of the command line. It says what to install where the library of the command line is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from nano_loop.cli.refusal import refused
from nano_loop.errors import NanoError, error_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments. By default, those of this process.

    Returns
    -------
    int
        The exit code: 0 if all is well, 1 if `doctor` has found what hurts, 2 for bad input.
    """
    if importlib.util.find_spec("click") is None:
        expected = "nano-loop's command line needs click"
        return refused(error_message("click is not installed", expected, 'Run: pip install "nano-loop[cli]"'))
    from nano_loop.cli.app import run_app

    try:
        return run_app(sys.argv[1:] if arguments is None else arguments)
    except NanoError as error:
        return refused(str(error))
