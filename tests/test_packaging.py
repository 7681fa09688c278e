"""The installed files, the contents of a wheel, and what `make` does before any set-up."""

import configparser
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import nano_loop
from nano_loop.kernels import compiler

ROOT = Path(__file__).parents[1]
BUILD_INPUTS = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements_of(text):
    return [Requirement(line) for line in text.splitlines() if line.strip()]


def test_version_is_written_down_once_and_is_that_of_the_metadata_and_of_the_changelog():
    version = nano_loop.__version__
    assert version == importlib.metadata.version("nano-loop")
    modules = (ROOT / "nano_loop").rglob("*.py")
    assert [path.name for path in modules if version in path.read_text()] == ["version.py"]
    assert version not in setup_cfg()["metadata"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("environment", ["default", "ipex", "libraries-2.13", "libraries-2.8"])
def test_every_pin_is_exact(environment):
    """`make` checks with pip that the pins are consistent, and that none is missing."""
    pattern = re.compile(r"[\w.-]+==[\w.]+( ; python_version (<|>=) \"3\.\d+\")?")
    lines = (ROOT / f"requirements/{environment}.txt").read_text().splitlines()
    assert [line for line in lines if not (line.startswith("#") or pattern.fullmatch(line))] == []


EXTRAS = {
    "cli": {"click"},
    "ipex": {"intel-extension-for-pytorch", "torch"},
    "lightning": {"lightning"},  # `nano_loop.lightning`
    "pytorch-lightning": {"pytorch-lightning"},  # `nano_loop.pytorch_lightning`
    "plot": {"matplotlib"},
    "ray": {"ray"},
}


def test_messages_name_the_packages_of_the_extras():
    """Not the extras, which pip can install only from a checkout, since no registry has nano_loop."""
    extras = setup_cfg()["options.extras_require"]
    assert {name: {each.name for each in requirements_of(extras[name])} for name in EXTRAS} == EXTRAS
    text = "".join(path.read_text() for path in (ROOT / "nano_loop").rglob("*.py"))
    assert "nano-loop[" not in text
    for name in EXTRAS:
        of_modules = text.replace("{extra}", name)  # one message names Lightning's two packages
        assert all(each in of_modules for each in extras[name].strip().splitlines()), name


def needed_by(requirement, seen):
    """Add to `seen` everything that pip would install because of `requirement`."""
    for extra in ("", *requirement.extras):
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                needed_by(needed, seen)


# Assembled from pieces, so that this file does not contain what it searches for.
MACHINE_PATH = re.compile(
    r"(?<![\w.~*}])/(?:" + "|".join(("work", "opt", "root", r"tmp/w")) + r")(?=[/\s\"'`)\],;:]|$)"
)
REGISTRY_HOST = re.compile(
    r"\b(?:" + "|".join(("pypi", "pythonhosted", "anaconda")) + r")\.org\b|download\.pytorch" + r"\.org"
)


def forbidden(text):
    """Return the paths of a developer's machine and the hosts of package registries in `text`."""
    return [match[0] for pattern in (MACHINE_PATH, REGISTRY_HOST) for match in pattern.finditer(text)]


def files_of_the_project():
    """Return the files tracked by git; outside a git checkout, all files except generated ones."""
    command = ["git", "-C", ROOT, "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = [ROOT / name for name in listed.split("\0") if name] or list(files_below(ROOT))
    return [path for path in found if path.is_file()]


def files_below(folder):
    made = re.compile(r"\.git|\.venv.*|build|prebuilt|dist|__pycache__|.*_cache|\.hypothesis|.*\.egg-info")
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif not made.fullmatch(path.name):
            yield from files_below(path)


def test_paths_of_a_machine_and_registry_hosts_are_seen_and_innocent_texts_are_not():
    texts = ["see /{}/main", "'/{}'", "cd /{}", '{{"root": "/{}/x"}}', "file:///{}/wheels", "--x=/{}/y"]
    assert all(forbidden(text.format(place)) for text in texts for place in ("work", "opt", "root"))
    hosts = "pypi", "files.pythonhosted", "download.pytorch"
    assert all(forbidden(f"pip install -i https://{host}" + ".org/simple") for host in hosts)
    innocent = "/workspace", "tests/root/sys", "networks/work", "/proc/self", "a/work", "pypi"
    assert not any(map(forbidden, innocent))


def test_no_file_holds_a_machine_path_or_a_registry_host():
    files = files_of_the_project()
    found = {str(path.relative_to(ROOT)): forbidden(path.read_text(errors="replace")) for path in files}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the tracked files, so that the checkout stays clean and no stale file is used."""
    folder = tmp_path_factory.mktemp("source")
    for path in files_of_the_project():
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def built(folder, *hooks, **variables):
    """Build by functions of setuptools, each of which gets the name of a folder, and return that folder's path."""
    calls = "; ".join(f"backend.{hook}('made')" for hook in hooks)
    (folder / "made").mkdir()
    command = [sys.executable, "-c", f"import setuptools.build_meta as backend; {calls}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, **variables})
    return folder / "made"


@pytest.fixture(scope="module")
def distributions(copied):
    """The folder with an sdist and a wheel, and the names of the tracked files."""
    tracked = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    return built(copied, "build_sdist", "build_wheel", NANO_LOOP_KERNELS="off"), tracked


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions[0].glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "nano_loop").rglob("*.py")}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    script = f"nano_loop-{nano_loop.__version__}.data/scripts/nano-loop-init"
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nano_loop/kernels/csrc").iterdir()}
    sources.add("nano_loop/precision/autocast/operators.json")
    assert held == modules | sources | {"nano_loop/py.typed", script}
    assert wheel.read(script) == (ROOT / "scripts/nano-loop-init").read_bytes()


def test_wheel_says_what_it_is(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert wheel.filename.endswith("-py3-none-any.whl")
    assert f"Version: {nano_loop.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert not relative_links(metadata)
    Metadata.from_email(metadata, validate=True)


def relative_links(markdown):
    """Return the links and pictures that are broken without the repository's other pages."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("https://")]


def test_description_for_a_package_index_is_the_readme_with_links_that_lead_somewhere(wheel, tmp_path):
    readme, source = (ROOT / "README.md").read_text(), "https://example.org/nano_loop"
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    described = message_from_string(wheel.read(name).decode()).get_payload()
    assert re.sub(r"!?\[([^]]*)\]\((?!https:)[^)\s]+\)", r"\1", readme).strip() == described.strip()
    for path in (*BUILD_INPUTS, "scripts/compile_levels.py", "scripts/links.py", "nano_loop/version.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    config, line = tmp_path / "setup.cfg", f"[metadata]\nproject_urls =\n    Source = {source}\n"
    config.write_text(config.read_text().replace("[metadata]\n", line))
    (made,) = built(tmp_path, "prepare_metadata_for_build_wheel").glob("*.dist-info")
    metadata = importlib.metadata.Distribution.at(made).metadata
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(source) for url in urls.values())
    described = metadata.get_payload()
    assert not relative_links(described)
    pictures = re.findall(rf"!\[[^]]*\]\({source}/raw/HEAD/(\S+)\)", described)
    assert pictures == re.findall(r"!\[[^]]*\]\((\S+)\)", readme) != []
    assert re.sub(rf"\]\({source}/(blob|raw)/HEAD/", "](", described).strip() == readme.strip()


#: Imports nano_loop's dependencies, and no other package that happens to be installed; then uses nano_loop.
ALONE = """
import sys
from importlib.machinery import PathFinder

class Needed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

hidden = {*sys.argv[1:]}
sys.meta_path[sys.meta_path.index(PathFinder)] = Needed
import torch
import nano_loop

def train(model, optimizer, loader):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

def parts():
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 4)), 4)
    return model, torch.optim.SGD(model.parameters(), 0.1), loader

