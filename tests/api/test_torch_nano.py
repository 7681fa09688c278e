"""`TorchNano`: the return values of `setup`, the state inside `train`, and the restored state outside."""

import lightning_fabric
import pytest
import torch
from torch import nn
from watched import Net, fit, in_bf16, is_fused, loader, make, seeded  # noqa: F401 - a fixture

from nano_loop import NanoConfigError, NanoError, TorchNano, patch_cuda, unpatch_cuda

# Warnings about CPUs without bf16 instructions are covered by other tests.
pytestmark = pytest.mark.filterwarnings("ignore:precision=:nano_loop.NanoWarning")


class Loop(TorchNano):
    """Runs a function of itself as its loop, silently by default."""

    def __init__(self, *args, verbose=False, **kwargs):
        super().__init__(*args, verbose=verbose, **kwargs)

    def train(self, function, *args, **kwargs):
        return function(self, *args, **kwargs)


@pytest.fixture
def job():
    return make()[:2]


#: Functions that are called with a model, two optimizers and three loaders, and the parts that they return.
SETUPS = {
    "no loader": lambda nano, m, o, d: (nano.setup(m, o[0]), (m, o[0])),
    "a loader": lambda nano, m, o, d: (nano.setup(m, o[0], d[0]), (m, o[0], d[0])),
    "two loaders": lambda nano, m, o, d: (nano.setup(m, o[0], *d[:2]), (m, o[0], d[:2])),
    "three loaders": lambda nano, m, o, d: (nano.setup(m, o[0], *d), (m, o[0], d)),
    "by keyword": lambda nano, m, o, d: (nano.setup(model=m, optimizer=o[0], move_to_device=False), (m, o[0])),
    "a model alone, as Fabric": lambda nano, m, o, d: (nano.setup(m), m),
    "a model that is not moved": lambda nano, m, o, d: (nano.setup(m, move_to_device=False), m),
    **{f"{n} optimizers in a list": lambda nano, m, o, d, n=n: (nano.setup(m, o[:n]), (m, o[:n])) for n in range(3)},
    "setup_module": lambda nano, m, o, d: (nano.setup_module(m), m),
    "setup_optimizers": lambda nano, m, o, d: (nano.setup_optimizers(o[0]), o[0]),
    "setup_optimizers of two": lambda nano, m, o, d: (nano.setup_optimizers(*o), tuple(o)),
    "setup_dataloaders": lambda nano, m, o, d: (nano.setup_dataloaders(d[0]), d[0]),
    "setup_dataloaders of two": lambda nano, m, o, d: (nano.setup_dataloaders(*d[:2]), d[:2]),
    "setup_dataloaders by Fabric's keywords": lambda nano, m, o, d: (
        nano.setup_dataloaders(d[0], use_distributed_sampler=False, move_to_device=False),
        d[0],
    ),
}


def is_same(found, given):
    if type(given) in (tuple, list):
        return type(found) is type(given) and len(found) == len(given) and all(map(is_same, found, given))
    return found is given


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_setups_give_back_the_very_objects(setup):
    net = Net()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    assert is_same(*Loop(precision="bf16").train(setup, net, optimizers, [loader() for _ in range(3)]))


def test_parts_that_are_set_up_apart_are_accelerated_until_the_end(job):
    other = torch.optim.SGD(job[0].parameters(), lr=0.1)
    data = loader()

    def train(self):
        self.setup_module(job[0])
        assert in_bf16(job[0]) == [True]
        self.setup_optimizers(job[1], other)
        assert is_fused(job[1])
        self.setup_dataloaders(data)
        for name, thing in (("setup_dataloaders", data), ("setup_module", job[0])):
            with pytest.raises(TypeError, match="no_such_keyword"):
                getattr(self, name)(thing, no_such_keyword=True)
        fit(job[0], job[1], data)

    Loop(precision="bf16").train(train)
    assert (in_bf16(job[0]), is_fused(job[1]), is_fused(other)) == ([False], False, False)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"fused_optimizer": True, "fast_fetch": True}], ids=str)
