"""Findings about installed packages: which are missing, and which do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from nano_loop.cli.findings.finding import Finding
from nano_loop.cli.inspected import Inspected

_IPEX = "intel-extension-for-pytorch"
_WITHOUT_KERNELS = "2.8"  # torch returns its own from the next version on
_MALICIOUS = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3


def torch_is_missing(inspected: Inspected) -> Iterator[Finding]:
    """Find no torch in this Python."""
    if "torch" not in inspected.packages:
        yield Finding(
            "no-torch",
            "torch is not installed in this Python",
            "nano_loop trains with it",
            "Install it (pip install torch), or use the Python that has it",
        )


def torch_is_built_for_cuda(inspected: Inspected) -> Iterator[Finding]:
    """Find a build of torch for GPUs on a machine that has none."""
    if inspected.unused_cuda:
        yield Finding(
            "cuda-torch",
            f"the installed torch is built for CUDA {inspected.unused_cuda}, and there is no GPU",
            "it takes gigabytes on the disk and starts later; it trains on the CPU as fast as a build for CPUs",
            "Install torch's build for CPUs, by the line that pytorch.org shows for it",
            hurts=False,
        )


def torch_is_old(inspected: Inspected) -> Iterator[Finding]:
    """Find a torch that does not hand out its kernels."""
    version = inspected.packages.get("torch", "")
    if _minor(version) == _WITHOUT_KERNELS and _IPEX not in inspected.packages:
        yield Finding(
            "old-torch",
            f"torch {version} is installed",
            "fast_activation, fast_convolution, fast_linear, fast_norm and fast_rnn need torch 2.9 or later",
            "Install a newer torch",
            hurts=False,
        )


def ipex_does_not_fit(inspected: Inspected) -> Iterator[Finding]:
    """Find an IPEX that was built for another torch."""
    ipex, torch = (inspected.packages.get(name) for name in (_IPEX, "torch"))
    if ipex and torch and _minor(ipex) != _minor(torch):
        yield Finding(
            "ipex-torch",
            f"IPEX {ipex} and torch {torch} are installed",
            f"IPEX {_minor(ipex)} works with torch {_minor(ipex)} alone, and its import fails with another",
            f'Uninstall IPEX, or install its torch (pip install "torch=={_minor(ipex)}.*")',
        )


def lightning_is_malicious(inspected: Inspected) -> Iterator[Finding]:
    """Find a release of Lightning that attackers have published."""
    for name in ("lightning", "pytorch-lightning"):
        version = inspected.packages.get(name)
        if version in _MALICIOUS:
            yield Finding(
                "malicious-lightning",
                f"{name} {version} is installed",
                "attackers published this release (GHSA-w37p-236h-pfx3), and it runs their code",
                "Uninstall it, and change the credentials that this machine has",
            )


def requirements_are_not_met(inspected: Inspected) -> Iterator[Finding]:
    """Find a package whose metadata asks for another version of one of the others."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:  # it comes with Lightning
        return

    for name, texts in inspected.requirements.items():
        for text in texts:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            version = inspected.packages.get(canonicalize_name(requirement.name))
            of_an_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            if (
                version is not None
                and not of_an_extra
                and not requirement.specifier.contains(version, prereleases=True)
            ):
                yield Finding(
                    "requirement",
                    f"{name} needs {requirement.name}{requirement.specifier}, and {version} is installed",
                    "packages fail in unexpected places with versions that they were not made for",
                    f'Run: pip install "{requirement.name}{requirement.specifier}"',
                )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


FINDINGS = (
    *(torch_is_missing, torch_is_built_for_cuda, torch_is_old, ipex_does_not_fit),
    *(lightning_is_malicious, requirements_are_not_met),
)
