"""Rewrites links of Markdown pages for the documentation's site and for a package index."""

from __future__ import annotations

import re
from collections.abc import Callable

_BLOCK = re.compile(r"^(```.*?^```|(?: {4}[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
# A link, or inline code, which contains no links.
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)|(`+).*?\4", re.DOTALL)


def relinked(markdown: str, target_of: Callable[[str, bool], str | None]) -> str:
    """Return a page with new targets for its links to files and its pictures. Code is unchanged.

    Parameters
    ----------
    markdown : str
        The page.
    target_of : callable
        Returns the target for a path and whether it is a picture's. If it is None, the text stays, without a link.
    """

    def replaced(match: re.Match[str]) -> str:
        mark, text, target, _ = match.groups()
        path, hash_sign, anchor = (target or "").partition("#")
        if not path or re.match(r"\w+:", path):
            return match[0]
        text = _LINK.sub(replaced, text)  # may contain a picture
        new = target_of(path, bool(mark))
        return text if new is None else f"{mark}[{text}]({new}{hash_sign}{anchor})"

    # Every second part is a code block.
    parts = _BLOCK.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))
