"""The ambient mode sets up what a program trains where it trains, and results equal those without it."""

import gc
import io
import threading
import weakref

import pytest
import torch
from entries import EXPLICIT
from lightning_fabric import Fabric
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from watched import Net, is_fused

import nano_loop
from nano_loop import NanoConfigError, NanoWarning, accelerated, nano
from nano_loop.patching.operators import gives_kernels

# Always the same, whatever other tests drew: with other numbers, one weight in 3,000 programs ends so close to 0 that
# `allclose` finds its rounding.
X, Y = torch.randn(12, 5, generator=torch.Generator().manual_seed(1)).split([3, 2], 1)
EXACT = {"verbose": False, "exact": True}


@pytest.fixture
def install():
    """Call `nano_loop.install` without a printed report; the installation ends with the test."""
    yield lambda **options: nano_loop.install(**{"verbose": False, **options})
    nano_loop.uninstall()


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fit(model, optimizer, calls=3):
    for _ in range(calls):
        step(optimizer, nn.functional.mse_loss(model(X), Y))
    return model


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), 0.1, **settings)


# --- programs that create everything themselves and return the trained models ---


def estimator():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
    optimizer = adam(net)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(X, Y), 4, shuffle=True):  # a new loader in each epoch
            step(optimizer, nn.functional.mse_loss(net(x), y))
    return [net]


def adversaries():
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizers = adam(first), adam(second)
    for _ in range(3):
        step(optimizers[1], second(first(X).detach()).mean())
        step(optimizers[0], -second(first(X)).mean())
    return [first, second]


def in_parts():
    encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1, momentum=0.9)
    for _ in range(3):
        step(optimizer, nn.functional.mse_loss(decoder(encoder(X)), Y))
    return [encoder, decoder]


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return nn.functional.mse_loss(self.model(x), y)


def in_a_loss():
    net = nn.Linear(3, 2)
    optimizer, loss = adam(net), Loss(net)
    for _ in range(3):
        step(optimizer, loss(X, Y))
    return [net]


def an_optimizer_for_each_parameter():
    net = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in net.parameters()]
    for _ in range(3):
        nn.functional.mse_loss(net(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [net]


def without_a_module():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([weight], 0.1)
    for _ in range(3):
        step(optimizer, (X @ weight).square().mean())
    return [nn.ParameterList([weight])]


def by_closures():
    net = nn.Linear(3, 2)
    for kind in (torch.optim.LBFGS, torch.optim.SGD):
        optimizer = kind(net.parameters(), 0.1)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(X), Y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    return [net]


def loaded():
    stream = io.BytesIO()
    net = nn.Linear(3, 2)
    torch.save((net, adam(net)), stream)
    stream.seek(0)
    return [fit(*torch.load(stream, weights_only=False))]


def frozen_teacher():
    teacher, student = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = adam(student)
    for _ in range(3):
        step(optimizer, nn.functional.mse_loss(student(X), teacher(X).detach()))
    return [student, teacher]


def with_parameters_put_in_for_a_call():
    net = nn.Linear(3, 2)
    optimizer = adam(net)
    for _ in range(3):
        fast = {name: parameter - 0.1 for name, parameter in net.named_parameters()}
        step(optimizer, nn.functional.mse_loss(torch.func.functional_call(net, fast, X), Y))
    return [net]


def unfrozen_later():
    body, head = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for unfreezes in (False, True, False):
        if unfreezes:
            optimizer.add_param_group({"params": [*body.parameters()]})
        step(optimizer, nn.functional.mse_loss(nn.Sequential(body, head)(X), Y))
    return [body, head]


def trained_by_hand(change):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for _ in range(5):
        nn.functional.mse_loss(net(X), Y).backward()
        for parameter in net.parameters():
            change(parameter)
            parameter.grad = None
    return [net]


def by_data():  # as fastai's optimizers do
    return trained_by_hand(lambda parameter: parameter.data.sub_(parameter.grad, alpha=0.1))


def by_lists():  # as Keras' optimizers do
    @torch.no_grad()
    def change(parameter):
        torch._foreach_add_([parameter], [parameter.grad], alpha=-0.1)

    return trained_by_hand(change)


PROGRAMS = {
    estimator: ["Sequential, trained by Adam"],
    adversaries: ["Linear, trained by Adam"],
    in_parts: ["Linear, trained by SGD"],
    in_a_loss: ["Loss, trained by Adam"],
    an_optimizer_for_each_parameter: ["Linear, trained by SGD"],
    without_a_module: ["Adam does not train a module that is called"],
    by_closures: ["Linear, trained by LBFGS", "Linear, trained by SGD"],
    loaded: ["Linear, trained by Adam"],
    frozen_teacher: ["Linear, trained by Adam"],
    with_parameters_put_in_for_a_call: ["Linear, trained by Adam"],
    unfrozen_later: ["Sequential, trained by SGD"],
    by_data: ["Sequential, trained by an optimizer that is not a torch optimizer"],
    by_lists: ["Sequential, trained by an optimizer that is not a torch optimizer"],
}


def trained(program):
    torch.manual_seed(0)
    return [tensor.detach().clone() for model in program() for tensor in model.parameters()]


def models_in(report):
    return [result.detail for result in report.results if result.name == "model"]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # from LBFGS of torch 2.8
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_without_a_line_trains_the_same_weights(program, install):
    plain = trained(program)
    install(**EXACT)
    assert all(map(torch.equal, trained(program), plain))
    assert models_in(nano_loop.report()) == PROGRAMS[program]
    assert "allocator" in nano_loop.report().applied
    nano_loop.uninstall()
    with accelerated(**EXACT) as run:
        assert all(map(torch.equal, trained(program), plain))
    assert models_in(run.report) == PROGRAMS[program]


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_first_call_of_a_training_is_covered_and_predictions_are_plain(install, precision):
    install(precision=precision)
    net = Net()
    optimizer = adam(net)
    step(optimizer, nn.functional.mse_loss(net(X), Y))
    with torch.no_grad():
        between = net(X)
    assert is_fused(optimizer)
    assert net.seen == [torch.bfloat16 if precision == "bf16" else torch.float32, torch.float32]
    assert torch.equal(between, nn.functional.linear(X, net.layer.weight, net.layer.bias))
    net.eval()
    assert net(X).dtype is torch.float32
    assert net.seen[-1] is torch.float32
    fit(net.train(), optimizer, 1)
    assert net.seen[-1] is (torch.bfloat16 if precision == "bf16" else torch.float32)
    nano_loop.uninstall()
    assert not is_fused(optimizer)
    net(X)
    assert net.seen[-1] is torch.float32


def lazy():
    net = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.LazyConv2d(4, 1), nn.Flatten(), nn.LazyLinear(2))
    optimizer = adam(net)
    fit(net, optimizer)
    return [net], optimizer


def lazy_in_part():
    body, head, unused = nn.Linear(3, 4), nn.LazyLinear(2), nn.LazyLinear(2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *unused.parameters()], 0.1, momentum=0.9)
    for _ in range(3):
        step(optimizer, nn.functional.mse_loss(head(body(X)), Y))
    return [body, head], optimizer