def test_parts_set_up_later_take_nothing_from_what_was_said_and_ask_nothing_of_what_is_asked_by_name(job, options):
    def train(self):
        self.setup(*job)
        self.setup_dataloaders(loader())
        self.setup_module(nn.Linear(1, 1))
        return is_fused(job[1])

    loop = Loop(**options)
    assert loop.train(train) is True
    assert {"fused_optimizer", "fast_fetch", *options} <= {*loop.report.applied}
    assert not {*loop.report.applied} & {*loop.report.skipped}


def test_same_model_is_set_up_again(job):
    other = torch.optim.SGD(job[0].parameters(), lr=0.1)

    def train(self):
        for optimizer in (job[1], job[1], other):
            model, optimizer = self.setup(job[0], optimizer)
            fit(model, optimizer, loader())
            assert (in_bf16(model), is_fused(optimizer)) == ([True], True)

    loop = Loop(precision="bf16")
    loop.train(train)
    assert loop.report.applied.count("precision") == 1
    assert (in_bf16(job[0]), is_fused(job[1]), is_fused(other)) == ([False], False, False)


def test_setup_outside_train_is_told(job):
    loop = Loop()
    for setup in (
        lambda: loop.setup(*job),
        lambda: loop.setup_module(job[0]),
        lambda: loop.setup_optimizers(job[1]),
        lambda: loop.setup_dataloaders(loader()),
    ):
        with pytest.raises(NanoError, match=r"outside train: .+\. Call it in train"):
            setup()
    assert loop.report is None
    loop.train(lambda self: self.setup(*job))
    with pytest.raises(NanoError, match="outside train"):
        loop.setup(*job)
    loop.train(lambda self: None)
    assert loop.report is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda m, o, d: (m, None), ["optimizer is a NoneType"]),
        (lambda m, o, d: (m, [o, 3]), ["optimizer is a int"]),
        (lambda m, o, d: (m, torch.optim.lr_scheduler.ConstantLR(o)), ["optimizer is a ", "ConstantLR"]),
        (lambda m, o, d: (m, o, [d, d]), ["dataloaders is a list", "DataLoader"]),
        (lambda m, o, d: (m, o, d, d.dataset), ["dataloaders is a ", "TensorDataset"]),
        (lambda m, o, d: (o, m, [d]), ["model is a ", "optimizer is a ", "dataloaders is a "]),
    ],
)
def test_wrong_kinds_are_all_told(job, arguments, told):
    with pytest.raises(NanoConfigError) as caught:
        Loop(precision="bf16").train(lambda self: self.setup(*arguments(*job, loader())))
    assert [part for part in told if part not in str(caught.value)] == []
    assert in_bf16(job[0]) == [False]


def test_forgotten_init_is_told_whatever_attributes_the_user_has():
    class Forgets(TorchNano):
        def __init__(self):
            self.config, self.model = {"epochs": 3}, None

        def train(self):
            pytest.fail("the loop must not start")

    with pytest.raises(NanoError, match=r"Forgets\.__init__ .+\. Call super\(\)\.__init__"):
        Forgets().train()


def test_user_s_own_attributes_do_no_harm(job):
    class Own(TorchNano):
        def __init__(self):
            super().__init__(precision="bf16", verbose=False)
            self.config = {"epochs": 3}
            self.machine = self.pipeline = self.options = self.steps = self.model = None

        def train(self):
            model, _ = self.setup(*job)
            return self.config["epochs"], in_bf16(model)

    assert Own().train() == (3, [True])


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta"])
def test_device_may_be_assigned_as_trainers_of_scripts_do(device):
    class Trainer(TorchNano):
        def __init__(self, device):
            super().__init__(verbose=False)
            self.device = device

    assert Trainer("cpu").device == Trainer(torch.device("cpu", 0)).device == torch.device("cpu")
    with pytest.raises(NanoError, match=r"it trains on the CPU.*patch_cuda\(\)"):
        Trainer(device)
    patch_cuda()
    try:
        assert Trainer("cuda" if torch.cuda.is_available() else "cpu").device == torch.device("cpu")
    finally:
        unpatch_cuda()


