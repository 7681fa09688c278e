"""Holds the rooms of the package to their order, by reading the imports of every file without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import nano_loop

PACKAGE = Path(nano_loop.__file__).parent

# From top to bottom. A room (a module, or a folder with all that is in it) may import from its own line and
# from those below it, never from one above. A new room is written in here.
ROOMS = (
    ("__init__", "__main__"),
    ("tuning_call", "verification", "rehearsal"),
    ("torch_nano", "decorator", "context_manager", "cli", "lightning", "pytorch_lightning"),
    ("search", "trainers"),
    ("profiling",),
    ("run",),
    ("settings", "report_start"),
    ("call_parts", "rewriting"),
    ("steps",),
    ("vision",),
    ("cuda_calls",),
    ("distributed",),
    ("fabric", "rank_zero"),
    ("precision",),
    ("tuning",),
    ("compiling",),
    ("kernels", "parts"),
    ("intercept",),
    ("signatures", "checks", "report", "optim"),
    ("options",),
    ("cpu", "environment"),
    ("option_checks",),
    ("protocol", "op_names", "exports"),
    ("cache_folder", "errors", "glibc", "native_output", "parent_process", "precisions", "version"),
)

# How many files may import what is likely to change or to vanish.
FILES_THAT_MAY_IMPORT = {
    "intel_extension_for_pytorch": 1,
    "ray": 1,
    "lightning_fabric": 2,
    "lightning": 1,
    "pytorch_lightning": 1,
}

WITHOUT_TORCH = "cpu"
PRIVATE_TORCH_MODULE = "intercept.torch_private"
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "misc"}


@dataclass
class Module:
    """One file: what it imports of the package and of others, and what it uses of torch's private names."""

    name: str
    imports: set[str] = field(default_factory=set)
    imports_for_types: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    private: list[str] = field(default_factory=list)

    @property
    def room(self) -> str:
        return self.name.split(".")[0]


# --- reading ---


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def read_package(package: Path) -> dict[str, Module]:
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return {name: read_module(name, path, package.name, set(paths)) for name, path in paths.items()}


def read_module(name: str, path: Path, package: str, known: set[str]) -> Module:
    module = Module(name)
    tree = ast.parse(path.read_text(), str(path))
    for_types = set(type_checking_nodes(tree))
    folder = [package, *name.split(".")[: None if path.stem == "__init__" and name != "__init__" else -1]]
    for node in ast.walk(tree):
        for target in imported(node, folder):
            top, _, rest = target.partition(".")
            if top != package:
                module.outside.add(target)
            else:
                found = module.imports_for_types if node in for_types else module.imports
                found.add(longest_known(rest, known))
    module.private = list(private_torch_names(tree))
    return module


def type_checking_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from ast.walk(statement)


def imported(node: ast.AST, folder: list[str]) -> Iterator[str]:
    """Yield the full dotted names that a statement or an `import_module("...")` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        yield from (f"{origin}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
        yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def longest_known(dotted: str, known: set[str]) -> str:
    """Return the module that holds `dotted`; what is in none of them is a name of the package itself."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted or "__init__"


def private_torch_names(tree: ast.AST) -> Iterator[str]:
    """Yield private names of torch: imported ones, and attributes of something imported."""
    from_torch = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "level", 0):
            continue
        for alias in node.names:
            origin = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if origin.split(".")[0] != "torch":
                continue
            from_torch.add(alias.asname or alias.name.split(".")[0])
            if any(map(is_private, origin.split("."))):
                yield origin
    for node in ast.walk(tree):
        reached = attribute_reached(node)
        if reached and is_private(reached[1]) and root_name(reached[0]) in from_torch:
            yield f"{ast.unparse(reached[0])}.{reached[1]}"


def attribute_reached(node: ast.AST) -> tuple[ast.expr, str] | None:
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    by_name = {"getattr", "hasattr", "setattr", "delattr"}
    if isinstance(node, ast.Call) and len(node.args) > 1 and called_name(node) in by_name:
        return node.args[0], str(getattr(node.args[1], "value", ""))
    return None


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# --- judging ---


