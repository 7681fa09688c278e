"""Findings about installed packages."""

from types import SimpleNamespace

import pytest

from nano_loop.cli import inspected
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


def test_build_for_gpus_that_are_not_there_is_a_note(only):
    finding = only(unused_cuda="12.8")
    assert (finding.id, finding.hurts) == ("cuda-torch", False)
    assert "CUDA 12.8" in finding.what


@pytest.mark.parametrize(("version", "is_old"), [("2.8.0+cpu", True), ("2.9.1", False), ("3.0a0", False)])
def test_torch_without_its_kernels_is_a_note(found, version, is_old):
    assert [finding.id for finding in found(packages={"torch": version})] == ["old-torch"] * is_old


@pytest.mark.parametrize(("line", "version"), [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: None = None", "")])
def test_cuda_is_read_from_the_build_without_an_import(monkeypatch, tmp_path, line, version):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
    place = SimpleNamespace(locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(inspected.importlib.metadata, "distribution", lambda name: place)
    assert inspected._cuda_of_torch() == version
