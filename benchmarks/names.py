"""Find workloads and systems by name: a name from a list, or the user's ``module:function``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def find(name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function with this name; raise a `ValueError` that lists the names if there is none."""
    module, colon, function = name.partition(":")
    if not colon:
        if name not in known:
            raise ValueError(f"{name!r}: there are {', '.join(known)}, or module:function of your own")
        return known[name]
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from error


def name(known: Mapping[str, Callable[..., Any]]) -> Callable[[str], str]:
    """Return an argument type: one name, checked."""

    def parse(text: str) -> str:
        try:
            find(text, known)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return parse


def names(
    known: Mapping[str, Callable[..., Any]], lists: Mapping[str, Iterable[str]] | None = None
) -> Callable[[str], list[str]]:
    """Return an argument type: comma-separated names, each checked and used once; `lists` are named lists of names."""
    one, of_lists = name(known), lists or {}

    def parse(text: str) -> list[str]:
        found = (each for part in text.split(",") for each in of_lists.get(part, (part,)))
        return [one(each) for each in dict.fromkeys(found)]

    return parse


def at_least_one(text: str) -> int:
    """Parse an argument that is a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more")
    return int(text)
