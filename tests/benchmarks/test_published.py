"""The tables in the README and in docs/performance.md are those of the stored results, to the last digit."""

import json
from pathlib import Path

import pytest
from command_line import ROOT

from benchmarks.published import TABLES, overview, tables

RESULTS = {path.name: json.loads(path.read_text()) for path in sorted(Path(ROOT, "benchmarks/results").glob("2*.json"))}
README, PERFORMANCE = (Path(ROOT, name).read_text() for name in ("README.md", "docs/performance.md"))


@pytest.mark.parametrize("kind", TABLES)
def test_results_of_each_kind_are_stored(kind):
    assert [name for name, found in RESULTS.items() if kind in found]


@pytest.mark.parametrize("name", RESULTS)
def test_documents_have_the_tables_of_the_results(name):
    found = RESULTS[name]
    for table in tables(found):
        assert table in (README if "workloads" in found and table == overview(found) else PERFORMANCE)


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_a_commit_without_changes(name):
    assert len(RESULTS[name]["commit"]) == 40
    assert RESULTS[name]["changed_files"] == []
    assert not RESULTS[name]["quick"]
    assert name.removesuffix(".json") in RESULTS[name]["command"]
