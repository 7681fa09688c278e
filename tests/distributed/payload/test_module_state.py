"""Workers get the state that the program has set in imported modules, or the run reports that they do not."""

import contextlib
import importlib
import itertools
import sys
import textwrap

import pytest

from nano_loop.distributed.payload import module_state
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.errors import NanoWarning

_numbers = itertools.count()


@contextlib.contextmanager
def imported(folder, names):
    """Import fresh copies of a folder's modules."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name, module in sys.modules.copy().items():
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                held = vars(sys.modules.pop(name)).get("held")
                for file in (held, getattr(held, "file", None)):
                    if hasattr(file, "close"):
                        file.close()


def loaded(ranks, folder):
    with imported(folder, ()):
        return repr(load(folder / "sent")())


@pytest.fixture
def in_worker(team, tmp_path):
    """Return the results of a module's ``read()`` after a change, in this process and in a worker."""

    def outcome(sources, change, call="m.read", imports=None):
        sources = sources if isinstance(sources, dict) else {f"state_{next(_numbers)}": sources}
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
        names = imports or [name.removesuffix(".__init__") for name in sources]
        with imported(tmp_path, names) as modules:
            before = repr(modules[-1].read())
        with imported(tmp_path, names) as modules:
            scope = {"__name__": "__main__", "m": modules[-1], "sys": sys}
            exec(textwrap.dedent(change), scope)
            (tmp_path / "sent").mkdir()
            dump(eval(call, scope), tmp_path / "sent", {})
            here = repr(modules[-1].read())
        there = team(2)(loaded, tmp_path)[1]
        assert before != here or not change, "the change is not seen"
        return here, there

    return outcome


