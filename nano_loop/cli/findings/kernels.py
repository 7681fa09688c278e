"""Findings about the kernels in C."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected
from nano_loop.config.environment import KERNELS


def no_kernels(inspected: Inspected) -> Iterator[Finding]:
    """Find neither libraries in the package nor a compiler that works."""
    kernels, choice = inspected.kernels, inspected.environ.get(KERNELS)
    if kernels is not None and kernels.level is None and choice != "off":
        yield Finding(
            "no-kernels",
            f"there are no kernels in C: {kernels.reason}",
            "steps in bf16 take 9 to 58% longer without them (GPT-2 31%, ViT-S 9%, an LSTM 15%, on a Zen 4)",
            f"Unset {KERNELS}"
            if choice
            else "Install gcc (Debian and Ubuntu: apt install gcc libc6-dev), or a wheel that has them",
        )


FINDINGS = (no_kernels,)
