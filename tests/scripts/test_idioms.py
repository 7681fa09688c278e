"""Each idiom of docs/idioms.md runs as written, with one process and with two, with equal results."""

import os
import re
import runpy
from pathlib import Path

import pytest
from distributed import small

PAGE = (Path(__file__).parents[2] / "docs" / "idioms.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETUP = CODE.findall(PAGE)[0]
FOLLOWING = PAGE[PAGE.index(SETUP) :]  # sections that continue an idiom
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", FOLLOWING, re.MULTILINE | re.DOTALL))
PRINTED = {
    "Save a checkpoint": "['checkpoint.pt', 'program.py']\n",
    "Resume": "2 3\n",
    "Evaluate": "epoch 0: 100%\nepoch 1: 100%\n",
    "Stop early": "True\n",
    "Log": "3\n",
    "Time": "True\n",
    "Sweep": "0.1\n",
    "Cross-validate": "4 True\n",
}


def test_table_and_sections_are_the_same():
    rows = re.findall(r"^\| \[([^]]+)\]\(#([^)]+)\)", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == [*SECTIONS] == [*PRINTED]
    assert all(name.lower().replace(" ", "-") == anchor for name, anchor in rows)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("idiom", PRINTED)
def test_idiom_runs_as_it_is_written(monkeypatch, tmp_path, capsys, idiom, processes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANO_LOOP_NUM_PROCESSES", str(processes))
    monkeypatch.setenv("NANO_LOOP_VERBOSE", "False")
    if small.cores() and processes == 2:
        monkeypatch.setenv("NANO_LOOP_CPU_FOR_EACH_PROCESS", str(small.cores()))
    (code,) = CODE.findall(SECTIONS[idiom])
    (tmp_path / "program.py").write_text(SETUP + "\n\n" + code)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    assert capsys.readouterr().out == PRINTED[idiom]
    assert not [name for name in os.listdir() if name.endswith(".tmp")]