CASES = {
    "attributes": ("MARGIN = 1.0\ndef read(): return MARGIN, globals().get('new')", "m.MARGIN = m.new = 4.0"),
    "a dict, and one in it that has another name": (
        "cfg = {'a': 1, 'b': {'c': 2}}\nb = cfg['b']\ndef read(): return cfg, b, b is cfg['b']",
        "m.cfg['b']['c'] = 3; del m.cfg['a']",
    ),
    "a dict in the place of another": ("cfg = {'a': 1}\ndef read(): return cfg", "m.cfg = {'b': [1, (2, {3})]}"),
    "the order of a dict": ("cfg = {'a': 1, 'b': 2}\ndef read(): return cfg", "m.cfg['a'] = m.cfg.pop('a')"),
    "a list and a set": (
        "callbacks, seen = [1], {1}\nothers = callbacks, seen\ndef read(): return others",
        "m.callbacks.append(2); m.seen.add(2)",
    ),
    "attributes of classes": (
        "class Outer:\n    margin = 1\n    def f(self): return 1\n    class Inner:\n        margins = [1]\n"
        "def read(): return Outer.margin, Outer().f(), Outer.Inner.margins",
        "m.Outer.margin = 4; m.Outer.f = lambda self: 2; m.Outer.Inner.margins.append(4)",
    ),
    "a function of the script around a module's": (
        "def f(): return 1\ndef read(): return f()",
        "import functools\nf = m.f\nm.f = functools.wraps(f)(lambda: 10 * f())",
    ),
    "what a decorator of the project keeps": (
        "import functools\ndef counted(function):\n    seen = []\n    @functools.wraps(function)\n    def inner():\n"
        "        seen.append(function())\n        return seen\n    return inner\n"
        "@counted\ndef f(): return 1\ndef read(): return len(f())",
        "m.f(); m.f()",
    ),
    "a function in the place of another": ("def f(): return 1\ndef read(): return f()", "m.f = lambda: 2"),
    "an instance": (
        "class Options:\n    def __init__(self): self.margin = 1\noptions = Options()\nheld = [options]\n"
        "def read(): return options.margin, held[0] is options",
        "m.options.margin = 4",
    ),
    "a singleton that is made late": (
        "class Options:\n    margin = 1\n    _instance = None\n    @classmethod\n    def get(cls):\n"
        "        cls._instance = cls._instance or cls()\n        return cls._instance\n"
        "def read(): return Options.get().margin",
        "m.Options.get().margin = 4",
    ),
    "singletons of a metaclass": (
        "class Single(type):\n    made = {}\n    def __call__(cls):\n"
        "        if cls not in cls.made: cls.made[cls] = super().__call__()\n        return cls.made[cls]\n"
        "class State(metaclass=Single):\n    def __init__(self): self.config = None\n"
        "def read(): return State().config, len(Single.made)",
        "m.State().config = {'lr': 0.1}",
    ),
    "slots": (
        "class Options:\n    __slots__ = ('margin', '__dict__')\n    def __init__(self): self.margin, self.b = 1, 2\n"
        "options = Options()\ndef read(): return options.margin, options.b",
        "m.options.margin = 4; m.options.c = 5",
    ),
    "a frozen dataclass, and namespaces": (
        "import argparse, dataclasses, types\na, b = argparse.Namespace(x=1), types.SimpleNamespace(y=1)\n"
        "@dataclasses.dataclass(frozen=True)\nclass A:\n    x: int = 1\nc = A()\ndef read(): return a, b, c",
        "m.a.x = m.b.y = 2; m.c = m.A(2)",
    ),
    "a dict with attributes that refuses to be changed": (
        "class Node(dict):\n    def __init__(self, **items):\n        super().__init__(**items)\n"
        "        self.__dict__['frozen'] = False\n"
        "    def __setitem__(self, key, value):\n        if self.frozen: raise TypeError(key)\n"
        "        super().__setitem__(key, value)\n    def __setattr__(self, key, value): self[key] = value\n"
        "cfg = Node(a=1, b=Node(c=2))\ndef read(): return cfg, cfg.frozen, type(cfg['b'])",
        "m.cfg['b']['c'] = 3; m.cfg.__dict__['frozen'] = True",
    ),
    "a registry with a function and an instance of the script": (
        "LOSSES = {}\ndef read(): return [loss() for loss in LOSSES.values()]",
        "class Loss:\n    def __init__(self): self.x = 4\n    def __call__(self): return self.x\n"
        "m.LOSSES['mine'] = Loss(); m.LOSSES['function'] = lambda: 5",
    ),
    "a registry with functions of modules": (
        "import math\ndef own(): return 1\nmore = {'a': own}\n"
        "def read(): return {name: (f.__name__, f is own) for name, f in more.items()}",
        "import math\nm.more['b'] = math.sqrt\nm.more['c'] = m.own",
    ),
    "a registry with a closure of the module": (
        "FACTOR, LOSSES = 1, {}\ndef add(name, x):\n    def loss(): return FACTOR * x\n    LOSSES[name] = loss\n"
        "add('a', 1)\ndef read():\n    global FACTOR\n    FACTOR = 10\n    return [loss() for loss in LOSSES.values()]",
        "m.add('b', 4)",
    ),
    "what a closure holds": (
        "def make():\n    state = {'x': 1}\n    def get(): return state['x']\n    def put(x): state['x'] = x\n"
        "    return get, put\nget, put = make()\ndef read(): return get()",
        "m.put(4)",
    ),
    "a default and an attribute of a function": (
        "def f(seen=[]): return seen, f.x\nf.x = 1\ndef read(): return f()",
        "m.f()[0].append(1); m.f.x = 2",
    ),
    "a tensor": (
        "import torch\nscale = torch.ones(2)\nheld = (scale,)\ndef read(): return held[0].tolist(), held[0] is scale",
        "m.scale += 1",
    ),
    "a parameter of another shape": (
        "import torch\nw = torch.nn.Parameter(torch.ones(2))\ndef read(): return w, w.requires_grad",
        "m.w.data = m.torch.zeros(3, dtype=m.torch.float64); m.w.requires_grad_(False)",
    ),
    "an array and a model": (
        "import numpy as np, torch\ntorch.manual_seed(0)\na, model = np.zeros(3), torch.nn.Linear(1, 1)\nb = a\n"
        "def read(): return b, model.weight.tolist()",
        "m.a[1] = 5; m.torch.nn.init.constant_(m.model.weight, 4)",
    ),
    "a generator of random numbers": (
        "import random, numpy as np\na, b = random.Random(0), np.random.default_rng(0)\n"
        "def read(): return a.getstate()[1][-1], b.bit_generator.state['state']['state']",
        "m.a.random(); m.b.random()",
    ),
    "containers of the standard library": (
        "import collections as c\na, b, d = c.OrderedDict(x=1), c.defaultdict(list), c.deque([1])\n"
        "e = c.Counter('ab')\n"
        "def read(): return a, b, d, e, list(reversed(a)), b['new']",
        "m.a['y'] = 2; m.a.move_to_end('x'); m.b['z'].append(1); m.d.append(2); m.e.update('a')",
    ),
    "one that holds itself, and a thread's own": (
        "import threading\ncfg, local = {}, threading.local()\ncfg['self'], local.x = cfg, 1\n"
        "def read(): return len(cfg), cfg['self'] is cfg, local.x",
        "m.cfg['x'] = m.local.x = 2",
    ),
    "an instance with an idle lock": (
        "import threading\nclass A:\n    def __init__(self): self.lock, self.x = threading.Lock(), 1\n"
        "a = None\ndef read():\n    if a is None: return None\n    with a.lock: return a.x",
        "m.a = m.A()",
    ),
    "a not-a-number, a zero's sign, and a key that is no number": (
        "import torch\na, b, dtypes = float('nan'), 0.0, {torch.float32: 1}\ndef read(): return a, b, str(b), dtypes",
        "m.b = -0.0; m.dtypes[m.torch.float64] = 2",
    ),
    "locks, loggers and a cold cache, as new": (
        "import functools, logging, threading\nx, lock, log = 1, threading.RLock(), logging.getLogger('a')\n"
        "event = threading.Event()\n@functools.cache\ndef f(): return 1\n"
        "def read():\n    with lock: return x, log.name, event.is_set(), f.__name__",
        "m.x = 2",
    ),
    "nothing of what no function names": (
        "import logging, os, threading\nclass Trap:\n    def __reduce__(self): return 1 .__truediv__, (0,)\n"
        "x, held, a, b = 1, open(os.devnull, 'w'), (i for i in ()), threading.Lock()\n"
        "c, d, trap = logging.getLogger('a'), print, None\ndef read(): return x",
        "m.x, m.trap = 2, [m.Trap()]",
    ),
    "the module's own flags": (
        """
        class Flag:
            def __init__(self, name, value): self.name, self.value = name, value
            def __getstate__(self): raise TypeError("can't pickle Flag objects")
            def __copy__(self): raise TypeError
        class FlagValues:
            def __init__(self): self.__dict__["__flags"] = {}
            def __getattr__(self, name):
                flags = self.__dict__["__flags"]
                if name not in flags: raise AttributeError(name)
                return flags[name].value
            def __setattr__(self, name, value): raise TypeError(name)
            def __getstate__(self): raise TypeError("can't pickle FlagValues")
        FLAGS = FlagValues()
        def read(): return sorted(FLAGS.__dict__["__flags"]), getattr(FLAGS, "lr", None)
        """,
        "m.FLAGS.__dict__['__flags']['lr'] = m.Flag('lr', 0.1)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_worker_has(in_worker, name):
    """Without a warning, which would be an error here."""
    here, there = in_worker(*CASES[name])
    assert here == there


def test_modules_that_others_name_are_reached(in_worker):
    """Through an attribute, an import in a function, a relative import, or just the class of an object."""
    sources = {
        "reached.__init__": "X = 1",
        "reached.sub": "X = 1\ndef of(): return X",
        "reached.far": "X = 1",
        "reached_class": "X = 1\nclass A:\n    def read(self): return X",
        "reached_top": "import reached\nfrom reached.sub import of\nfrom reached_class import A\na = A()\n"
        "def read():\n    from reached import far\n    return reached.X, of(), far.X, a.read()",
    }
    change = "for name in ('reached', 'reached.sub', 'reached.far', 'reached_class'): sys.modules[name].X = 2"
    here, there = in_worker(sources, change)
    assert here == there == "(2, 2, 2, 2)"


def test_a_hook_and_an_activation_reach_their_modules(in_worker):
    """A class is reached, too, if an instance is deep inside a list."""
    sources = {
        "reached_hook": "X = 1\ndef hook(module, args, output): return output + X",
        "reached_activation": "X = 1\ndef activate(x): return x * X",
        "reached_deep": "X = 1\nclass A:\n    def x(self): return X",
        "reached_layers": "import torch\ndef read(): return None\n"
        "class Call:\n    def __init__(self, hook, activate, deep):\n"
        "        self.layer = torch.nn.Identity()\n        self.layer.register_forward_hook(hook)\n"
        "        self.layer.activate, self.deep = activate, [*range(200), deep]\n"
        "    def __call__(self): return self.layer.activate(self.layer(1)), self.deep[-1].x()",
    }
    change = "for name in ('reached_hook', 'reached_activation', 'reached_deep'): sys.modules[name].X = 3"
    modules = "sys.modules['reached_hook'].hook, sys.modules['reached_activation'].activate"
    call = f"m.Call({modules}, sys.modules['reached_deep'].A())"
    assert in_worker(sources, change + "\nm.read = lambda: 1", call)[1] == "(12, 3)"


def test_objects_of_modules_are_the_same_ones_in_arguments(in_worker):
    """Sentinels, dicts, locks, instances, and a sentinel of a module that is not compared."""
    source = """
    import dataclasses, threading
    MISSING, cfg, lock = object(), {"a": 1}, threading.Lock()
    class Options: pass
    options = Options()
    class Call:
        def __init__(self, *args): self.args = args
        def __call__(self):
            return [a is b for a, b in zip(self.args, (MISSING, cfg, lock, options, dataclasses.MISSING))]
    def read(): return None
    """
    there = in_worker(source, "", "m.Call(m.MISSING, m.cfg, m.lock, m.options, m.dataclasses.MISSING)")[1]
    assert there == "[True, True, True, True, True]"


def test_what_a_library_holds_is_found_by_the_code_that_names_it(in_worker, tmp_path):
    """Covers later imports of the library, and names in the script."""
    sources = {
        "libraries.site-packages.flags_of_library": "FLAGS, OTHER = {'lr': 1}, {}\ndef define(): FLAGS['lr'] = 2",
        "names_library": """
        import os, sys
        sys.path.append(os.path.join(os.path.dirname(__file__), "libraries", "site-packages"))
        import flags_of_library
        def read(): return flags_of_library.FLAGS
        """,
    }
    (tmp_path / "libraries").mkdir()
    path = sys.path.copy()
    try:
        here, there = in_worker(sources, "m.flags_of_library.define()", imports=["names_library"])
    finally:
        sys.path[:] = path
    assert here == there == "{'lr': 2}"


# --- objects that cannot be sent ---


def test_code_that_cannot_be_sent_is_an_error_that_names_it(in_worker):
    source = "LOSSES = {}\ndef read(): return sorted(LOSSES)"
    change = "file = m.held = open(__import__('os').devnull, 'w')\nm.LOSSES['mine'] = lambda: file.fileno()"
    with pytest.raises(AssertionError, match=r"state_\d+\.LOSSES\['mine'\] is a function.*worker_init"):
        in_worker(source, change)


UNCOMPARED = {
    "a file": ("import os\nheld = open(os.devnull, 'w')\ndef read(): return x, held.name", "m.x = 2"),
    "a generator": ("def make():\n    yield 1\nheld = make()\ndef read(): return x, held.__name__", "m.x = 2"),
    "a default": ("def held(x=(i for i in ())): pass\ndef read(): return x, held.__name__", "m.x = 2"),
    "a warm cache": (
        "import functools\n@functools.lru_cache\ndef held(): return {'a': 1}\ndef read(): return x, bool(held)",
        "m.x = 2; m.held()",
    ),
    "a context variable": (
        "from contextvars import ContextVar\nheld = ContextVar('held', default=1)\ndef read(): return x, held.name",
        "m.x = 2; m.held.set(4)",
    ),
    "an instance with a file": (
        "import os\nclass A:\n    def __init__(self): self.file, self.step = open(os.devnull, 'w'), 1\nheld = A()\n"
        "def read(): return x, held.file.name",
        "m.x = 2; m.held.step = 2",
    ),
}


@pytest.mark.parametrize("name", UNCOMPARED)
def test_what_cannot_be_compared_is_one_warning_where_it_is_named(in_worker, name):
    source, change = UNCOMPARED[name]
    with pytest.warns(NanoWarning, match=r"state_\d+\.held") as caught:
        here, there = in_worker("x = 1\n" + source, change)
    assert len(caught) == 1
    assert here == there


def test_modules_of_a_package_that_others_have_imported_are_left(in_worker, monkeypatch):
    sources = {
        "package_of_two.__init__": "X = 1",
        "package_of_two.second": "import sys\nX = sys.is_caller",  # fails if a worker imports it
        "package_of_two.first": "import package_of_two\ndef read(): return package_of_two.X",
    }
    monkeypatch.setattr(sys, "is_caller", True, raising=False)
    change = "import package_of_two\npackage_of_two.X = 2\nassert package_of_two.second.X"
    here, there = in_worker(sources, change)
    assert here == there == "2"


def test_what_is_large_is_not_sent_and_is_named(in_worker, monkeypatch):
    monkeypatch.setattr(module_state, "LARGEST", 500)
    source = "import torch\nx, held, tensor = 1, {'a': [*range(300)]}, torch.zeros(300)\n"
    source += "def read(): return x, len(held), tensor.shape"
    with pytest.warns(NanoWarning, match=r"\.held has over .*\.tensor has over"):
        here, there = in_worker(source, "m.x = 2; m.held['a'][0] = 5; m.tensor += 1")
    assert here == there