@pytest.mark.parametrize("kind", [TorchNano, type("Empty", (TorchNano,), {})])
def test_class_without_train_has_nothing_to_train(kind):
    with pytest.raises(NanoError, match=rf"{kind.__name__} has no train method: .+\. Define train"):
        kind().train(1, epochs=2)


def test_subclass_of_a_subclass_calls_its_parent_s_train(job):
    class Parent(TorchNano):
        def train(self, model, optimizer):
            model, optimizer = self.setup(model, optimizer)
            fit(model, optimizer, loader())
            return in_bf16(model)

    class Child(Parent):
        def train(self, model, optimizer):
            result = super().train(model, optimizer)
            assert is_fused(optimizer)  # the parent's set-up lasts until the child has trained
            return result, in_bf16(model)

    assert Child(precision="bf16", verbose=False).train(*job) == ([True], [True])
    assert Parent(precision="bf16", verbose=False).train(*job) == [True]
    assert (in_bf16(job[0]), is_fused(job[1])) == ([False], False)


def test_train_of_a_class_beside_torch_nano_is_a_run(job):
    class Trains:
        def train(self, model, optimizer):
            return in_bf16(self.setup(model, optimizer)[0])

    class Both(Trains, TorchNano):
        pass

    assert Both(precision="bf16", verbose=False).train(*job) == [True]
    assert in_bf16(job[0]) == [False]


def test_train_keeps_its_metadata():
    class Documented(TorchNano):
        def train(self, epochs: int = 3) -> int:
            """Train."""
            return epochs

    assert (Documented.train.__name__, Documented.train.__doc__) == ("train", "Train.")
    assert Documented.train.__annotations__ == {"epochs": int, "return": int}
    assert Documented().train() == 3
    assert Documented().train(epochs=4) == 4
    with pytest.raises(TypeError, match="'epoch'"):
        Documented().train(epoch=4)


def test_it_is_a_fabric():
    loop = Loop()
    assert isinstance(loop, lightning_fabric.Fabric)
    assert loop.device == torch.device("cpu")
    assert (loop.world_size, loop.global_rank, loop.local_rank, loop.node_rank) == (1, 0, 0, 0)
    assert loop.is_global_zero is True


@pytest.mark.parametrize("precision", [32, "bf16"])
def test_backward_and_autocast_in_train(job, precision):
    def train(self):
        model, optimizer = self.setup(*job)
        before = model.layer.weight.clone()
        self.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        with self.autocast():
            product = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        return product.dtype, bool((model.layer.weight != before).all())

    expected = torch.float32 if precision == 32 else torch.bfloat16
    assert Loop(precision=precision).train(train) == (expected, True)


def test_print_goes_to_standard_output(capfd):
    Loop().train(lambda self: self.print("loss", 1, sep="="))
    assert capfd.readouterr() == ("loss=1\n", "")


def test_save_and_load_in_train(job, tmp_path):
    path = tmp_path / "run" / "checkpoint.pt"
    other = make()[:2]

    def train(self):
        model, optimizer, data = self.setup(*job, loader())
        fit(model, optimizer, data)
        self.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
        copy, its = self.setup(*other)
        rest = self.load(path, {"model": copy, "optimizer": its})
        return rest["epoch"]

    assert Loop(precision="bf16").train(train) == 3
    plain = torch.load(path, weights_only=True)
    assert sorted(plain["model"]) == ["layer.bias", "layer.weight"]
    for name, value in job[0].state_dict().items():
        assert torch.equal(value, plain["model"][name])
        assert torch.equal(value, other[0].state_dict()[name])
    assert len(other[1].state_dict()["state"]) == 2


