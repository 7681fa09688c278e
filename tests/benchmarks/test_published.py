"""The README's headline and picture and the tables of docs/ match the stored results."""

import json
from pathlib import Path

import pytest
from command_line import ROOT
from PIL import Image

from benchmarks import learning
from benchmarks.published import PARTS, headline, layers, overview, page, speed_ups

RESULTS = {path.name: json.loads(path.read_text()) for path in sorted(Path(ROOT, "benchmarks/results").glob("2*.json"))}
SHOWN = RESULTS["2026-11-amd-epyc-zen5-2-cores.json"]  # in the README: all workloads and systems
SMALL = RESULTS["2026-11-amd-epyc-zen4-2-cores-users.json"]  # in the picture as well: small models
README = Path(ROOT, "README.md").read_text()


def text_of(name):
    return Path(ROOT, "docs", name).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*PARTS, "layers"])
def test_results_of_each_kind_are_stored(kind):
    assert [name for name, found in RESULTS.items() if kind in found]


def test_page_of_results_is_that_of_the_stored_ones():
    assert text_of("results.md") == page({name.removesuffix(".json"): results for name, results in RESULTS.items()})


def test_pages_have_the_tables_of_the_results():
    assert overview(SHOWN) in text_of("performance.md")
    for results in RESULTS.values():
        assert "layers" not in results or layers(results) in text_of("layers.md")
        assert "learning" not in results or learning.page(results) == text_of("learning.md")


def test_readme_has_the_headline_of_the_results():
    assert headline(SHOWN) in " ".join(README.split())


def test_readme_shows_the_picture_of_the_results():
    assert "(docs/speed-ups.png)" in README
    with Image.open(Path(ROOT, "docs/speed-ups.png")) as picture:
        plotted = json.loads(picture.info["Description"])
    assert plotted == json.loads(json.dumps([speed_ups(SHOWN), speed_ups(SMALL)]))


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_a_commit_without_changes(name):
    assert len(RESULTS[name]["commit"]) == 40
    assert RESULTS[name]["changed_files"] == []
    assert not RESULTS[name]["quick"]
    assert name.removesuffix(".json") in RESULTS[name]["command"]
