"""A run affects nothing that was not set up, and leaves everything as it was before."""

import contextlib
import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from loops.pairs import has_ipex
from torch import nn

from nano_loop import NanoConfigError, NanoWarning, TorchNano, nano

BF16 = {"precision": "bf16", "channels_last": True}


def run(loop, model, **options):
    """Run a loop over a model and its optimizer; return its result and the report."""
    accelerated = nano(verbose=False, **options)(loop)
    value = accelerated(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return value, accelerated.report


class Teacher(nn.Module):
    """Uses everything that a run may replace: dropout, attention, and several kinds of convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 1)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        x = self.second(self.dropout(self.first(x).relu()))
        tokens = x.flatten(2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*(tokens.unflatten(2, (2, 32)).transpose(1, 2),) * 3)
        attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        x = (tokens + attended + mixed.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(x.shape)
        return self.up(x).mean((2, 3))


def step_of(teacher, own_autocast):
    """Run one forward and backward of a model that is not set up; return its output and all its gradients."""
    teacher.zero_grad()
    images = torch.randn(8, 3, 16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=own_autocast):
        out = teacher(images)
    out.float().square().sum().backward()
    return [out.detach(), images.grad, *(parameter.grad.clone() for parameter in teacher.parameters())]


def distil(student, optimizer, teacher):
    """Train a student, and train the teacher between its steps."""
    seen = []
    for own_autocast in (False, True, False, True):
        seen.append(step_of(teacher, own_autocast))
        optimizer.zero_grad()
        student(torch.randn(8, 3, 16, 16)).sum().backward()
        optimizer.step()
    seen.append(torch.rand(3))
    return seen


def student_and_teacher():
    torch.manual_seed(0)
    student, teacher = Teacher(), Teacher()
    return student, torch.optim.SGD(student.parameters(), lr=1e-3), teacher


class Distillation(TorchNano):
    """Sets up the student but not the teacher."""

    def train(self, student, optimizer, teacher):
        self.setup(student, optimizer)
        return distil(student, optimizer, teacher)


def test_teacher_computes_what_it_computes_without_a_run():
    """Forward and backward, bit for bit, with and without the user's autocast, with the plain loop's random draws."""
    plain = distil(*student_and_teacher())
    accelerated = Distillation(**BF16, verbose=False).train(*student_and_teacher())
    for step, (actual, expected) in enumerate(zip(accelerated, plain, strict=True)):
        for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(one, other), f"step {step}, tensor {place} differs by {(one - other).abs().max()}"


def test_training_of_another_thread_computes_what_it_computes_without_a_run():
    """The other thread trains while this thread is inside a call into its set-up model."""

    class Calling(Teacher):
        def forward(self, x):
            if turn is not None:
                turn.set()
                assert done.wait(60)
            return super().forward(x)

    def other():
        if turn is not None:  # from here on only this thread draws
            assert turn.wait(60)
        generator_state = torch.Generator().manual_seed(5).get_state()
        torch.manual_seed(1)
        model = Teacher()
        torch.set_rng_state(generator_state)
        result.append(step_of(model, own_autocast=True))
        done.set()

    turn, done, result = None, threading.Event(), []
    other()
    turn, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)

    def train(model, optimizer):
        thread.start()
        model(torch.randn(8, 3, 16, 16)).sum().backward()

    run(train, Calling(), **BF16)
    thread.join()
    assert all(torch.equal(one, other) for one, other in zip(*result, strict=True))


def test_view_that_raises_in_the_plain_loop_raises_during_a_run():
    def train(model, optimizer):
        model(torch.rand(2, 3, 4, 4))
        matrix = torch.zeros(3, 4)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            matrix.t().view(-1)[:2] = 1
        image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            image.view(-1)[:2] = 1

    class Net(nn.Conv2d):
        def forward(self, x):
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                torch.zeros(3, 4).t().view(-1)  # a matrix, inside the model

    run(train, Net(3, 8, 1), channels_last=True)


def overlapping(first_ends_first, models):
    """Execute two runs in two threads, so that the second begins during the first, and they end in either order."""
    begun, ended, errors = (threading.Event(), threading.Event()), (threading.Event(), threading.Event()), []

    @nano(**BF16, verbose=False)
    def train(model, optimizer, number):
        model(torch.randn(4, 3, 16, 16)).sum().backward()
        begun[number].set()
        assert begun[1].wait(60)
        last = 1 if first_ends_first else 0
        if number == last:
            assert ended[1 - last].wait(60)
        model(torch.randn(4, 3, 16, 16)).sum().backward()
        optimizer.step()

    def run_one(number):
        try:
            if number:
                assert begun[0].wait(60)
            train(models[number], torch.optim.SGD(models[number].parameters(), lr=0.1), number)
        except BaseException as error:
            errors.append(error)
        finally:
            begun[number].set()
            ended[number].set()

    threads = [threading.Thread(target=run_one, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors


@pytest.mark.parametrize(
    ("first_ends_first", "shared"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*ways, marks=pytest.mark.slow) for ways in ((True, False), (False, True))),
    ],
)
def test_runs_of_two_threads_end_in_any_order(first_ends_first, shared):
    """Nothing is left: a model that one of them had set up computes in fp32 afterwards, with torch's own kernels."""
    torch.manual_seed(0)
    one = Teacher()
    models = [one, one if shared else Teacher()]
    overlapping(first_ends_first, models)
    torch.manual_seed(7)
    after = step_of(one, own_autocast=False)
    torch.manual_seed(7)
    plain = step_of(copy.deepcopy(one), own_autocast=False)
    assert all(map(torch.equal, after, plain))


# In a process that has imported IPEX, its passes change how scripted models compute, and it warns about them.
without_ipex = pytest.mark.skipif(has_ipex(), reason="IPEX's passes over TorchScript stay in force once it is imported")


class Small(nn.Module):
    """A model that can be scripted."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.dropout(self.conv(x).relu()).mean((2, 3)))


def fit(model, optimizer):
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@without_ipex
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_scripted_model_trains_as_the_module_it_was_made_of(precision):
    def trained(model):
        torch.manual_seed(1)
        return run(fit, model, precision=precision, fused_optimizer=False)[0]

    torch.manual_seed(0)
    model = Small()
    scripted = torch.jit.script(copy.deepcopy(model))
    assert trained(scripted) == pytest.approx(trained(model), rel=1e-6)


@without_ipex
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_a_step_cannot_do_for_a_scripted_model_is_an_error():
    with pytest.raises(NanoConfigError, match=r"(?s)channels_last=True.* scripted.*compile=True.* scripted"):
        run(fit, torch.jit.script(Small()), channels_last=True, compile=True)


@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_function_compiled_before_the_run_is_reported_and_one_compiled_inside_is_not(is_compiled_before):
    def compiled(model):
        return torch.compile(lambda x: model(x), backend="eager")

    @nano(precision="bf16", verbose=False)
    def train(model, optimizer):
        called = call if is_compiled_before else compiled(model)
        for _ in range(2):
            called(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    torch.compiler.reset()
    model = nn.Linear(4, 2)
    if is_compiled_before:
        call = compiled(model)
        call(torch.ones(3, 4))
    told = pytest.warns(NanoWarning, match=r"^Linear is trained in fp32.*Compile it inside the run")
    with told if is_compiled_before else contextlib.nullcontext():
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert train.report["precision"].status == ("skipped" if is_compiled_before else "applied")
    torch.compiler.reset()


def by_functions(weights, optimizer):
    for _ in range(2):
        F.linear(torch.ones(3, 4), *weights).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.ParameterList, nn.ParameterDict])
@pytest.mark.parametrize("is_alone", [True, False])
def test_weights_without_a_call_are_trained_by_functions_without_a_warning(kind, is_alone):
    """A list cannot be called: it holds an image that is optimized, or the weights of a model in functions."""

    @nano(precision="bf16", verbose=False)
    def train(model, optimizer):
        by_functions([*model.parameters()], optimizer)

    weight = nn.Parameter(torch.ones(2, 4))
    model = nn.ModuleList([kind({"weight": weight} if kind is nn.ParameterDict else [weight])])
    model = model[0] if is_alone else model
    with warnings.catch_warnings():
        warnings.simplefilter("error", NanoWarning)
        train(model, torch.optim.SGD([weight], lr=0.1))
    assert train.report["precision"].status == "applied"
    assert weight.tolist() != torch.ones(2, 4).tolist()


def test_weights_of_a_model_that_functions_use_are_reported_as_such():
    @nano(precision="bf16", verbose=False)
    def train(model, optimizer):
        by_functions([model.weight, model.bias], optimizer)

    model = nn.Linear(4, 2)
    with pytest.warns(NanoWarning, match=r"^Linear is trained in fp32.*weights are used outside of its calls"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert train.report["precision"].status == "skipped"


def test_models_own_bf16_buffer_comes_back_as_it_is():
    class Net(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("kept", torch.zeros(3, dtype=torch.bfloat16))

        def state(self):
            return self.kept, self.kept[:2]

    def train(model, optimizer):
        whole, part = model.state()
        assert whole is model.kept
        part += 1
        return model(torch.ones(1, 2)).dtype

    model = Net()
    assert run(train, model, precision="bf16")[0] is torch.float32
    assert model.kept.tolist() == [1, 1, 0]
