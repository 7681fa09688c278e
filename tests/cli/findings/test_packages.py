"""Findings about installed packages."""

import pytest

from nano_loop.cli.findings import findings_of
from nano_loop.cli.inspected import inspect_system


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_malicious_release_hurts(only, name):
    finding = only(packages={"torch": "2.13.0", name: "2.6.2"})
    assert (finding.id, finding.hurts) == ("malicious-lightning", True)
    assert f"{name} 2.6.2" in finding.what


@pytest.mark.parametrize(
    "requirement",
    ["torch<4.0,>=2.1", 'torch==2.8.0; extra == "ipex"', "torch (damaged", "lightning_fabric>=2", "Torch"],
)
def test_other_requirements_are_clean(found, requirement):
    assert found(requirements={"nano-loop": (requirement,)}) == []


def test_name_with_an_underscore_is_the_same_package(only):
    assert only(requirements={"lightning": ("Lightning_Fabric>=3",)}).id == "requirement"


def test_packages_of_this_environment_fit_each_other():
    ids = {finding.id for finding in findings_of(inspect_system())}
    assert not ids & {"no-torch", "ipex-torch", "malicious-lightning", "requirement"}
