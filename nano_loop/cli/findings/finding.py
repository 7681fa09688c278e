"""A finding: what `doctor` reports of one fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know."""

    id: str  # the name of the finding, which stays the same between versions
    what: str  # what was found, with its value
    why: str
    advice: str
    #: Whether it makes training slower or fail. If not, it explains how this machine differs from a better one.
    hurts: bool = True

    def as_dict(self) -> dict[str, str | bool]:
        """Return the finding as plain strings and a bool, for JSON."""
        return asdict(self)
