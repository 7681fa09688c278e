"""Finds workloads and systems by what a person calls them: a name from a list, or the user's ``module:function``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def find(name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that a name stands for; raise `ValueError`, which says what there is."""
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
    """Return an argument's type: one name, checked."""

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
    """Return an argument's type: names between commas, each once, and each checked; `lists` have names themselves."""
    one, of_lists = name(known), lists or {}

    def parse(text: str) -> list[str]:
        found = (each for part in text.split(",") for each in of_lists.get(part, (part,)))
        return [one(each) for each in dict.fromkeys(found)]

    return parse


def at_least_one(text: str) -> int:
    """Be an argument's type: a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more")
    return int(text)
