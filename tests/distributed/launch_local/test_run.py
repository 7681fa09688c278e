"""After a run of several ranks, the caller has the trained objects and an unchanged process."""

import gc
import os
import random
import sys
import threading
import weakref

import numpy
import pytest
import torch
from leaks import affinity_masks
from loops import wrappers
from torch import nn

import nano_loop
from distributed import small
from nano_loop import TorchNano, nano
from nano_loop.kernels.bernoulli import KERNEL

pytestmark = pytest.mark.usefixtures("nothing_left")


def two(function):
    return nano(**small.OPTIONS)(function)


def test_two_ranks_train_the_caller_s_model_as_one_process_of_twice_the_batch_would_and_ramp_from_call_to_call():
    model, optimizer, loader = small.parts(batch_size=4)
    train = nano(**small.OPTIONS | {"auto_lr": True})(small.fit)
    steps = [train(model, optimizer, loader) for _ in range(2)]
    plain_model, plain_optimizer, plain_loader = small.parts(batch_size=8)

    def ramp(rank, step):
        plain_optimizer.param_groups[0]["lr"] = 0.1 * (1 + step / 1000)

    assert sum(steps) == small.fit(plain_model, plain_optimizer, plain_loader, ramp, epochs=4)
    torch.testing.assert_close(small.weights(model), small.weights(plain_model), rtol=1e-6, atol=1e-6)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    expected = [plain_optimizer.state[p]["momentum_buffer"] for p in plain_model.parameters()]
    torch.testing.assert_close(momenta, expected, rtol=1e-6, atol=1e-6)


def test_wrappers_of_optimizers_train_on_two_ranks_as_one_process_of_twice_the_batch_would():
    names = [*wrappers.WRAPPERS]

    def wrapped(batch_size):
        made = [small.parts(batch_size=batch_size) for _ in names]
        return [
            (model, wrappers.WRAPPERS[name](model.parameters()), loader)
            for name, (model, _, loader) in zip(names, made, strict=True)
        ]

    def train(tasks):
        return [small.fit(*task) for task in tasks]

    tasks, plain = wrapped(4), wrapped(8)
    ramping = nano(**{**small.OPTIONS, "auto_lr": True})(train)  # close to 1x in its first steps
    assert ramping(tasks) == train(plain)
    assert {"broadcast", "gradient_averaging", "loaders", "learning_rate"} <= {*ramping.report.applied}
    for name, (model, *_), (twin, *_) in zip(names, tasks, plain, strict=True):
        torch.testing.assert_close(small.weights(model), small.weights(twin), rtol=0.02, atol=0.02, msg=name)


VARIABLES = ("SLURM_NTASKS", "SLURM_PROCID", "MASTER_PORT")


def drawn():
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def seeded(function, *args):
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    return function(*args)


def test_run_in_the_environment_of_a_launcher_gives_back_rank_0_s_and_leaves_the_caller_as_it_was():
    def train(model, losses, notes):
        numbers = drawn()
        losses.append(small.rank())
        notes["rank"] = small.rank()
        return (
            model,
            small.rank(),
            numbers,
            small.everywhere({name: os.environ.get(name) for name in (*VARIABLES, "PATH")}),
        )

    given, losses, notes, hook = [], [], {}, sys.excepthook

    def run(model):
        given.append(model)
        return two(train)(model, losses, notes)

    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, "4")
        model, rank, numbers, variables = seeded(run, nn.Linear(1, 1))
    after = drawn()
    assert (model is given[0], rank) == (True, 0)
    assert (losses, notes) == ([0], {"rank": 0})
    assert (numbers, after) == (seeded(drawn), drawn()), "as if there were one process"
    assert variables[0] == {**dict.fromkeys(VARIABLES, "4"), "PATH": os.environ["PATH"]}
    assert variables[1] == {**dict.fromkeys(VARIABLES), "PATH": os.environ["PATH"]}
    assert sys.excepthook is hook