def test_model_is_moved_to_the_device_unless_told_otherwise():
    elsewhere = nn.Linear(2, 2, device="meta")

    def train(self, **options):
        return self.setup(elsewhere, [], **options)[0].weight.device.type

    assert Loop().train(train, move_to_device=False) == "meta"
    with pytest.raises(NotImplementedError, match="meta"):  # torch's own error, for an impossible move
        Loop().train(train)


def test_run_and_launch_of_fabric_do_no_harm(job):
    loop = Loop(precision="bf16")
    loop.launch()
    assert loop.train(lambda self: in_bf16(self.setup(*job)[0])) == [True]


def test_second_setup_prints_only_what_is_new(job, capfd, without_ipex):
    def train(self):
        self.setup(*job)
        capfd.readouterr()
        self.setup(*make()[:2])
        assert capfd.readouterr() == ("", "")
        self.setup(*make())

    Loop(verbose=True).train(train)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[:2] for line in err.splitlines()] == [["applied", "fast_fetch"], ["nothing", "to"]]


def test_failed_setup_is_undone_and_the_loop_may_go_on(job):
    asgd = torch.optim.ASGD(job[0].parameters())

    def train(self):
        with pytest.raises(NanoConfigError, match="fused_optimizer=True"):
            self.setup(job[0], asgd)
        self.setup(*job)
        return is_fused(job[1])

    assert Loop(fused_optimizer=True).train(train) is True
    assert not is_fused(job[1])


def test_options_are_attributes_that_cannot_be_set():
    loop = TorchNano(num_processes=1, channels_last=True, auto_lr=False, cpu_for_each_process=[[0]])
    found = {name: getattr(loop, name) for name in ("num_processes", "use_ipex", "channels_last", "auto_lr")}
    assert found == {"num_processes": 1, "use_ipex": False, "channels_last": True, "auto_lr": False}
    assert loop.cpu_for_each_process == [[0]]
    assert TorchNano().cpu_for_each_process is None
    assert (TorchNano().num_processes, TorchNano(num_processes=3).num_processes) == (1, 3)
    dtypes = {32: torch.float32, "bf16": torch.bfloat16, "bf16-true": torch.bfloat16, 64: torch.float64}
    assert {precision: TorchNano(precision=precision).dtype for precision in dtypes} == dtypes
    for name in (*found, "cpu_for_each_process", "dtype"):
        with pytest.raises(AttributeError, match=name):
            setattr(loop, name, 2)


SAVES = {
    "Fabric's": lambda loop, path, state: loop.save(path, state),
    "Fabric's, by name": lambda loop, path, state: loop.save(state=state, path=path),
    "LightningLite's": lambda loop, path, state: loop.save(state, path),
    "LightningLite's, by name": lambda loop, path, state: loop.save(content=state, filepath=path),
    "LightningLite's, one by name": lambda loop, path, state: loop.save(state, filepath=str(path)),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_save_takes_contents_and_path_in_both_orders(tmp_path, save):
    def train(self, model):
        self.setup_module(model)
        save(self, tmp_path / "model.pt", {"model": model, "epoch": 3})

    model = nn.Linear(2, 1)
    Loop().train(train, model)
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["model"]["weight"], model.weight)


def test_save_of_something_else_is_refused_by_its_kinds():
    for arguments, kinds in (({"path": [1]}, "list"), ({"path": "a", "state": {}, "filepath": "b"}, "str, dict, str")):
        with pytest.raises(NanoConfigError, match=rf"save\({kinds}\): it takes a path and a dict"):
            TorchNano().save(**arguments)


def test_replace_sampler_is_use_distributed_sampler(monkeypatch):
    seen = []

    def train(self, data):
        monkeypatch.setattr(self, "_accelerate", lambda parts: seen.append(parts.shard))
        assert self.setup_dataloaders(data, replace_sampler=False) is data
        self.setup_dataloaders(data, replace_sampler=True)
        self.setup_dataloaders(data, use_distributed_sampler=False)

    Loop().train(train, loader())
    assert seen == [False, None, False]