def upward_imports(modules: dict[str, Module]) -> Iterator[str]:
    height = {room: -line for line, rooms in enumerate(ROOMS) for room in rooms}
    for module in modules.values():
        if module.room not in height:
            yield f"{module.name}: its room is not in ROOMS"
            continue
        for target in sorted(module.imports | module.imports_for_types):
            if height.get(target.split(".")[0], height[module.room]) > height[module.room]:
                yield f"{module.name} imports {target}, which is in a room above it"


def import_cycles(modules: dict[str, Module]) -> Iterator[str]:
    """Yield each cycle that a walk along the imports runs into; imports for types alone are no part of it."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield "a cycle: " + " → ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(modules[name].imports - {name}):
                yield from walk(target, [*path, name])
            done.add(name)

    for name in modules:
        yield from walk(name, [])


def torch_where_it_may_not_be(modules: dict[str, Module]) -> Iterator[str]:
    for start in (name for name, module in modules.items() if module.room == WITHOUT_TORCH):
        reached, waiting = set(), [start]
        while waiting:
            name = waiting.pop()
            reached.add(name)
            waiting.extend(modules[name].imports - reached)
        for name in sorted(reached):
            if any(target.split(".")[0] == "torch" for target in modules[name].outside):
                way = "" if name == start else f", by way of {name}"
                yield f"{start} imports torch{way}"


def spread_imports(modules: dict[str, Module]) -> Iterator[str]:
    for library, limit in FILES_THAT_MAY_IMPORT.items():
        users = sorted(m.name for m in modules.values() if library in {t.split(".")[0] for t in m.outside})
        if len(users) > limit:
            yield f"{library} is imported by {', '.join(users)}, and {limit} may"


def private_torch(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.name != PRIVATE_TORCH_MODULE:
            yield from (f"{module.name} uses {name}, which is private to torch" for name in module.private)


def names_that_say_nothing(modules: dict[str, Module]) -> Iterator[str]:
    for name in modules:
        if NAMES_THAT_SAY_NOTHING & set(name.split(".")):
            yield f"{name} does not say what it is for"


JUDGES = (
    upward_imports,
    import_cycles,
    torch_where_it_may_not_be,
    spread_imports,
    private_torch,
    names_that_say_nothing,
)


def faults(package: Path) -> list[str]:
    modules = read_package(package)
    return [fault for judge in JUDGES for fault in judge(modules)]


# --- the package ---


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
def test_package_keeps_the_rule(judge):
    assert list(judge(read_package(PACKAGE))) == []


# --- the rules themselves, on a small package with planted faults ---

SOUND = {
    "__init__.py": "from nano_loop.torch_nano import TorchNano\nfrom .version import __version__",
    "version.py": "__version__ = '1'",
    "torch_nano.py": "import lightning_fabric\nfrom nano_loop.steps import STEPS\nimport nano_loop.cpu.quota",
    "decorator.py": "from . import torch_nano",
    "intercept/calls.py": "import torch\nfrom nano_loop.intercept import torch_private\nimport nano_loop.errors",
    "steps/__init__.py": "from nano_loop.steps.ipex import Ipex\nSTEPS = [Ipex]",
    "steps/ipex.py": "def apply():\n    import intel_extension_for_pytorch as ipex",
    "distributed/strategy.py": "from lightning_fabric.strategies import DDPStrategy\nimport torch.__config__",
    "cpu/__init__.py": "from .quota import quota",
    "cpu/quota.py": "from ..errors import NanoError",
    "errors.py": "class NanoError(RuntimeError): ...",
    "intercept/torch_private.py": "import torch\nqueue = torch.autograd.Variable._execution_engine.queue_callback",
}

PLANTED = {
    "upward": ({"cpu/quota.py": "from nano_loop.steps import STEPS"}, "cpu.quota imports steps"),
    "upward, relative": ({"cpu/quota.py": "from ..decorator import nano"}, "cpu.quota imports decorator"),
    "upward, of a whole module": (
        {"errors.py": "import nano_loop.intercept.calls"},
        "errors imports intercept.calls",
    ),
    "upward, inside a function": (
        {"errors.py": "def f():\n    from .intercept import calls"},
        "errors imports intercept.calls",
    ),
    "upward, for types": (
        {"errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .intercept.calls import Entry"},
        "errors imports intercept.calls",
    ),
    "upward, the public names": (
        {"intercept/calls.py": "from nano_loop import TorchNano"},
        "intercept.calls imports __init__",
    ),
    "upward, by name": (
        {"intercept/calls.py": "import_module('nano_loop.decorator')"},
        "intercept.calls imports decorator",
    ),
    "unknown room": ({"gadgets/one.py": ""}, "gadgets.one: its room is not in ROOMS"),
    "cycle": (
        {"steps/a.py": "from . import b", "steps/b.py": "from . import a"},
        "steps.a → steps.b → steps.a",
    ),
    "cycle of a folder with its file": (
        {"steps/ipex.py": "from nano_loop.steps import STEPS"},
        "a cycle: steps → steps.ipex → steps",
    ),
    "torch in cpu": ({"cpu/quota.py": "import torch.nn"}, "cpu.quota imports torch"),
    "torch in cpu, later": (
        {"cpu/quota.py": "def f():\n    from torch import nn"},
        "cpu.quota imports torch",
    ),
    "torch in cpu, indirectly": ({"errors.py": "import torch"}, "cpu.quota imports torch, by way of errors"),
    "IPEX twice": (
        {"intercept/calls.py": "try:\n    from intel_extension_for_pytorch import cpu\nexcept ImportError: ..."},
        "intel_extension_for_pytorch is imported by intercept.calls, steps.ipex, and 1 may",
    ),
    "IPEX twice, by name": (
        {"intercept/calls.py": "importlib.import_module('intel_extension_for_pytorch')"},
        "intel_extension_for_pytorch is imported by intercept.calls, steps.ipex",
    ),
    "Fabric thrice": (
        {"decorator.py": "import lightning_fabric.utilities"},
        "lightning_fabric is imported by decorator",
    ),
    "another Lightning": (
        {"torch_nano.py": "from lightning.fabric import Fabric", "decorator.py": "import lightning"},
        "lightning is imported by decorator, torch_nano",
    ),
    "private import": (
        {"intercept/calls.py": "from torch._dynamo import config"},
        "intercept.calls uses torch._dynamo.config",
    ),
    "private import of a name": (
        {"intercept/calls.py": "from torch.nn import _reduction"},
        "intercept.calls uses torch.nn._reduction",
    ),
    "private module": ({"intercept/calls.py": "import torch._C as c"}, "intercept.calls uses torch._C"),
    "private attribute": (
        {"intercept/calls.py": "import torch\nx = torch._C._get_mkldnn()"},
        "intercept.calls uses torch._C",
    ),
    "private attribute of an alias": (
        {"intercept/calls.py": "import torch.nn as n\nn.Module._call_impl"},
        "n.Module._call_impl",
    ),
    "private attribute of a class": (
        {"intercept/calls.py": "from torch.autograd import Variable as V\nV._execution_engine"},
        "intercept.calls uses V._execution_engine",
    ),
    "private attribute by getattr": (
        {"intercept/calls.py": "import torch\ngetattr(torch, '_C')"},
        "intercept.calls uses torch._C",
    ),
    "utils.py": ({"steps/utils.py": ""}, "steps.utils does not say what it is for"),
    "common/": ({"cpu/common/__init__.py": ""}, "cpu.common does not say what it is for"),
}


def plant(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "nano_loop"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_sound_package_has_no_faults(tmp_path):
    assert faults(plant(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("files", "fault"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_fault_is_found(tmp_path, files, fault):
    found = faults(plant(tmp_path, SOUND | files))
    assert any(fault in line for line in found), found


def test_import_for_types_closes_no_cycle(tmp_path):
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import Parts"
    files = {"steps/a.py": "from . import b", "steps/b.py": for_types}
    assert faults(plant(tmp_path, SOUND | files)) == []


def test_instances_may_have_private_attributes(tmp_path):
    assert faults(plant(tmp_path, SOUND | {"intercept/calls.py": "import torch\nself._depth = torch.float32"})) == []
