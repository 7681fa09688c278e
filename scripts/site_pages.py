"""An mkdocs hook for the pages of the documentation site that are not files of docs/: see mkdocs.yml.

README, CONTRIBUTING and similar files are shown unchanged, except that links between them and docs/ lead from page to
page. Two pages are generated: the help of each command, and the reasons why steps are skipped.
"""

from __future__ import annotations

import ast
import posixpath
from pathlib import Path
from typing import Any

from links import relinked
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: The repository's file that each page shows.
SHOWN = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "examples.md": "examples/README.md",
    "several-hosts.md": "examples/multi_node.md",
}
_PAGES = {file: page for page, file in SHOWN.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    contents = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in SHOWN.items()}
    for page, text in {**contents, "commands.md": _commands()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point a page's links to other pages, and insert generated text."""
    source = page.file.src_uri
    if source == "report.md":
        markdown = markdown.replace("<!-- codes -->", _codes())
    here = SHOWN.get(source, f"docs/{source}")

    def target_of(path: str, _: bool) -> str | None:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        target = _PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if target is None or target not in files.src_uris:
            return None  # a file of the repository that is not a page
        return posixpath.relpath(target, posixpath.dirname(source) or ".")

    return relinked(markdown, target_of)


def _commands() -> str:
    """Return a page with the `--help` output of each command."""
    import click

    from nano_loop.cli.app import app

    parts = ["# Commands", "What `--help` prints. [The command line](cli.md) explains the commands."]
    group = click.Context(app)
    for name in app.list_commands(group):
        command = app.get_command(group, name)
        assert command is not None
        with click.Context(command, info_name=f"nano-loop {name}", terminal_width=76) as context:
            parts += [f"## {name}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def _codes() -> str:
    """Return a table of reason codes, with the modules that use them and their texts in the report."""
    rows: dict[str, dict[str, None]] = {}
    details: dict[str, list[str]] = {}
    for path in sorted((ROOT / "nano_loop").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            code, detail = _reason(call)
            if code is not None:
                rows.setdefault(code, {})[path.stem] = None
                details.setdefault(code, []).append(detail)
    head = "| code | module | what the report says |\n| --- | --- | --- |\n"
    lines = (
        f"| `{code}` | {', '.join(f'`{module}`' for module in modules)} "
        f"| {'; '.join(dict.fromkeys(filter(None, details[code])))} |"
        for code, modules in sorted(rows.items())
    )
    return head + "\n".join(lines)


def _reason(node: ast.AST) -> tuple[str | None, str]:
    """Return the code and the text of a reason that a call constructs."""
    if not isinstance(node, ast.Call):
        return None, ""
    function = ast.unparse(node.func)
    if function == "SkipReason" and len(node.args) > 1:
        return _text(node.args[0]) or None, _text(node.args[1])
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if function == "StepResult" and "code" in keywords and len(node.args) > 2:
        return _text(keywords["code"]) or None, _text(node.args[2])
    return None, ""


def _text(node: Any) -> str:
    """Return a string literal, with … in place of inserted values; empty if the node is not a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""
