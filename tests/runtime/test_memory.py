"""The peak memory of a run is reported and predicted, and exceeding the limit is an error that names the layer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nano_loop
from nano_loop.config.options import Options
from nano_loop.cpu.tree import Tree
from nano_loop.runtime import memory

MB = 10**6
# A separate program, because this process may reuse memory that other tests have freed.
PROGRAM = """
import sys, torch, nano_loop
from torch import nn
from nano_loop.cpu import resident_memory

wide, layers, rows, more, has_closure = map(int, sys.argv[1:])
model = nn.Sequential(*(nn.Linear(wide, wide) for _ in range(layers)))
optimizer = torch.optim.Adam(model.parameters())
x = torch.ones(rows, wide)

@nano_loop.nano(verbose=False, memory_limit=resident_memory() + more * 10**6)
def train(model, optimizer):
    def loss():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        if has_closure:
            optimizer.step(closure=loss)
        else:
            loss()
            optimizer.step()

try:
    train(model, optimizer)
    print("trained", train.report["memory"].detail)
except nano_loop.NanoMemoryError as error:
    print(error)
"""
#: Features, layers, rows, the available MB, whether a closure is passed to the step, and the text of the error.
CASES = {
    "forward": (512, 24, 5000, 150, 0, "the forward of"),  # 10 MB for each output
    "backward": (2048, 16, 4, 150, 0, "the backward of"),  # 17 MB for each gradient
    "step": (2048, 16, 4, 450, 0, "a training step is predicted to take"),  # and 537 MB of optimizer state
    "step with a closure": (2048, 16, 4, 450, 1, "a training step is predicted to take"),
    "nothing": (2048, 16, 4, 4000, 0, "trained"),
    "nothing in a closure": (2048, 16, 4, 4000, 1, "trained"),
}


def printed(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_first_step_that_is_too_large_is_an_error_with_the_layer(case: str) -> None:
    text = printed(PROGRAM, *CASES[case][:-1])
    assert CASES[case][-1] in text
    if not case.startswith("nothing"):
        assert ("(Linear)" in text) == (not case.startswith("step"))
        assert "memory_limit=" in text
        assert "the largest tensors are" in text
    if case.startswith("step"):
        assert "optimizer with fewer states" in text
        assert "0.weight 16.8 MB" in text
    if case == "forward":
        assert "smaller batch" in text
        assert "output of 0 (Linear) 10.2 MB" in text


PREDICTED = """
import json, sys, torch, nano_loop
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4000, 256), nn.Linear(256, 4000)
        layers = (nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(int(sys.argv[6])))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

@nano_loop.nano(
    verbose=False, memory_limit=int(sys.argv[3]) * 10**6, precision=sys.argv[4], optimizer_state=sys.argv[5]
)
def train(model, optimizer, shape):
    for _ in range(5):
        words = torch.randint(0, 4000, shape)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), foreach="foreach" in sys.argv or None)
train(model, optimizer, (int(sys.argv[1]), int(sys.argv[2])))
print(json.dumps(train.report["memory"].data.as_dict()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "limit", "precision", "moments", "layers", "kind"),
    [
        *(
            (shape, limit, precision, "32", 4, "")
            for shape, limit in (((12, 128), 900), ((24, 128), 1400), ((8, 512), 2000), ((24, 128), 100_000))
            for precision in ("32", "bf16")
        ),
        *(
            ((2, 8), 100_000, precision, moments, 24, "")
            for precision, moments in (("32", "bf16"), ("bf16-true", "32"), ("bf16-true", "bf16"))
        ),
        *((shape, 100_000, "32", "32", layers, "foreach") for shape, layers in (((2, 8), 24), ((24, 128), 4))),
    ],
    ids=str,
)
def test_peak_is_predicted_within_a_tenth(shape, limit, precision, moments, layers, kind) -> None:
    found = json.loads(printed(PREDICTED, *shape, limit, precision, moments, layers, kind))
    assert found["predicted"] == pytest.approx(found["peak"], rel=0.1)
    assert sum(found["parts"].values()) == pytest.approx(found["peak"], rel=0.1)


