"""The code of each page of docs/tutorials runs, and prints what the page shows; tests/test_readme.py runs others."""

import pytest

from scripts.snippets import ROOT, as_a_script, check, in_a_notebook

NEEDED = {"images": "torchvision"}
OF_LIBRARIES = {"language-model"}  # their requirements are in the environment of tests/libraries
# Pages that need another environment are not marked slow, so that they run there.
PAGES = [
    pytest.param(path.stem, marks=() if path.stem in NEEDED else pytest.mark.slow)
    for path in sorted((ROOT / "docs/tutorials").glob("*.md"))
    if path.stem not in OF_LIBRARIES
]


@pytest.mark.parametrize("run", [as_a_script, in_a_notebook])
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_tutorial_runs_and_prints_what_it_shows(page, run, tmp_path):
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    check(f"docs/tutorials/{page}.md", run, tmp_path)