for options in ({}, {"precision": "bf16", "channels_last": "auto"}, {"fast_images": False, "num_processes": 2}):
    nano_loop.nano(verbose=False, **options)(train)(*parts())
nano_loop.install(verbose=False)
nano_loop.patch_torch(cuda_to_cpu=True)
train(*parts())
nano_loop.unpatch_torch()
nano_loop.uninstall()
print(len([getattr(nano_loop, name) for name in nano_loop.__all__]))
"""


@pytest.mark.slow
def test_all_but_extras_works_with_the_declared_requirements_alone(tmp_path):
    seen = {("nano-loop", "")}
    for requirement in requirements_of(setup_cfg()["options"]["install_requires"]):
        needed_by(requirement, seen)
    needed, owners = {name for name, _ in seen}, importlib.metadata.packages_distributions()
    hidden = [name for name, packages in owners.items() if needed.isdisjoint(map(canonicalize_name, packages))]
    assert "PIL" in hidden
    (tmp_path / "script.py").write_text(ALONE)
    command = [sys.executable, "-W", "ignore", "script.py", *hidden]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"{len(nano_loop.__all__)}\n"), done.stderr


def test_sdist_has_all_that_is_tracked(distributions):
    made, tracked = distributions
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert tracked - names == set()
    made = {name for name in names - tracked if "egg-info" not in name}
    assert made == {"PKG-INFO"}


WITH_GCC = pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() != "x86_64", reason="kernels are built by gcc for x86-64"
)
LEVELS = {level.name: level for level in compiler.LEVELS if level.machine == "x86_64"}


@pytest.fixture(scope="module")
def wheel_with_kernels(copied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_kernels") / "source"
    shutil.copytree(copied, folder, ignore=shutil.ignore_patterns("made", "build", "*.egg-info"))
    (path,) = built(folder, "build_wheel").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory, wheel_with_kernels):
    """The path of a Python that has the wheel, and the other packages from the folder that contains them."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    command = (sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index")
    subprocess.run([*command, wheel_with_kernels], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


@WITH_GCC
@pytest.mark.slow
def test_wheel_with_kernels_has_each_file_for_each_level_and_runs_on_older_systems(wheel_with_kernels, tmp_path):
    assert wheel_with_kernels.name.endswith("-py3-none-linux_x86_64.whl")
    assert wheel_with_kernels.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel_with_kernels) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path, libraries)
    sources = {path.stem for path in compiler.SOURCES.glob("*.c")}
    kinds = {tuple(Path(name).name.split("-")[:2]) for name in libraries}
    assert kinds == {(source, level) for source in sources for level in LEVELS}
    assert len(kinds) == len(libraries)
    for name in libraries:
        needed = subprocess.run(["objdump", "-p", tmp_path / name], capture_output=True, text=True, check=True).stdout
        assert "libgomp" not in needed  # torch's is used
        versions = [Version(version) for version in re.findall(r"GLIBC_([\d.]+)", needed)]
        assert all(version <= Version("2.17") for version in versions), name
        code = subprocess.run(["objdump", "-d", tmp_path / name], capture_output=True, text=True, check=True).stdout
        if "-v3-" in name:
            assert not re.search(r"%zmm|%k[0-7]", code), name
        if "-bf16-" not in name:
            assert not re.search(r"\tv\w*bf16", code), name


