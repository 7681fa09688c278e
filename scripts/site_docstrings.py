"""A griffe extension that adds the parts of docstrings that exist only at run time to the site's API pages."""

from __future__ import annotations

from typing import Any

import griffe

_OPTIONS = """\
**options
    The [options](options.md)."""


class Options(griffe.Extension):
    """Names the options where `nano_loop.config.signatures` inserts all of them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("{options}", _OPTIONS)
