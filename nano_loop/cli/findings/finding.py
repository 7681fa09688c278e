"""A finding: what `doctor` reports of one fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know.

    Attributes
    ----------
    id : str
        The name of the finding, which stays the same between versions.
    what : str
        What was found, with its value.
    why : str
        Why it matters.
    advice : str
        What to do.
    hurts : bool
        Whether it makes training slower or fail. If not, it explains how this machine differs from a better one.
    """

    id: str
    what: str
    why: str
    advice: str
    hurts: bool = True

    def as_dict(self) -> dict[str, str | bool]:
        """Return the finding as plain strings and a bool, for JSON."""
        return asdict(self)