class Caching(nn.Linear):
    """Registers a buffer with the length of the rank's batch, and resizes another buffer."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("cached", torch.zeros(0), persistent=False)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.register_buffer("cached", torch.ones(len(x)), persistent=False)
        self.seen.resize_(len(x))
        return super().forward(x) * self.cached[:, None]


class Phases(TorchNano):
    def __init__(self, **options):
        super().__init__(**options)
        self.device = "cpu"

    def train(self, model):
        for _ in range(2):
            model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model(torch.ones(3 + self.global_rank, 3).to(self.device)).sum().backward()
            optimizer.step()
        return model.seen.shape


def test_second_setup_takes_buffers_of_the_ranks_lengths_and_storages_are_resized():
    model = Caching()
    assert Phases(**small.OPTIONS).train(model) == (3,)
    model.seen.resize_(100)
    model.weight.data.resize_(10, 3)


def test_patch_of_cuda_holds_in_workers_and_model_and_optimizer_are_freed_without_a_collection():
    def train(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.cuda()), y.to("cuda")).backward()
            optimizer.step()
        return nano_loop.all_gather(torch.ones(1, device="cuda:0")).tolist()

    model, optimizer, loader = small.parts()
    nano_loop.patch_cuda()
    gc.collect()
    gc.disable()
    try:
        assert two(train)(model, optimizer, loader) == [[1.0], [1.0]]
        left = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()
        nano_loop.unpatch_cuda()


class Adjoint(torch.autograd.Function):
    """Calls a model inside a custom backward, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx, model, x, *parameters):
        ctx.model, ctx.x = model, x
        return model(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            gradients = torch.autograd.grad(ctx.model(ctx.x), [*ctx.model.parameters()], gradient)
        return None, None, *gradients


BEGINNINGS = {
    "a batch": lambda model, loader: next(iter(loader)),
    "a call": lambda model, loader: model(torch.ones(1, 3)),
    "an averaging": lambda model, loader: Adjoint.apply(model, torch.ones(1, 3), *model.parameters()).sum().backward(),
}


@pytest.mark.parametrize(
    "begins_with", ["a batch", *(pytest.param(name, marks=pytest.mark.slow) for name in [*BEGINNINGS][1:])]
)
def test_ranks_draw_the_same_numbers_until_training_begins_and_others_from_then_on(begins_with):
    def train(model, loader):
        before = drawn()
        BEGINNINGS[begins_with](model, loader)
        return small.everywhere((before, drawn()))

    model, _, loader = small.parts()
    first, second = results = seeded(two(train), model, loader)
    assert seeded(two(train), model, loader) == results
    assert first[0] == second[0]
    assert all(a != b for a, b in zip(first[1], second[1], strict=True))


def test_settings_of_torch_travel_and_ranks_of_a_loop_that_seeds_itself_draw_what_it_has_chosen():
    def train(model):
        settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        more = torch.is_anomaly_enabled(), torch.get_autocast_dtype("cpu"), numpy.geterr()["over"]
        flushes = torch.tensor(1e-40, dtype=torch.float32).mul(1.0).item() == 0
        more += torch.backends.mkldnn.matmul.fp32_precision, flushes
        torch.manual_seed(9)
        with torch.enable_grad():
            model(torch.ones(1, 1))
        return small.everywhere((settings, more, torch.rand(1).item()))

    matmul, before = torch.backends.mkldnn.matmul, torch.get_autocast_dtype("cpu")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_dtype("cpu", torch.float16)
    flushes = torch.set_flush_denormal(True)
    matmul.fp32_precision = "bf16"  # then torch.get_float32_matmul_precision() raises
    try:
        with torch.no_grad(), torch.autograd.set_detect_anomaly(True), numpy.errstate(over="raise"):
            first, second = two(train)(nn.Linear(1, 1))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_dtype("cpu", before)
        torch.set_flush_denormal(False)
        matmul.fp32_precision = "none"
    assert first == second
    assert first[:2] == ((torch.float64, True, False), (True, torch.float16, "raise", "bf16", flushes))


@pytest.mark.parametrize("verbose", [False, "all"])
def test_only_rank_0_prints_and_saves_unless_all_are_to_print_and_workers_are_asked_nothing(tmp_path, capfd, verbose):
    def train(model):
        if small.rank() == 1:
            breakpoint()
            with pytest.raises(EOFError):
                input()
        print("printed by", small.rank())
        torch.save(small.rank(), tmp_path / f"saved by {'zero' if small.rank() == 0 else 'one'}")
        sys.stderr.write(f"warned by {small.rank()}\n")  # print writes the newline separately while pytest captures

    nano(**small.OPTIONS | {"verbose": verbose})(train)(nn.Linear(1, 1))
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 1] printed by 1"] * bool(verbose) + ["printed by 0"]
    assert [line for line in sorted(err.splitlines()) if "warned" in line] == ["[rank 1] warned by 1", "warned by 0"]
    assert err.count("nano_loop") == bool(verbose)  # the report is shown once
    assert [path.name for path in tmp_path.iterdir()] == ["saved by zero"]


