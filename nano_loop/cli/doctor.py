"""`nano-loop doctor`: what this machine offers, what this process may use of it, and what slows training down."""

from __future__ import annotations

import click


@click.command(epilog="Example: nano-loop doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON. docs/cli.md describes it.")
@click.option("--torch", "with_torch", is_flag=True, help="Also import torch, in another process: takes seconds.")
def doctor(as_json: bool, with_torch: bool) -> int:
    """Show the machine, and what slows training down on it.

    It also shows what of it this process may use. The exit code is 1 if a finding hurts, and 0 otherwise.
    """
    from nano_loop.cli.diagnosis import diagnose  # 30 ms that other commands need not wait for

    text, code = diagnose(as_json, with_torch, click.style)
    click.echo(text)
    return code
