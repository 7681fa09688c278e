"""The record of the variables that `nano-loop env` has exported."""

import base64
import json

import pytest

from nano_loop.config.environment import EXPORTS, Exports, is_exported, read_exports
from nano_loop.errors import NanoConfigError


def encoded(content):
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode()


@pytest.mark.parametrize(
    "note",
    [
        "",
        "nonsense",
        "é",
        encoded([]),
        encoded({}),
        encoded({"before": {}, "after": {}, "more": 1}),
        encoded({"before": {"A": 1}, "after": {}}),
        encoded({"before": {}, "after": {"A": None}}),
        encoded({"before": {"A; rm x": "1"}, "after": {}}),
    ],
)
def test_damaged_note_is_refused(note):
    with pytest.raises(NanoConfigError, match=f"{EXPORTS} is damaged: .* Unset {EXPORTS}"):
        read_exports({EXPORTS: note})
    assert not is_exported("A", {EXPORTS: note, "A": "1"})


def test_value_that_the_user_has_changed_since_is_not_exported():
    note = Exports({"A": None}, {"A": "1"}).encoded()
    assert is_exported("A", {EXPORTS: note, "A": "1"})
    assert not is_exported("A", {EXPORTS: note, "A": "2"})
    assert not is_exported("A", {EXPORTS: note})
    assert not is_exported("A", {"A": "1"})
