"""The documentation site has every page, public name and variable, and the docs stay short."""

import ast
import re
from pathlib import Path

import pytest

import nano_loop
from nano_loop.config import environment, protocol

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Pages generated from declarations, tests and stored results, and pages that teach.
GENERATED = ("faults.md", "learning.md", "results.md", "tutorials")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages <= named
    assert named - pages == {*re.findall(r'^    "([\w-]+\.md)": "', text_of("scripts/site_pages.py"), re.MULTILINE)} | {
        "commands.md"
    }


def test_every_public_name_is_on_the_page_of_the_api():
    assert {*re.findall(r"^::: nano_loop\.(\w+)$", text_of("docs/api.md"), re.MULTILINE)} == {*nano_loop.__all__} - {
        "__version__"
    }


@pytest.mark.parametrize("variable", [environment.KERNELS, environment.EXPORTS, protocol.COMMAND, protocol.INSTALL])
def test_every_variable_that_is_no_option_is_on_the_page_of_variables(variable):
    assert f"| `{variable}` |" in text_of("docs/environment.md")


def test_readme_is_one_screen_and_more():
    readme = text_of("README.md")
    assert len(readme.splitlines()) < 200
    assert len(readme.split()) < 1500


def words(page):
    """Count the words of a page, without table markup and rows of generated tables."""
    text = re.sub("<!-- by .*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if page.name in ("options.md", "layers.md"):
        text = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    return sum(any(map(str.isalnum, word)) for word in text.split())


def test_documentation_is_short():
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in GENERATED]
    assert sum(map(words, pages)) < 25_000


@pytest.mark.parametrize("page", sorted((DOCS / "rooms").glob("*.md")), ids=lambda page: page.stem)
def test_page_of_a_room_is_short(page):
    assert words(page) <= 600


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_every_block_of_python_can_be_parsed(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        ast.parse(block)