README = (ROOT / "README.md").read_text()
#: A user without an entry in /etc/passwd, as with `docker run --user`, and root without permission to write everywhere.
UNKNOWN = ("unshare", "--mount", "bash", "-c", '/bin/mount --bind /dev/null /etc/passwd && exec "$@"', "-")
POWERLESS = ("setpriv", "--bounding-set=-dac_override", "--")
#: By home folder: its mode, the command prefix that starts others, and its contents at the end.
HOMES = {"clean": (0o700, (), {".cache"}), "none": (None, UNKNOWN, set()), "read-only": (0o500, POWERLESS, set())}


def scripts_of_the_readme():
    """Return its scripts, with the additions of the diff in the first, and with as many steps as `profile` takes."""
    loop, processes = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    added = re.findall(r"^\+(from .*|@.*)$", README.partition("```diff")[2].partition("```")[0], re.MULTILINE)
    loop = f"{added[0]}\n{loop}".replace("def train", f"{added[1]}\ndef train").replace("batch_size=16", "batch_size=1")
    return {"train.py": loop, "processes.py": processes}


def commands_of_the_readme():
    commands = [command.rstrip() for command in re.findall(r"^\$ (.*?)(?:#.*)?$", README, re.MULTILINE)]
    named = {re.search(r"nano-loop (\w+)", command)[1] for command in commands}
    assert named == {"doctor", "run", "tune", "profile", "env"}
    short = (command.replace("nano-loop tune", "nano-loop tune --seconds 5") for command in commands)
    return ["python train.py", "nano-loop doctor", "python processes.py", *short]


#: By the beginning of a command: a part of its output.
PRINTED = {
    "python train.py": "C kernels",
    "nano-loop doctor": "kernels in C",
    "nano-loop run": "applied  fused_optimizer",
    "nano-loop tune": "fastest, after",
    "nano-loop profile": "optimizer",
}


@WITH_GCC
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("home", HOMES)
def test_readme_can_be_followed_in_a_container(home, fresh_environment, tmp_path):
    mode, starter, kept = HOMES[home]
    if starter and os.geteuid() != 0:
        pytest.skip("only root can change what a user is")
    folders = {name: tmp_path / name for name in ("home", "temporary", "project")}
    for folder in folders.values():
        folder.mkdir()
    environ = {"PATH": str(fresh_environment.parent), "TMPDIR": str(folders["temporary"])}
    if mode is not None:
        environ["HOME"] = str(folders["home"])
        folders["home"].chmod(mode)
    scripts = scripts_of_the_readme()
    for name, text in scripts.items():
        (folders["project"] / name).write_text(text)
    shell = [shutil.which(name) or name for name in (*starter, "bash")]
    for command in commands_of_the_readme()[: None if home == "none" else 2]:
        line = [*shell, "-c", command]
        done = subprocess.run(line, cwd=folders["project"], env=environ, capture_output=True, text=True, check=False)
        printed = f"{command}\n{done.stdout}{done.stderr}"
        assert done.returncode in {0, int("doctor" in command)}, printed
        assert not re.search("Traceback|Warning|no C kernels|no-kernels", printed), printed
        assert all(words in printed for start, words in PRINTED.items() if command.startswith(start)), printed
    left = {name: {path.name for path in folder.iterdir()} for name, folder in folders.items()}
    left["temporary"] -= {"torchinductor_root"}  # torch's own
    assert left.pop("home") <= kept  # kernel choices are saved if there are any
    assert left == {"temporary": set(), "project": {*scripts}}


OUTER_MAKE = ("MAKE", "MFLAGS", "ARGS", "TESTS")


def test_all_that_is_left_out_with_ipex_is_there():
    """A renamed file would no longer be left out, which nobody would notice."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_MAKE)}
    command = ["make", "-n", "test-ipex", f"PYTHON={sys.executable}"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith(".venv-ipex/bin/python -m pytest"))
    left_out = re.findall(r"--ignore=(\S+)", line)
    assert "tests/cpu" in left_out
    assert "tests/benchmarks/test_cases.py" not in left_out  # one system per peer
    assert [name for name in left_out if not (ROOT / name).exists()] == []