@pytest.mark.filterwarnings("ignore:channels_last=True:nano_loop.NanoWarning")  # the second model has no images
@pytest.mark.parametrize("program", [lazy, lazy_in_part])
def test_model_is_set_up_once_its_parameters_have_shapes(program, install):
    torch.manual_seed(0)
    plain, _ = program()
    install(precision="auto", channels_last=True)
    torch.manual_seed(0)
    models, optimizer = program()
    for one, other in zip(models, plain, strict=True):
        assert all(map(torch.allclose, one.parameters(), other.parameters()))
    assert is_fused(optimizer)
    assert {line.split(",")[0] for line in models_in(nano_loop.report())} == {type(model).__name__ for model in models}


def test_what_is_older_than_the_mode_is_set_up_at_its_first_steps(install):
    net = Net()
    optimizer = adam(net)
    fit(net, optimizer, 1)
    install(precision="bf16")
    fit(net, optimizer, 3)
    assert net.seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert is_fused(optimizer)


def test_loaders_that_are_made_anew_add_no_lines(install, capsys):
    install(verbose=True)
    estimator()
    first = capsys.readouterr().err
    assert "fast_fetch" in nano_loop.report().applied
    assert first.count("Sequential, trained by Adam") == first.count("fast_fetch") == 1
    for _ in range(3):
        estimator()
    assert capsys.readouterr().err == ""


def test_set_up_lasts_as_long_as_the_model_and_its_optimizer(install):
    install()
    references = []
    for _ in range(5):
        net = nn.Linear(3, 2)
        optimizer = adam(net)
        fit(net, optimizer)
        references += [weakref.ref(net), weakref.ref(optimizer)]
    del net, optimizer
    gc.collect()
    assert not any(reference() for reference in references)
    assert torch.nn.Module.__call__.__name__  # still replaced, without any model set up
    assert not nano_loop.patching.ownership.call_state.interceptors