def test_report_says_what_a_copy_of_the_arguments_takes_and_a_mapped_file_takes_none(tmp_path):
    def sums(model, data):
        model(torch.ones(1, 1))
        return data.sum().item()

    titles = []
    numpy.ones(26 << 20, numpy.float32).tofile(tmp_path / "data")
    for data in (torch.ones(26 << 20, 1), numpy.memmap(tmp_path / "data", numpy.float32, "r")):
        train = two(sums)
        assert train(nn.Linear(1, 1), data) == 26 << 20
        titles.append(train.report.title)
    assert titles[0].endswith(" · 0.1 GiB of arguments copied")
    assert "copied" not in titles[1]


class Dropping(nn.Module):
    """Saves its dropout's output."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(1, 1), nn.Dropout(0.5)

    def forward(self, x):
        dropped = self.dropout(x)
        self.kept = dropped.ne(0)
        return self.layer(dropped.mean().view(1, 1))


@pytest.mark.filterwarnings("ignore:precision=:nano_loop.NanoWarning")  # for CPUs without bf16 instructions
@pytest.mark.parametrize(
    ("precision", "counts"),
    [pytest.param(32, [1 << 12], marks=pytest.mark.slow), ("bf16", [1 << 12, 1 << 20])],
)
def test_dropout_draws_masks_of_its_own_on_each_rank_and_in_each_step(precision, counts):
    def train(model, optimizer):
        return [masks_of(model, optimizer, count) for count in counts]

    def masks_of(model, optimizer, count):
        kept = []
        for _ in range(2):
            model(torch.ones(count)).sum().backward()
            optimizer.step()
            kept.append(model.kept)
        return [each for kept in small.everywhere(kept) for each in kept]

    model = Dropping()
    torch.manual_seed(0)
    train = nano(**small.OPTIONS | {"precision": precision})(train)
    for count, masks in zip(counts, train(model, torch.optim.SGD(model.parameters(), lr=0.1)), strict=True):
        for first, one in enumerate(masks):
            assert abs(one.double().mean() - 0.5) < 5 * 0.5 / count**0.5
            for other in masks[:first]:
                assert abs(one.eq(other).double().mean() - 0.5) < 5 * 0.5 / count**0.5
    assert ("fast_dropout" in train.report.applied) == (KERNEL.unavailable is None)


def masks_inside(model, optimizer, loader):
    """Return, by rank, the affinity masks and the number of threads, and the masks of loader workers."""
    workers = [tuple(worker.tolist()) for x, worker in loader]
    masks = set(map(tuple, map(sorted, affinity_masks().values())))
    return small.everywhere((masks, torch.get_num_threads(), set(workers)))


class MaskOfWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1), torch.tensor(small.mask())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
@pytest.mark.parametrize("given", [None, [[1], [0]]])
def test_each_rank_is_on_its_own_cpus_with_all_its_threads(given):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one CPU")
    torch.rand(1 << 20).sum()  # creates OpenMP's threads
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    before = affinity_masks()
    loader = torch.utils.data.DataLoader(MaskOfWorker(), num_workers=1, batch_size=None)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    try:
        options = small.OPTIONS | {"cpu_for_each_process": given}
        run = nano(**options)(masks_inside)
        found = run(model, optimizer, loader)
        after = affinity_masks()
    finally:
        stop.set()
        other.join()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    wanted = [(first,), (second,)] if given is None else [tuple(each) for each in given]
    assert found == [({mask}, 1, {mask}) for mask in wanted]
    assert "2 processes × 1 thread · CPUs " in run.report.title
    assert all(before[thread] == mask for thread, mask in after.items() if thread in before)
    assert set(after.values()) == set(before.values())


class Several(TorchNano):
    """Trains several models in turn, each beside a first one that stays alive."""

    def train(self, count):
        alive = []
        first = self.setup(*small.parts()[:2])
        for _ in range(count):
            model, optimizer, loader = small.parts()
            model, optimizer, loader = self.setup(model, optimizer, loader)
            alive += map(weakref.ref, (model, optimizer))
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x) + first[0](x), y)
                loss.backward()
                for one in (optimizer, first[1]):
                    one.step()
                    one.zero_grad()
            del model, optimizer, loader, loss
        return small.everywhere((sum(reference() is not None for reference in alive), small.weights(first[0]).tolist()))


@pytest.mark.parametrize("precision", [32, pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:precision=:nano_loop.NanoWarning")  # for CPUs without bf16 instructions
def test_models_that_the_loop_drops_are_not_kept_but_for_the_last_one(precision):
    ranks = Several(**small.OPTIONS | {"precision": precision}).train(5)
    assert [count <= 2 for count, _ in ranks] == [True, True]
    assert ranks[0][1] == ranks[1][1], "the first is averaged all the time"
