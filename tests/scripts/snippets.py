"""Runs the code of a documentation page from top to bottom, as a script and in the cells of a notebook."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


def blocks(page, language):
    """Return the code blocks of a page, whose path is relative to the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def as_a_script(cells, folder):
    """Run code as a script; return the lines it prints."""
    (folder / "program.py").write_text("\n\n".join(cells), encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def in_a_notebook(cells, folder):
    """Run cells in a notebook; return the lines they print, including nano_loop's reports."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs if output.get("name") == "stdout"]
    return "".join(output.text for output in outputs).splitlines()


def check(page, run, folder):
    """Run a page, and compare its output with the output that it shows. A notebook also shows reports."""
    (shown,) = blocks(page, "text")
    expected, printed = shown.splitlines(), run(blocks(page, "python"), folder)
    assert [line for line in printed if line in expected] == expected, printed