AGAIN = """
import json, sys, torch, nano_loop
from torch import nn
from nano_loop.cpu import resident_memory

wide, layers, rows, more = map(int, sys.argv[2:])
model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(wide, wide), nn.Tanh())))
optimizer = torch.optim.Adam(model.parameters())
options = {"verbose": False, "memory_limit": resident_memory() + more * 10**6}

def step(rows):
    optimizer.zero_grad()
    model(torch.ones(rows, wide)).square().mean().backward()
    optimizer.step()

if sys.argv[1] == "after a run":
    for _ in range(3):
        with nano_loop.accelerated(model, optimizer, **options) as run:
            for _ in range(3):
                step(rows)
        print(json.dumps(run.report["memory"].data.as_dict()))
else:
    def tried(rows):
        try:
            step(rows)
            return True
        except nano_loop.NanoMemoryError as error:
            print(error)
            optimizer.zero_grad()

    with nano_loop.accelerated(model, optimizer, **options):
        while not tried(rows) and rows:
            rows //= 2
        for _ in range(3):
            step(rows)
    print(rows)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "more"), [(64, 400), (2000, 550)]
)  # 101 MB each of weights and gradients, 201 of states
def test_gradients_and_states_of_an_earlier_run_count_once(rows: int, more: int) -> None:
    for line in printed(AGAIN, "after a run", 1024, 24, rows, more).splitlines():
        found = json.loads(line)
        assert sum(found["parts"].values()) == pytest.approx(found["peak"], rel=0.02)
        assert found["predicted"] == pytest.approx(found["peak"], rel=0.1)


@pytest.mark.slow
def test_smaller_batch_may_follow_one_that_was_too_large() -> None:
    # 50 KB for a row, and 201 MB besides
    error, rows = printed(AGAIN, "in a run", 1024, 12, 16_000, 700).splitlines()
    assert "memory_limit=" in error
    assert rows == "8000"


def trained(steps: int = 3, body=None, **options):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    @nano_loop.nano(**{"verbose": False, **options})
    def train(model, optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
            if body is not None:
                body(step, model)

    train(model, optimizer)
    return train.report


def test_last_line_of_the_report_is_the_peak_and_its_largest_part(capfd: pytest.CaptureFixture[str]) -> None:
    report = trained(verbose=True)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == str(report["memory"])
    assert last.split()[:3] == ["measured", "memory", "peak"]
    found = report["memory"].data
    largest = max(found.parts, key=found.parts.get)
    assert ("of which" in last) == (found.parts[largest] > found.peak / 4)
    assert found.parts["states of optimizers"] > 0
    assert found.predicted is None or found.predicted > 0


def test_run_without_a_step_has_no_line_about_memory() -> None:
    with nano_loop.accelerated(nn.Linear(2, 2), verbose=False) as run:
        pass
    assert "memory" not in {result.name for result in run.report.results}


def test_nothing_is_asked_after_the_first_step_and_nothing_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, counts = [], []
    monkeypatch.setattr(memory, "resident_memory", lambda: asked.append(1) or 100 * MB)
    monkeypatch.setattr(memory, "memory_left", lambda tree: {})
    trained(body=lambda step, model: counts.append(len(asked)), memory_limit="1 TB")
    first, *others = counts
    assert first > 6
    assert set(others) == {first}
    counts.clear()
    asked.clear()
    trained(body=lambda step, model: counts.append(len(asked)))
    assert max(counts) <= 3  # at the setup and before the step


def test_limit_is_for_all_processes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda tree: {"the cgroup": 100 * MB})
    monkeypatch.setattr(memory, "resident_memory", lambda: 10 * MB)

    class Ranks:
        size, local_size = 4, 2

    options = Options(memory_limit="80 MB")
    watch = memory.MemoryWatch(options, Ranks(), None, None)
    assert watch._read_limit() == (20 * MB, "memory_limit='80 MB'")
    options = Options(memory_limit="8 GB")
    assert memory.MemoryWatch(options, Ranks(), None, None)._read_limit() == (60 * MB, "the cgroup")


#: The files of a cgroup that leaves 1 MB.
CGROUP = {
    "/proc/self/cgroup": "0::/run",
    "/proc/self/mountinfo": "26 25 0:29 / /sys/fs/cgroup ro - cgroup2 cgroup rw",
    "/sys/fs/cgroup/run/memory.max": 100 * MB,
    "/sys/fs/cgroup/run/memory.current": 99 * MB,
    "/sys/fs/cgroup/run/memory.stat": "anon 1",
}


def test_limit_of_the_cgroup_is_an_error_that_advises_more_memory(monkeypatch: Any, tmp_path: Path) -> None:
    for name, value in CGROUP.items():
        path = Path(f"{tmp_path}{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    monkeypatch.setattr(memory, "Tree", lambda root: Tree(tmp_path))
    with pytest.raises(nano_loop.NanoMemoryError, match=r"the cgroup allows .*give the process more memory\.$"):
        trained(body=lambda step, model: pytest.fail("a step"))


def test_error_of_torch_in_a_loop_that_was_set_up_is_the_same_error() -> None:
    with pytest.raises(nano_loop.NanoMemoryError, match="DefaultCPUAllocator") as caught:
        trained(body=lambda step, model: torch.empty(1 << 50))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "0.weight" in str(caught.value)


def _fails_in_another_rank(model: nn.Module) -> None:
    raise nano_loop.NanoWorkerError("rank 1 raised NanoMemoryError: DefaultCPUAllocator: can't allocate", rank=1)


def _fails_in_a_nested_run(model: nn.Module) -> None:
    nano_loop.nano(verbose=False)(lambda model: torch.empty(1 << 50))(model)


@pytest.mark.parametrize("fail", [_fails_in_another_rank, _fails_in_a_nested_run])
def test_error_that_is_explained_already_stays_what_it_is(fail: Any) -> None:
    with pytest.raises(nano_loop.NanoError) as caught:
        nano_loop.nano(verbose=False)(fail)(nn.Linear(1, 1))
    assert isinstance(caught.value, nano_loop.NanoWorkerError) == (fail is _fails_in_another_rank)
    assert str(caught.value).count("Use a smaller") == (fail is _fails_in_a_nested_run)


def test_advice_is_to_raise_a_limit_that_the_libraries_alone_exceed() -> None:
    with pytest.raises(
        nano_loop.NanoMemoryError, match=r"; the parts are libraries and data .*\. Raise memory_limit\.$"
    ):
        trained(memory_limit="50 MB")


def test_other_errors_and_those_outside_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught:
        trained(body=lambda step, model: torch.ones(2, 3) @ torch.ones(2, 3))
    assert not isinstance(caught.value, nano_loop.NanoError)


def through_func(model, x):
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    loss = torch.func.grad(lambda own: torch.func.functional_call(model, own, x).square().sum())(weights)
    return sum(each.square().sum() for each in loss.values()) + model(x).sum()


def through_double_backward(model, x):
    weights = [*model.parameters()]
    gradients = torch.autograd.grad(model(x).square().sum(), weights, create_graph=True)
    return sum(each.square().sum() for each in gradients)


WAYS = {
    "torch.func": through_func,
    "double backward": through_double_backward,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).sum(),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True).sum(),
    "in place behind": lambda model, x: model(x).relu_().sum(),
    "vmap": lambda model, x: torch.vmap(model)(x).sum(),
}


@pytest.mark.parametrize("way", WAYS)
def test_watched_first_step_computes_what_an_unwatched_one_does(way: str) -> None:
    def train(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nano_loop.accelerated(model, optimizer, verbose=False, **options):
            for _ in range(3):
                optimizer.zero_grad()
                WAYS[way](model, torch.rand(4, 8)).backward()
                optimizer.step()
        return torch.cat([each.flatten() for each in model.parameters()])

    assert torch.equal(train(memory_limit="1 TB"), train())