def test_new_optimizer_of_a_model_is_set_up_with_it(install):
    install(precision="bf16")
    net = Net()
    fit(net, adam(net), 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    fit(net, optimizer, 1)
    assert is_fused(optimizer)
    assert set(net.seen) == {torch.bfloat16}


class Head(nn.Linear):
    """A module without submodules, whose parent would be visible."""


def test_calls_are_not_looked_at_while_nothing_is_new(install):
    before = nn.Module.__call__
    install(precision="bf16")
    encoder, decoder = Net(), nn.Linear(2, 2)
    optimizer = adam(encoder)
    fit(encoder, optimizer, 100)  # intercepted, because its calls run in bf16
    shared = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
    fit(encoder, shared, 100)
    decoder(torch.ones(1, 2)).sum().backward()
    assert models_in(nano_loop.report())[-1] == "Linear, trained by SGD"
    install()
    small = nn.Linear(3, 2)
    fit(small, adam(small), 100)
    assert nn.Module.__call__ is before
    late = Head(3, 2)
    shared = torch.optim.SGD([*small.parameters(), *late.parameters()], 0.1)
    fit(small, shared, 100)
    fit(late, shared, 1)  # no gradient has reached its parameters before
    assert models_in(nano_loop.report())[-1] == "Head, trained by SGD"
    net = Net()
    optimizer = adam(net)
    fit(net, optimizer, 1)
    assert is_fused(optimizer)
    fit(net, optimizer, 100)
    assert nn.Module.__call__ is before
    del shared
    whole = nn.Sequential(small, nn.Linear(2, 2))
    optimizer.add_param_group({"params": [*whole[1].parameters()]})
    step(optimizer, whole(X).square().mean())
    assert "Sequential, trained by Adam" in models_in(nano_loop.report())
    fit(whole, optimizer, 3)
    assert nn.Module.__call__ is before
    head = Head(3, 2)
    optimizer.add_param_group({"params": [*head.parameters()]})
    optimizer.load_state_dict(optimizer.state_dict())
    fit(head, optimizer, 1)
    assert models_in(nano_loop.report())[-1] == "Head, trained by Adam"
    fit(head, optimizer, 3)
    assert nn.Module.__call__ is before


def test_process_that_makes_no_optimizer_has_nothing_else_replaced(install):
    before = nn.Module.__call__, DataLoader.__iter__
    install()
    assert [*map(len, DataLoader(TensorDataset(X), 6))] == [1, 1]
    assert (nn.Module.__call__, DataLoader.__iter__) == before
    assert nano_loop.report() is None


def test_models_of_threads_are_set_up(install):
    install(precision="bf16")
    nets = [Net() for _ in range(3)]

    def work(net):
        fit(net, adam(net), 3)

    threads = [threading.Thread(target=work, args=[net]) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(net.seen) for net in nets] == [{torch.bfloat16}] * 3
    del nets, threads
    gc.collect()


@pytest.mark.parametrize(
    "register",
    [
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
        register_module_module_registration_hook,
    ],
)
def test_training_begins_and_ends_while_torch_calls_hooks(install, register):
    install(precision="auto")
    net, inner = nn.Linear(3, 2), []
    optimizer = adam(net)

    def train(*_):  # as another thread might
        if not inner:
            inner.append(None)
            other = nn.Sequential(nn.Linear(3, 1 << 14), nn.Linear(1 << 14, 2))
            fit(other, adam(other))
            del other
            gc.collect()

    handles = [register(train), register(lambda *_: None)]
    try:
        fit(net, optimizer)
        nn.Sequential(nn.Linear(3, 2))
    finally:
        for handle in handles:
            handle.remove()
    assert {*models_in(nano_loop.report())} == {"Linear, trained by Adam", "Sequential, trained by Adam"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:JIT pass will be deprecated")  # from IPEX
@pytest.mark.parametrize("is_set_up", [False, True])
def test_models_are_traced_scripted_and_exported_as_they_are(install, is_set_up):
    install(precision="bf16")
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    optimizer = adam(net)
    if is_set_up:
        fit(net, optimizer, 1)
    plain = nn.functional.linear(X, net[0].weight, net[0].bias).relu()
    mapped = torch.vmap(lambda x: torch.func.functional_call(net, dict(net.named_parameters()), x))(X)
    torch.testing.assert_close(mapped, plain, rtol=0.02, atol=0.02)
    exported = torch.jit.trace(net, X), torch.jit.script(net), torch.export.export(net, (X,)).module()
    for made in (*exported, torch.fx.symbolic_trace(net)):
        with torch.no_grad():
            assert torch.equal(made(X), plain)
    fit(net, optimizer, 1)
    assert models_in(nano_loop.report()) == ["Sequential, trained by Adam"]


# --- explicit use, and models trained by others ---


@EXPLICIT
def test_explicit_runs_have_their_own_options(install, entry):
    install(precision="bf16")
    net = Net()
    entry(fit, verbose=False)(net, adam(net))
    assert set(net.seen) == {torch.float32}
    assert nano_loop.report() is None


class DistributedDataParallel(Loss):
    """Replaces torch's class, which needs a process group."""

    def forward(self, x):
        return self.model(x)


def compiled_by_the_program(net):
    fit(torch.compile(net, backend="eager"), adam(net))
    torch.compiler.reset()


def by_fabric(net):
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, adam(net))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(X), Y))
        optimizer.step()


