"""channels_last="auto" times both layouts on copies, leaves the loop unchanged, and continues in the faster layout."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import nano_loop
from nano_loop import nano
from nano_loop.steps import layout_trial
from nano_loop.steps.channels_last import ChannelsLast
from nano_loop.steps.layout_trial import LayoutTrial

pytestmark = pytest.mark.filterwarnings("ignore:.*no bf16 instructions")


class Images(nn.Module):
    """A network with dropout and batch norm; it records whether its convolution computes in NHWC."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)
        self.seen = []

    def forward(self, x):
        x = self.conv(x)
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.head(self.drop(torch.relu(self.norm(x))).mean((2, 3)))


def fit(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def parts(kind=Images, steps=3):
    torch.manual_seed(0)
    model = kind()
    data = torch.utils.data.TensorDataset(torch.randn(4 * steps, 3, 8, 8), torch.randint(0, 4, (4 * steps,)))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.utils.data.DataLoader(data, 4)


def run(made, loop=fit, **options):
    """Train with "auto", and return the results of the step."""
    decorated = nano(channels_last="auto", verbose=False, **options)(loop)
    decorated(*made)
    return [result for result in decorated.report.results if result.name == "channels_last"]


@pytest.fixture
def takes(monkeypatch):
    """Call the copies; then ``takes(seconds)`` fakes the time of NHWC, with one second for NCHW."""
    timed = LayoutTrial._times

    def of(seconds):
        monkeypatch.setattr(LayoutTrial, "_times", lambda trial: timed(trial) and {True: seconds, False: 1.0})

    return of


@pytest.mark.parametrize("precision", ["32", "bf16", "bf16-products", "16", "64", "bf16-true"])
@pytest.mark.parametrize("seconds", [0.5, 2])
def test_model_goes_on_in_the_faster_layout(takes, precision, seconds):
    takes(seconds)
    made = parts()
    applied, measured = run(made, precision=precision)
    assert made[0].seen == [precision in ("bf16", "bf16-true"), *[seconds < 1] * 2]
    assert (applied.status, measured.status) == ("applied", "measured")


@pytest.mark.parametrize(("share", "is_unsure"), [(0.9, True), (0.1, False), (None, False)])
def test_measurement_beside_other_programs_is_marked(takes, monkeypatch, share, is_unsure):
    takes(2)
    monkeypatch.setattr(layout_trial, "Waits", lambda: SimpleNamespace(share=lambda: share))
    detail = run(parts())[1].detail
    assert detail.startswith("NCHW: 2.00 s per step in NHWC, 1.00 s in NCHW")
    assert detail.endswith("; unsure: threads waited 90% of that time for other programs") == is_unsure


def test_first_step_draws_and_keeps_what_the_plain_one_does(takes):
    """The copies have been called by then, with dropout and batch norm."""

    def after_a_step(train):
        model, optimizer, loader = parts(steps=1)
        train(model, optimizer, loader)
        return model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()

    takes(2)
    accelerated = nano(channels_last="auto", fused_optimizer=False, verbose=False)(fit)
    torch.testing.assert_close(after_a_step(accelerated), after_a_step(fit), rtol=0, atol=0)


class SharedHead(Images):
    """Its copies share the head."""

    def __deepcopy__(self, memo):
        duplicate = Images()
        duplicate.head = self.head
        return duplicate


OUTSIDE = nn.Conv2d(3, 3, 1)


class Scaled(Images):
    """Calls a module that belongs to neither the model nor the optimizer."""

    def forward(self, x):
        return super().forward(OUTSIDE(x))


AUTO = {"channels_last": "auto"}


@pytest.mark.filterwarnings("ignore:verify:nano_loop.NanoWarning")  # the module outside is not converted to fp64
@pytest.mark.parametrize(
    ("kind", "reached", "options"),
    [
        (SharedHead, lambda model: model.head, AUTO),
        *((Scaled, lambda model: OUTSIDE, options) for options in (AUTO, {"verify": True})),
    ],
)
def test_gradients_that_copies_reach_in_modules_of_the_loop_stay(takes, kind, reached, options):
    takes(2)
    made, gradients = parts(kind, steps=1), []

    def loop(model, optimizer, loader):
        weight = reached(model).weight
        weight.grad = None
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            gradients.append(weight.grad.clone())
            optimizer.step()
            gradients.append(weight.grad.clone())

    decorated = nano(verbose=False, **options)(loop)
    decorated(*made)
    assert options is not AUTO or any(result.detail.startswith("NCHW: ") for result in decorated.report.results)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


BATCHES, MEANS = 0, {"first": []}


def count(x):
    global BATCHES
    BATCHES += 1
    MEANS["first"].append(float(x.mean()))
    return BATCHES


class Counting(Images):
    """Writes to global variables by a function, which its outputs depend on."""

    def forward(self, x):
        return super().forward(x) * count(x)


def counting_in_a_closure():
    counts = {"batches": 0}

    class Counting(Images):
        def forward(self, x):
            counts["batches"] += 1
            return super().forward(x) * counts["batches"]

    return Counting, counts


@pytest.mark.parametrize("options", [AUTO, {"verify": True}], ids=str)
def test_variables_that_the_models_code_changes_are_those_of_the_loops_calls(takes, monkeypatch, options):
    monkeypatch.setitem(globals(), "BATCHES", 0)
    monkeypatch.setitem(MEANS, "first", [])
    takes(2)
    in_closure, counts = counting_in_a_closure()
    for kind in (Counting, in_closure):
        made = parts(kind)
        nano(verbose=False, **options)(fit)(*made)
    assert (BATCHES, len(MEANS["first"]), counts) == (3, 3, {"batches": 3})


class NotCopied(Images):
    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied")


class Hooked(Images):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.conv.register_forward_hook(lambda *_: self.calls.append(1))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (NotCopied, {}, "not to be copied"),
        (Hooked, {}, "hooks"),
        (Images, {"tune_operators": False}, "tune_operators is off"),
    ],
)
def test_guess_stays_where_nothing_can_be_timed(kind, options, words):
    made = parts(kind)
    measured = run(made, precision="bf16", **options)[1]
    assert made[0].seen == [True] * 3
    assert measured.detail.startswith("NHWC, not timed: ")
    assert words in measured.detail
    assert len(getattr(made[0], "calls", made[0].seen)) == 3


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_that_come_after_the_setup_are_called_as_often_as_in_the_plain_loop(of_all):
    made, calls = parts(Images, steps=2), []

    def loop(model, optimizer, loader):
        register = register_module_forward_hook if of_all else model.conv.register_forward_hook
        handle = register(lambda module, *_: calls.append(module is model.conv))
        fit(model, optimizer, loader)
        handle.remove()

    measured = run(made, loop, precision="bf16")[1]
    assert measured.detail.startswith("NHWC, not timed: the model has hooks")
    assert calls.count(True) == 2


