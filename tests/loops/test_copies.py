"""Copies made inside the loop (averages of the weights, deep copies, pickles) are plain."""

import copy
import pickle
import subprocess
import sys
import textwrap

import cloudpickle
import pytest
import torch
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from nano_loop import nano

from .pairs import (
    BF16,
    CONVOLUTIONS,
    EXACT,
    FP64,
    FUSED,
    NHWC,
    NHWC_BF16,
    NHWC_FUSED,
    SHIPPED,
    SHIPPED_NHWC,
    WITH_IPEX,
    pair,
    untouched,
)
from .tasks import ADAM, ConvNet, entropy, fit, images, job, train

NETS = job("", optimizer=ADAM), job("convolutional", model=ConvNet, optimizer=ADAM, loader=images)


@pair(*NETS, configs=CONVOLUTIONS)
def test_ema_by_deepcopy(model, optimizer, loader, by_hand=untouched):
    """The copy has its own weights and runs plain: without `by_hand`, so in fp32."""
    average = copy.deepcopy(model).eval()
    outputs = []
    for x, y in loader:
        train(entropy(by_hand(model)), [(x, y)], optimizer)
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
            outputs.append(average(x))
    assert type(average) is type(model)
    assert type(average.head) is torch.nn.Linear
    return outputs, average.state_dict()


@pair(*NETS, configs=CONVOLUTIONS, repeats=[EXACT, FP64, NHWC, NHWC_FUSED, SHIPPED, SHIPPED_NHWC])
def test_stochastic_weight_averaging(model, optimizer, loader, by_hand=untouched):
    average, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.001, anneal_epochs=2)
    for _ in range(3):
        fit(model, optimizer, loader, by_hand, epochs=1)
        average.update_parameters(model)
        scheduler.step()
    update_bn(loader, average)
    return average.state_dict(), scheduler.get_last_lr()


@pair(*NETS, configs=[EXACT, FUSED, BF16, NHWC_BF16, *WITH_IPEX])
def test_copies_are_as_plain_as_the_model(model, optimizer, loader, by_hand=untouched):
    """The `__dict__` of a copy or a pickle is the plain loop's."""
    fit(model, optimizer, loader, by_hand, epochs=1)
    copies = [copy.deepcopy(part) for part in model.modules()]
    copies += [pickle.loads(pickle.dumps(part)) for part in model.modules()]
    return [[(name, type(m), sorted(vars(m))) for name, m in each.named_modules()] for each in copies]


MODEL = """
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.layer(x)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.block(x).mean((2, 3)))

    class Doubled(torch.utils.data.DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    class Ascent(torch.optim.SGD):
        def train(self):
            return "ascends"
"""

READER = """
    import pathlib, pickle, sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "nano_loop":
                raise ImportError("nano_loop is blocked here")

    sys.meta_path.insert(0, Blocked())
    try:
        import nano_loop
    except ImportError:
        pass
    else:
        sys.exit("nano_loop was not blocked")

    import torch
    from net_of_the_user import Block, Net

    folder = pathlib.Path(sys.argv[1])
    x, expected = torch.load(folder / "example.pt")
    models = {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in ("saved", "copied")}
    models["pickled"] = pickle.loads((folder / "pickled.bin").read_bytes())
    for name, model in models.items():
        types = [type(m) for m in model.modules()]
        assert types == [Net, Block, torch.nn.Conv2d, torch.nn.Linear], (name, types)
        torch.testing.assert_close(model(x), expected, msg=name)
    strict = Net()
    strict.load_state_dict(torch.load(folder / "state.pt"))
    torch.testing.assert_close(strict(x), expected)

    model, forward, loader, optimizer = pickle.loads((folder / "by_value.bin").read_bytes())
    assert type(model) is not Net
    assert type(model).forward.__code__ == Net.forward.__code__
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(forward(x), model.block(x))
    assert [*loader] == [0, 2, 4]
    assert optimizer.train() == "ascends"
"""


@pytest.fixture
def net_of_the_user(tmp_path, monkeypatch):
    """Return a model class in a separate module, as in a user's project."""
    (tmp_path / "net_of_the_user.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "reader.py").write_text(textwrap.dedent(READER))
    monkeypatch.syspath_prepend(tmp_path)
    import net_of_the_user

    yield net_of_the_user
    del sys.modules["net_of_the_user"]


def test_what_is_saved_inside_the_loop_loads_without_nano_loop(tmp_path, net_of_the_user):
    @nano(precision="bf16", channels_last="auto", verbose=False)
    def save(model, optimizer, loader, x):
        model(x).square().mean().backward()
        optimizer.step()
        torch.save(model, tmp_path / "saved.pt")
        torch.save(copy.deepcopy(model), tmp_path / "copied.pt")
        torch.save(model.state_dict(), tmp_path / "state.pt")
        (tmp_path / "pickled.bin").write_bytes(pickle.dumps(model))
        assert type(copy.deepcopy(model)) is net_of_the_user.Net
        cloudpickle.register_pickle_by_value(net_of_the_user)  # as for classes defined in a script
        parts = model, model.block.forward, loader, optimizer
        (tmp_path / "by_value.bin").write_bytes(cloudpickle.dumps(parts))
        cloudpickle.unregister_pickle_by_value(net_of_the_user)

    model, x = net_of_the_user.Net(), torch.randn(2, 3, 5, 5)
    numbers = net_of_the_user.Doubled(torch.arange(3), batch_size=None)
    save(model, net_of_the_user.Ascent(model.parameters(), 1e-3), numbers, x)
    torch.save((x, model(x).detach()), tmp_path / "example.pt")
    reader = [sys.executable, "-W", "error", tmp_path / "reader.py", tmp_path]
    done = subprocess.run(reader, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr


def test_references_to_methods_are_the_same_functions_in_the_loop(net_of_the_user):
    """A configuration that names them can be pickled in the run, and one created in the run can be pickled after it."""
    kinds = net_of_the_user.Net, net_of_the_user.Block, net_of_the_user.Doubled, net_of_the_user.Ascent
    before = [kinds[0].forward, kinds[1].forward, kinds[2].__iter__, kinds[3].train]

    @nano(verbose=False, precision="bf16-true")
    def train(model, optimizer, loader):
        assert pickle.loads(pickle.dumps(before)) == before
        assert pickle.loads(cloudpickle.dumps(optimizer.train))() == "ascends"
        return kinds[0].forward, kinds[1].forward, kinds[2].__iter__, kinds[3].train

    model = kinds[0]()
    inside = train(model, kinds[3](model.parameters(), 0.1), kinds[2](torch.arange(3), batch_size=None))
    assert pickle.loads(pickle.dumps(inside)) == tuple(before)