def by_several_processes(net):
    fit(DistributedDataParallel(net), adam(net))


@pytest.mark.usefixtures("rank_put_back")
@pytest.mark.parametrize(
    ("train", "code"),
    [(compiled_by_the_program, "compiled"), (by_fabric, "fabric"), (by_several_processes, "distributed")],
)
def test_model_that_others_accelerate_is_left_alone(install, train, code):
    install(precision="bf16")
    net = Net()
    train(net)
    assert set(net.seen) == {torch.float32}
    assert nano_loop.report()["model"].code == code


def test_under_torchrun_nothing_is_installed(install, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    install()
    assert "torchrun has started 2 processes" in capsys.readouterr().err
    net = Net()
    fit(net, optimizer := adam(net))
    assert not is_fused(optimizer)


# --- options ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 2}, "install runs in one process"),
        ({"num_processes": "auto", "split_batches": True}, "install runs in one process"),
        ({"precision": "bf16-true"}, "keep their parameters"),
    ],
)
def test_options_that_need_more_than_a_process_or_a_block_are_errors(options, words):
    with pytest.raises(NanoConfigError, match=words):
        nano_loop.install(**options)
    assert nano_loop.uninstall() is None


def test_second_install_replaces_the_options(install):
    net = Net()
    optimizer = adam(net)
    for precision in (32, "bf16"):
        install(precision=precision)
        fit(net, optimizer)
    assert net.seen[:4] == [torch.float32] * 4
    assert net.seen[-1] is torch.bfloat16


@pytest.mark.parametrize("option", ["channels_last", *(["fast_norm", "fast_rnn"] if gives_kernels() else [])])
def test_option_that_has_applied_to_nothing_is_a_warning_by_the_line_of_the_block(option):
    net = Net()
    net.embedding = nn.Embedding(2, 2)
    with pytest.warns(NanoWarning, match=f"{option}=True") as caught, accelerated(verbose=False, **{option: True}):
        fit(net, adam(net))
    assert [warning.filename for warning in caught] == [__file__]


def test_option_that_cannot_be_applied_is_an_error_where_it_is_met(install):
    install(fused_optimizer=True)
    net = Net()
    with pytest.raises(NanoConfigError, match="fused_optimizer=True"):
        fit(net, torch.optim.ASGD(net.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_model_that_autocast_does_not_cast_is_skipped_beside_others(install, dtype):
    install(precision="bf16")
    net, exact = Net(), nn.Linear(3, 2, dtype=dtype)
    optimizer = adam(exact)
    for _ in range(3):
        step(optimizer, exact(X.to(dtype)).abs().sum())
    assert nano_loop.report()["precision"].code == "not_cast"
    fit(net, adam(net))
    assert net.seen[-1] is torch.bfloat16


# --- `accelerated` with objects of its body ---


def predict(net):
    net(X)


def attack(net):
    for _ in range(12):  # gradients alone are no training
        nn.Linear(2, 2)(net(X)).sum().backward()


@pytest.mark.parametrize("body", [predict, attack])
def test_block_that_trains_nothing_warns_by_its_line(body):
    net = Net()
    with pytest.warns(NanoWarning, match="has set nothing up") as caught, accelerated(precision="bf16", verbose=False):
        body(net)
    assert [warning.filename for warning in caught] == [__file__]
    assert set(net.seen) == {torch.float32}


def test_block_with_a_model_sets_up_its_optimizers_and_loaders():
    net, other = Net(), Net()
    with accelerated(net, precision="bf16", verbose=False) as run:
        optimizer = adam(net)
        for x, y in DataLoader(TensorDataset(X, Y), 4):
            step(optimizer, nn.functional.mse_loss(net(x), y))
        assert is_fused(optimizer)
        fit(other, adam(other), 1)
    assert {"fused_optimizer", "fast_fetch"} <= {*run.report.applied}
    assert other.seen == [torch.float32]
    assert models_in(run.report) == []


def test_parameters_may_be_converted_in_a_block():
    with accelerated(precision="bf16-true", verbose=False):
        net = fit(net := Net(), adam(net))
        assert net.layer.weight.dtype is torch.bfloat16
    assert net.layer.weight.dtype is torch.float32
    assert set(net.seen) == {torch.bfloat16}


def test_optimizer_in_an_attribute_of_a_module_is_set_up_by_the_decorator():
    net = Net()
    net.optimizer = adam(net)
    train = nano(verbose=False)(lambda net: fit(net, net.optimizer))
    train(net)
    assert train.report["fused_optimizer"].detail == "Adam"
    assert not is_fused(net.optimizer)