def test_guess_stays_without_a_backward():
    def evaluate(model, optimizer, loader):
        with torch.no_grad():
            for x, _ in loader:
                model(x)

    assert "no step has followed a backward" in run(parts(), evaluate)[1].detail


@pytest.mark.parametrize("options", [{"compile": True}, {}])
def test_deterministic_algorithms_and_compiled_models_are_not_timed(step, deterministic, options):
    if not options:
        deterministic()
    trial = LayoutTrial(Images(), step(ChannelsLast, channels_last="auto", **options).options, None)
    assert trial.recorded is None


def test_mode_that_the_loop_switches_on_leaves_the_guess(takes, deterministic):
    takes(0.5)

    def loop(model, optimizer, loader):
        deterministic()
        fit(model, optimizer, loader)

    made = parts(steps=4)
    measured = run(made, loop)[1]
    assert made[0].seen == [False] * 4
    assert measured.detail == "NCHW, not timed: torch.use_deterministic_algorithms is on"


@pytest.mark.usefixtures("nothing_left")
def test_all_ranks_go_on_in_the_layout_that_rank_0_has_found_faster(takes, tmp_path):
    def loop(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        layouts = torch.tensor([float(each) for each in model.seen])
        return nano_loop.all_reduce(layouts, reduce_op="sum").tolist()

    takes(0.5)
    decorated = nano(channels_last="auto", num_processes=2, verbose=False)(loop)
    assert decorated(*parts(steps=10)) == [0.0, 0.0, 2.0, 2.0, 2.0]
