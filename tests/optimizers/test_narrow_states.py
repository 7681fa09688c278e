"""After a run, bf16 moments become fp32 when they are read, and neither they nor weights make the end of it a peak."""

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.optimizers.narrow_states import NarrowStates

_END = """
from pathlib import Path
import sys, torch, nano_loop
from torch import nn

model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
peaks = []

def mark():
    peaks.append(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]))
    Path("/proc/self/clear_refs").write_text("5")

@nano_loop.nano(precision="bf16-true", optimizer_state=sys.argv[1], verbose=False)
def train(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2048)).square().mean().backward()
        optimizer.step()
    mark()

train(model, optimizer)
mark()
print(*peaks)
"""


@pytest.mark.parametrize("moments", ["32", "bf16"])
def test_end_of_a_run_adds_one_weight_at_most(moments):
    """Casting everything at the end took 200 MB more with bf16 moments: 8 weights of 16 MB, and as many gradients."""
    done = subprocess.run([sys.executable, "-c", _END, moments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    inside, end = map(int, done.stdout.split())
    gradients = 8 * 2048 * 2048 * 2 >> 10  # become fp32
    assert end - inside < gradients + 2 * (2048 * 2048 * 4 >> 10)


def plainly(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(6.0) + step).square().mean().backward()
        optimizer.step()


def trained(make=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = make(model.parameters())
    nano(optimizer_state="bf16", verbose=False)(plainly)(model, optimizer)
    return model, optimizer


def dtypes(states):
    return {value.dtype for state in states for name, value in state.items() if name != "step"}


def raw(optimizer):
    """Return the states as they are in memory."""
    return [*defaultdict.values(optimizer.state)]


READERS = {
    "item": lambda optimizer: [optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"]],
    "get": lambda optimizer: [optimizer.state.get(parameter) for parameter in optimizer.param_groups[0]["params"]],
    "values": lambda optimizer: optimizer.state.values(),
    "items": lambda optimizer: [state for _, state in optimizer.state.items()],
    "dict": lambda optimizer: dict(optimizer.state).values(),
    "unpacked": lambda optimizer: {**optimizer.state}.values(),
    "merged": lambda optimizer: (optimizer.state | {}).values(),
    "copy": lambda optimizer: copy.copy(optimizer.state).values(),
    "deepcopy": lambda optimizer: raw(copy.deepcopy(optimizer)),
    "pickle": lambda optimizer: raw(pickle.loads(pickle.dumps(optimizer))),
    "state_dict": lambda optimizer: optimizer.state_dict()["state"].values(),
    "pop": lambda optimizer: [optimizer.state.pop(parameter) for parameter in optimizer.param_groups[0]["params"]],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_whatever_reads_moments_gets_fp32(read):
    _, optimizer = trained()
    assert dtypes(raw(optimizer)) == {torch.bfloat16}
    expected = [value.float() for state in raw(optimizer) for value in state.values()]
    with torch.inference_mode():
        states = [*read(optimizer)]
    assert dtypes(states) == {torch.float32}
    assert all(map(torch.equal, [value for state in states for value in state.values()], expected))
    assert not any(value.is_inference() for state in raw(optimizer) for value in state.values())


def test_copies_and_checkpoints_are_of_torch_s_classes():
    _, optimizer = trained()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other.state) is defaultdict
    assert type(copy.copy(optimizer.state)) is defaultdict
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert dtypes(torch.load(file, weights_only=True)["state"].values()) == {torch.float32}


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda each: torch.optim.SGD(each, 0.01, momentum=0.9)])
def test_plain_torch_continues(make):
    ends = []
    for read_first in (False, True):
        model, optimizer = trained(make)
        if read_first:
            optimizer.load_state_dict(optimizer.state_dict())
        plainly(model, optimizer)
        ends.append([*model.parameters(), *(value for state in raw(optimizer) for value in state.values())])
    assert all(map(torch.equal, *ends))


def test_next_run_has_the_moments_in_bf16_at_once():
    model, optimizer = trained()
    moments = [value for state in raw(optimizer) for value in state.values() if value.dim()]

    @nano(optimizer_state="bf16", verbose=False)
    def inspect(model, optimizer):
        assert type(optimizer.state) is defaultdict
        again = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert all(first is second for first, second in zip(moments, again, strict=True))

    inspect(model, optimizer)
    assert isinstance(optimizer.state, NarrowStates)


def test_moments_that_others_hold_are_fp32_after_the_run():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    held = optimizer.state
    nano(optimizer_state="bf16", verbose=False)(plainly)(model, optimizer)
    gc.collect()
    assert dtypes(held.values()) == {torch.float32}
    assert held is optimizer.state
