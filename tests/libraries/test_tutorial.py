"""The language model tutorial runs, and prints what it shows, as a script and in a notebook."""

import pytest
from scripts.snippets import as_a_script, check, in_a_notebook


@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", [as_a_script, in_a_notebook])
def test_tutorial_runs_and_prints_what_it_shows(run, tmp_path):
    check("docs/tutorials/language-model.md", run, tmp_path)
