"""Fused steps equal torch's loop up to rounding; the program sees its own hooks, flags, versions and memory."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from watched import FusedCalls

from nano_loop import accelerated
from nano_loop.optimizers.direct_steps import stepped_directly
from nano_loop.patching.patch_table import left_by_runs

KINDS = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD with momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (Adam, {"lr": 0.01, "eps": 1e-4}),
    "Adam with amsgrad": (Adam, {"lr": 0.01, "eps": 1e-4, "amsgrad": True}),
    "AdamW": (AdamW, {"lr": 0.01, "eps": 1e-4, "maximize": True}),
    "Adagrad": (Adagrad, {"lr": 0.01, "eps": 1e-4}),
}
OF_EACH_KIND = pytest.mark.parametrize("name", KINDS)
SIZE, WIDE = 6, 11


class Loop:
    """A model with a square weight and another one, its optimizer, and a wide tensor whose slices have gaps."""

    def __init__(self, name, **settings):
        torch.manual_seed(0)
        kind, own = KINDS[name]
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 3))
        self.optimizer = kind(self.model.parameters(), **{**own, **settings})
        self.wide = torch.randn(SIZE, WIDE)
        self.x = torch.randn(5, SIZE)
        self.kept = []

    @property
    def weight(self):
        return self.model[0].weight

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        return loss

    def values(self):
        states = [self.optimizer.state[each] for each in self.model.parameters()]
        tensors = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
        return [*self.model.parameters(), *tensors, self.wide, *self.kept]


def directly(loop):
    loop.backward()
    return loop.optimizer.step()


def by_closure(loop):
    return loop.optimizer.step(loop.backward)


def pair(name, train, settings=None, **made):
    """Return the results and errors of a plain and an accelerated loop."""
    found = []
    for settings_of_run in (None, settings or {}):
        loop = Loop(name, **made)
        run = contextlib.nullcontext()
        if settings_of_run is not None:
            run = accelerated(loop.model, loop.optimizer, verbose=False, **settings_of_run)
        error, seen = None, None
        with run:
            try:
                seen = train(loop)
            except Exception as raised:  # torch's errors are compared, too
                error = type(raised), str(raised)
        found.append((loop.values(), error, seen))
    assert left_by_runs() == {}
    return found


def assert_alike(plain, ours):
    assert ours[1:] == plain[1:]
    for one, other in zip(ours[0], plain[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def without_state(loop):
    loop.optimizer.state.pop(loop.weight, None)
    loop.weight.grad = None


def data_with_gaps(loop):
    without_state(loop)
    loop.weight.data = loop.wide[:, :SIZE]


def parameter_with_gaps(loop):
    loop.optimizer.state.pop(loop.weight, None)
    loop.model[0].weight = nn.Parameter(loop.wide[:, :SIZE])
    loop.optimizer.param_groups[0]["params"] = [*loop.model.parameters()]


def expanded_data(loop):
    loop.weight.data = loop.weight.data[:1].clone().expand(SIZE, SIZE)


def narrow_data(loop):
    """The states are unchanged, so torch raises."""
    loop.weight.grad = None
    loop.weight.data = loop.weight.data[: SIZE - 1].contiguous()
    loop.model[0].bias.grad = None
    loop.model[0].bias.data = loop.model[0].bias.data[: SIZE - 1].clone()
    loop.model[2].weight.grad = None
    loop.model[2].weight.data = loop.model[2].weight.data[:, : SIZE - 1].contiguous()


def states_with_gaps(loop):
    state = loop.optimizer.state[loop.weight]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            loop.kept.append(torch.randn(SIZE, WIDE))
            state[key] = loop.kept[-1][:, :SIZE].copy_(value)


def states_in_another_order(loop):
    saved = copy.deepcopy(loop.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                state[key] = value.t().contiguous().t()
    loop.optimizer.load_state_dict(saved)


def states_in_fp64(loop):
    state = loop.optimizer.state[loop.weight]
    state.update({key: value.double() for key, value in state.items() if isinstance(value, torch.Tensor)})


def a_state_that_is_gone(loop):
    """As for a layer that is unfrozen late: its first step is among later steps of others."""
    loop.optimizer.state.pop(loop.weight, None)


def a_state_that_is_gone_under_dampening(loop):
    a_state_that_is_gone(loop)
    if isinstance(loop.optimizer, SGD):
        loop.optimizer.param_groups[0].update(dampening=0.3)


def a_differentiable_group(loop):
    if not isinstance(loop.optimizer, SGD):
        loop.optimizer.param_groups[0].update(differentiable=True)


def loop_of_torch(loop):
    loop.optimizer.param_groups[0].update(foreach=False)


def states_with_a_negative_bit(loop):
    state = loop.optimizer.state[loop.weight]
    state.update({key: torch._neg_view(-value) for key, value in state.items() if key != "step" and value is not None})


#: Not covered by `tests/loops/changes`, whose optimizers are of three kinds.
CHANGES = (
    *(data_with_gaps, parameter_with_gaps, expanded_data, narrow_data, states_with_a_negative_bit),
    *(states_with_gaps, states_in_another_order, states_in_fp64, loop_of_torch),
    *(a_state_that_is_gone, a_state_that_is_gone_under_dampening, a_differentiable_group),
)


#: Closures do not depend on the kind, so all but two kinds are slow tests.
WITH_CLOSURE = ("SGD with momentum", "AdamW")
STEPS = [
    pytest.param(name, step, id=f"{name}-{step.__name__}", marks=[pytest.mark.slow] * is_slow)
    for name in KINDS
    for step, is_slow in ((directly, False), (by_closure, name not in WITH_CLOSURE))
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("name", "step"), STEPS)
def test_what_changes_between_steps_changes_steps_as_in_the_plain_loop(name, change, step):
    def train(loop):
        for number in range(6):
            if number == 3:
                change(loop)
            step(loop)

    assert_alike(*pair(name, train))


@pytest.mark.parametrize(
    "gradient",
    [
        lambda weight: torch.ones(()).expand(weight.shape),
        lambda weight: torch.arange(float(SIZE)).expand(weight.shape),
        lambda weight: torch.rand(SIZE, SIZE).t(),
        lambda weight: torch.rand(SIZE, WIDE)[:, :SIZE],
        lambda weight: torch.complex(torch.zeros(SIZE, SIZE), torch.rand(SIZE, SIZE)).conj().imag,
        lambda weight: torch._neg_view(torch.rand(SIZE, SIZE)),
    ],
    ids=["one number", "one row", "transposed", "with gaps", "negated", "negated without gaps"],
)
@OF_EACH_KIND
def test_gradient_that_the_loop_assigns_is_read_as_it_lies_and_stays(name, gradient):
    def train(loop):
        for number in range(6):
            if number == 3:
                data_with_gaps(loop)  # gives the data the layout of one of the gradients
            assigned = gradient(loop.weight)

            def backward(number=number, assigned=assigned):
                loop.backward()
                if number > 1:
                    loop.weight.grad = assigned

            if number % 2:
                loop.optimizer.step(backward)
            else:
                backward()
                loop.optimizer.step()
            assert number < 2 or loop.weight.grad is assigned

    assert_alike(*pair(name, train))


@pytest.mark.parametrize("step", [directly, by_closure])
@OF_EACH_KIND
def test_steps_are_fused_and_again_once_the_tensors_lie_alike(name, step):
    if name == "Adagrad" and torch.__version__ < "2.9":
        pytest.skip("torch 2.8 makes the state of Adagrad in its constructor alone")
    loop = Loop(name)
    kernel = {SGD: "_fused_sgd_", Adagrad: "_fused_adagrad_", AdamW: "_fused_adamw_", Adam: "_fused_adam_"}
    with accelerated(loop.model, loop.optimizer, verbose=False), FusedCalls() as calls:
        for number in range(4):
            if number == 2:
                data_with_gaps(loop)
            if number == 3:
                loop.weight.data = loop.weight.data.contiguous()
                states = loop.optimizer.state[loop.weight]
                states.update({key: value.contiguous() for key, value in states.items() if value is not None})
            step(loop)
            assert bool(calls.names) == (number != 2)
            assert set(calls.names) <= {kernel[KINDS[name][0]]}
            calls.names.clear()


OTHER_SETTINGS = [
    *(("SGD with momentum", {"dampening": 0.3}), ("SGD with momentum", {"nesterov": True, "maximize": True})),
    *(("Adam", {"weight_decay": 0.1}), ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1})),
]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in KINDS), *OTHER_SETTINGS], ids=str)
def test_bits_are_those_of_torchs_fused_kernels_with_missing_gradients_and_changing_rates(name, settings):
    def train(loop):
        parameters = [*loop.model.parameters()]
        for number, missing in enumerate(([], [], [1], [2, 3], [0, 1, 2, 3], [])):
            loop.backward()
            for place in missing:
                parameters[place].grad = None
            loop.optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
            loop.optimizer.step()

    plain, ours = pair(name, train, fused=True, **settings)
    assert all(map(torch.equal, ours[0], plain[0]))


@pytest.mark.parametrize(
    ("kind", "settings", "name", "becomes_0"),
    [
        (Adam, {}, "exp_avg", True),
        (Adam, {"eps": 1e-20}, "exp_avg", False),  # it may matter compared with this epsilon
        (Adagrad, {}, "sum", True),
        (SGD, {"momentum": 0.9}, "momentum_buffer", True),
    ],
)
def test_moments_that_are_denormal_become_0(kind, settings, name, becomes_0):
    parameters = [torch.randn(size, requires_grad=True) for size in (3, 1 << 18)]
    optimizer = kind(parameters, lr=1e-3, fused=True, **settings)
    with stepped_directly(optimizer):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for parameter in parameters:
            parameter.grad.zero_()
            optimizer.state[parameter][name].fill_(1e-39)
        optimizer.step()
    for parameter in parameters:
        moments = optimizer.state[parameter][name]
        assert moments.count_nonzero() == (0 if becomes_0 else moments.numel())
    assert torch.full((1 << 18,), 1e-39).mul(0.5).all()  # as before


@OF_EACH_KIND
def test_hooks_run_in_torchs_order_and_may_change_the_arguments(name):
    def train(loop):
        optimizer, seen = loop.optimizer, []
        handles = [
            register_optimizer_step_pre_hook(lambda *given: seen.append(("all", len(given)))),
            register_optimizer_step_post_hook(lambda *given: seen.append(("all, after", len(given[1:])))),
            optimizer.register_step_pre_hook(lambda *given: seen.append(("one", len(given[1]), given[2]))),
            optimizer.register_step_post_hook(lambda *given: seen.append(("one, after", len(given[1]), given[2]))),
        ]
        try:
            for _ in range(2):
                loop.backward()
                optimizer.step()
            handles.append(optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7), kwargs)))
            seen.append(optimizer.step())
        finally:
            for handle in handles:
                handle.remove()
        return seen

    plain, ours = pair(name, train, fused=True)
    assert 7 in plain[2]
    assert_alike(plain, ours)


def test_profiler_sees_torchs_labels():
    loop = Loop("AdamW", fused=True)
    with accelerated(loop.model, loop.optimizer, verbose=False):
        directly(loop)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            directly(loop)
    names = {each.key for each in profile.key_averages()}
    assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("step", [directly, by_closure])
@OF_EACH_KIND
def test_versions_rise_as_in_the_plain_loop_so_that_a_stale_backward_raises(name, step, fused):
    def train(loop):
        risen = []
        for _ in range(4):
            states = [each for state in loop.optimizer.state.values() for each in state.values() if each is not None]
            tensors = [*loop.model.parameters(), *states]
            before = [each._version for each in tensors]
            step(loop)
            risen.append([each._version > version for each, version in zip(tensors, before, strict=True)])
        loss = loop.model(loop.x).square().sum()
        loss.backward(retain_graph=True)
        loop.optimizer.step()
        assert risen[1][0] == (fused is None)
        with contextlib.nullcontext() if fused else pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
        return risen

    assert_alike(*pair(name, train, fused=fused))


def flags(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks")


@pytest.mark.parametrize(
    "made",
    [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))],
    ids=["deepcopy", "copy", "pickle"],
)
@OF_EACH_KIND
def test_copies_at_any_time_have_the_flags_of_the_program_and_no_hook(name, made):
    loop = Loop(name)
    expected, copies = flags(loop.optimizer), []

    def closure():
        copies.append(made(loop.optimizer))
        return loop.backward()

    loop.optimizer.register_step_pre_hook(lambda *_: copies.append(made(loop.optimizer)))
    loop.optimizer.register_step_post_hook(lambda *_: copies.append(made(loop.optimizer)))
    with accelerated(loop.model, loop.optimizer, verbose=False):
        for _ in range(3):
            directly(loop)
            loop.optimizer.step(closure)
        loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
        copies.append(made(loop.optimizer))
        assert [{**group, "params": None} for group in loop.optimizer.state_dict()["param_groups"]] == [
            {**group, "params": None} for group in loop.optimizer.param_groups
        ]
    assert len(copies) == 16
    assert all(flags(each) == expected for each in copies)
    assert not any(getattr(each, hook) for each in copies for hook in HOOKS if made is not copy.copy)


def raise_in_closure(loop):
    def closure():
        loop.backward()
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        loop.optimizer.step(closure)


def raise_in_step(loop):
    loop.backward()
    loop.weight.grad = torch.sparse_coo_tensor([[1], [2]], [1.0], (SIZE, SIZE), check_invariants=True)
    loop.optimizer.state.pop(loop.model[0].bias, None)
    loop.optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # from torch's Adagrad
@pytest.mark.parametrize("fails", [raise_in_closure, raise_in_step])
@OF_EACH_KIND
def test_flags_are_the_programs_in_hooks_and_closures_and_after_an_error(name, fails):
    def train(loop):
        seen = []

        def note(*_):
            seen.append(flags(loop.optimizer))

        def closure():
            note()
            return loop.backward()

        loop.optimizer.register_step_pre_hook(note)
        loop.optimizer.register_step_post_hook(note)
        for _ in range(2):
            directly(loop)
            loop.optimizer.step(closure)
        try:
            fails(loop)
        except RuntimeError as error:
            seen.append(str(error))
        note()
        directly(loop)
        return seen

    assert_alike(*pair(name, train))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "AdamW")) for name in KINDS])
def test_compiled_steps_are_torchs(name):
    def train(loop):
        step = torch.compile(loop.optimizer.step, backend="eager")
        for _ in range(3):
            loop.backward()
            step()
        directly(loop)

    assert_alike(*pair(name, train))
    torch._dynamo.reset()


@OF_EACH_KIND
def test_float64_as_torchs_default_dtype_keeps_the_counters_that_torch_makes(name):
    def train(loop):
        for _ in range(3):
            directly(loop)
        states = loop.optimizer.state.values()
        return [state["step"].dtype for state in states if "step" in state]

    torch.set_default_dtype(torch.float64)
    try:
        assert_alike(*pair(name, train))
    finally:
        torch.set_default_dtype(torch.float32)
