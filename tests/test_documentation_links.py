"""Links and anchors in the documentation lead to something."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def text_of(page):
    """Return a page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    anchors = []
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).lower().replace(" ", "-")
        anchors.append(f"{words}-{anchors.count(words)}" if words in anchors else words)
    return anchors


def broken_links(page):
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page):
    assert not list(broken_links(page))


def test_each_room_with_a_page_is_linked_from_the_list_of_folders():
    rooms = {f"rooms/{page.name}" for page in (ROOT / "docs/rooms").glob("*.md")}
    assert rooms == {link.partition("#")[0] for link in LINK.findall(text_of(ROOT / "docs/how-it-works.md"))} & rooms


@pytest.mark.parametrize("link", ["missing.md", "#missing", "docs/how-it-works.md#missing"])
def test_broken_link_is_found(link, monkeypatch):
    page = ROOT / "README.md"
    monkeypatch.setitem(globals(), "text_of", lambda file: f"# One\n[text]({link})" if file == page else "")
    anchors_of.cache_clear()
    assert list(broken_links(page)) == [link]
    anchors_of.cache_clear()
