"""All links, anchors, paths and modules in the documentation exist."""

import re
from functools import cache
from pathlib import Path

import pytest

import nano_loop

ROOT = Path(__file__).parents[1]
PACKAGE = Path(nano_loop.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:\w+/)+(?:\w+\.(?:py|c|h))?)`")
NAME = re.compile(r"`(\w+\.(?:py|c|h))`")
#: Files that CONTRIBUTING names as ones to add.
TO_BE_ADDED = re.compile(r"\b(gru|fast_gru|lion|arm_tiles|arrow_tables|test_gru)\.|launch_NAME")


@cache
def text_of(page):
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors_of(page):
    """Return the anchors that GitHub generates for the headings of a page."""
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


def missing_paths(page):
    for path in PATH.findall(text_of(page)):
        if TO_BE_ADDED.search(path) or (ROOT / path).exists() or (PACKAGE / path).exists():
            continue
        if not (path.endswith("/") and any(folder.match(path) for folder in folders())):
            yield path


def missing_names(page):
    """Yield the files that a page names without their folders, and that do not exist in the package."""
    names = {file.name for file in PACKAGE.rglob("*.*")}
    return (name for name in NAME.findall(text_of(page)) if name not in names)


@cache
def folders():
    return [folder for folder in PACKAGE.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page):
    assert not list(broken_links(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    assert not list(missing_paths(page))
    if page.parent.name == "rooms":
        assert not list(missing_names(page))


def test_each_room_with_a_page_is_linked_from_the_list_of_folders():
    rooms = {f"rooms/{page.name}" for page in (ROOT / "docs/rooms").glob("*.md")}
    assert rooms == {link.partition("#")[0] for link in LINK.findall(text_of(ROOT / "docs/how-it-works.md"))} & rooms


def test_each_folder_is_in_the_list_of_folders():
    named = set(re.findall(r"`(\w+)/`", text_of(ROOT / "docs/how-it-works.md")))
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == named & rooms


@pytest.mark.parametrize("link", ["missing.md", "#missing", "docs/how-it-works.md#missing"])
def test_broken_link_is_found(link, monkeypatch):
    page = ROOT / "README.md"
    monkeypatch.setitem(globals(), "text_of", lambda file: f"# One\n[text]({link})" if file == page else "")
    anchors_of.cache_clear()
    assert list(broken_links(page)) == [link]
    anchors_of.cache_clear()


def test_missing_path_is_found(monkeypatch):
    spans = "`nano_loop/gone.py` `gone/` `errors.py` `nano_loop/errors.py`"
    monkeypatch.setitem(globals(), "text_of", lambda file: spans)
    assert list(missing_paths(ROOT / "README.md")) == ["nano_loop/gone.py", "gone/"]
