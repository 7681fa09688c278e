"""Ranks that average gradients train as one process does on the batches of all ranks."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding, mse_loss
from torch.utils.checkpoint import checkpoint

from distributed.data_parallel.averaged import Setup, assert_close, assert_pair, trained
from distributed.data_parallel.test_checksums import DTYPES
from nano_loop.errors import NanoError, NanoWarning


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count=4, size=12, shape=(6,), out=(3,)):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(size, *shape, generator=generator), torch.randn(size, *out, generator=generator)


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


def ready(setup, model=None, **kwargs):
    """Return a model (`net` by default) and its optimizer after setup."""
    model = net() if model is None else model
    optimizer = sgd(model, **kwargs)
    setup.setup(model, optimizer)
    return model, optimizer


def fit(setup, model, optimizer, call=None, given=None):
    """Run a plain training loop, and return the weights."""
    for x, y in given or batches():
        optimizer.zero_grad()
        mse_loss((call or model)(setup.share(x)), setup.share(y)).backward()
        optimizer.step()
    return model


# --- one step of a loop over one model, between `zero_grad` and `step` ---


class Step:
    """The arguments of a case: the objects after setup, this rank's part of the batch, and the whole batch."""

    def __init__(self, setup, model, optimizer, batch, number):
        self.setup, self.model, self.optimizer, self.batch, self.number = setup, model, optimizer, batch, number
        self.x, self.y = map(setup.share, batch)
        self.rank, self.size = setup.rank, setup.ranks.size

    def backward(self, call=None):
        mse_loss((call or self.model)(self.x), self.y).backward()


def a_submodule_and_a_function_of_weights(step):
    first, _, last = step.model
    if step.number % 2:
        step.backward(lambda x: last(first(x)))
    else:
        step.backward(lambda x: torch.tanh(x @ first.weight.t()) @ last.weight.t())


def paused_alone(step):
    with step.setup.paused(step.model):
        step.backward()


def paused_after_another(step):
    step.backward()
    paused_alone(step)


def paused_before_another_that_reaches_less(step):
    paused_alone(step)
    step.backward(lambda x: step.model[2](x.new_ones(len(x), 8)))


def by_hand(step):
    loss = mse_loss(step.model(step.x), step.y)
    gradients = torch.autograd.grad(loss, [*step.model.parameters()])
    for parameter, gradient in zip(step.model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def put_in_the_place_of_means(step):
    step.backward()
    by_hand(step)


def nothing_on_a_rank(step):
    if step.rank == 0:  # one process does all the work
        x, y = step.batch
        (mse_loss(step.model(x), y) * step.size).backward()


def in_another_thread(step):
    thread = threading.Thread(target=mse_loss(step.model(step.x), step.y).backward)
    thread.start()
    thread.join()


def evaluation_on_rank_0(step):
    if step.rank == 0 and step.number:
        x = step.batch[0]
        with torch.no_grad():
            step.model(x)
        copy.deepcopy(step.model)(x).sum().backward()
        torch.autograd.grad(step.model(x).sum(), [*step.model.parameters()])
    step.backward()


def written_after_zero_grad_of_a_later_step(step):
    step.backward()
    if step.number == 2:
        step.model.zero_grad()
        by_hand(step)


ROWS = (
    *(a_submodule_and_a_function_of_weights, paused_after_another, paused_before_another_that_reaches_less),
    *(put_in_the_place_of_means, nothing_on_a_rank, in_another_thread, evaluation_on_rank_0),
    written_after_zero_grad_of_a_later_step,
)


def assert_steps(team, step, make=net, given=None, **kwargs):
    """Assert that a loop of such steps, and its last step's result, match between ranks and one process."""

    def loop(setup):
        model, optimizer = ready(setup, make(), **kwargs)
        for number, batch in enumerate(given or batches()):
            optimizer.zero_grad()
            last = step(Step(setup, model, optimizer, batch, number))
            optimizer.step()
        return model, last

    assert_pair(team, loop)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_ranks_do_what_one_process_does(team, row):
    assert_steps(team(2), row)


PAIRS = []


def pair(loop):
    """Mark a loop that must match between ranks and one process."""
    PAIRS.append(loop)
    return loop


# --- optimizers and uses of gradients ---


def test_only_what_arrived_since_is_averaged_and_a_paused_model_may_take_steps_of_its_own(team):
    def loop(setup):
        model, optimizer = ready(setup)
        with setup.paused(model):
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
        assert not setup.transport.counts
        model(torch.ones(1, 6)).sum().backward()
        model[2](torch.ones(1, 8)).sum().backward()
        return setup.transport.counts

    assert team(2)(trained, loop) == [[4, 2]] * 2


def test_one_of_two_models_can_be_paused(team):
    def loop(setup):
        one, other = nn.Linear(6, 6), net()
        for each in (one, other):
            setup.setup(each, sgd(each))
        x = torch.full((1, 6), float(setup.rank))
        with setup.paused(one):
            other(one(x)).sum().backward()
        during = one.weight.grad.clone(), other[0].weight.grad.clone()
        other(one(x)).sum().backward()
        return *during, one.weight.grad, other[0].weight.grad

    first, second = team(2)(trained, loop)
    assert [one.equal(other) for one, other in zip(first, second, strict=True)] == [False, True, True, True]


@pair
def gradients_set_by_hand_are_averaged_by_the_step_of_an_optimizer_that_was_not_set_up(setup):
    model = net()
    optimizer = sgd(model)
    setup.setup(model)
    for number, batch in enumerate(batches()):
        by_hand(Step(setup, model, optimizer, batch, number))
        optimizer.step()
    return model


def test_gradients_that_are_replaced_alike_are_averaged_once(team):
    def loop(setup):
        model, optimizer = ready(setup)
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            Step(setup, model, optimizer, batch, number).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clamp(-0.1, 0.1)
            optimizer.step()
        return setup.transport.counts

    assert team(2)(trained, loop) == [[4] * 4] * 2


@pytest.mark.parametrize("order", ["set up, then hooks", "hooks, then set up", "never set up"])
def test_optimizers_that_step_inside_the_backward_take_averaged_gradients(team, order):
    def loop(setup):
        model = net()
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
        if order != "hooks, then set up":
            setup.setup(model, *(optimizers.values() if order != "never set up" else ()))

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [each.register_post_accumulate_grad_hook(step) for each in model.parameters()]
        if order == "hooks, then set up":
            setup.setup(model, *optimizers.values())
        for x, y in batches():
            mse_loss(model(setup.share(x)), setup.share(y)).backward()
        for handle in handles:
            handle.remove()
        return model

    assert_pair(team(2), loop)


@pair
def parameter_that_only_an_optimizer_holds_is_averaged(setup):
    model, scale = net(), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    setup.setup(model, optimizer)
    fit(setup, model, optimizer, lambda x: model(x) * scale)
    return model, scale


# --- which parameters are used, and on which ranks ---


def test_parameter_that_one_rank_alone_used_counts_on_all(team):
    def step(step):
        parts = zip(*(each.chunk(2) for each in step.batch), strict=True)  # one half for each of two layers
        for number, (x, y) in enumerate(parts):
            if step.size == 1 or number == step.rank:
                (mse_loss(step.model[number](x), y) / (2 / step.size)).backward()
        return step.model[2].weight.grad is None

    layers = lambda: nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])  # noqa: E731
    assert_steps(team(2), step, layers, [*batches(size=4)], momentum=0.9)


def test_parameter_that_no_rank_used_keeps_the_gradient_it_has(team):
    def loop(setup):
        model, _ = ready(setup, nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        held = model[1].weight.grad = torch.full((2, 2), float(setup.rank))
        model[0](torch.ones(1, 2)).sum().backward()
        return model[1].weight.grad is held, held, model[1].bias.grad

    for rank, (same, gradient, other) in enumerate(team(2)(trained, loop)):
        assert same
        assert gradient.equal(torch.full((2, 2), float(rank)))
        assert other is None


@pair
def frozen_parameters_stay_without_gradients_until_they_are_thawed(setup):
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    setup.setup(model, optimizer)
    asks = [each.requires_grad for each in model.parameters()]
    fit(setup, model, optimizer)
    assert asks == [False, False, True, True]
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    return fit(setup, model, optimizer)


@pair
def shared_parameter_is_averaged_once(setup):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    fit(setup, *ready(setup, model))
    return model, setup.transport.counts if setup.ranks.size > 1 else [5] * 4


# --- kinds of graphs and of gradients ---


# A gradient with a graph holds its parameter; torch warns about this cycle.
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_second_derivative_of_averaged_gradients_is_that_of_the_mean(team):
    def loop(setup):
        model, optimizer = ready(setup)
        for x, y in batches():
            optimizer.zero_grad()
            mse_loss(model(setup.share(x)), setup.share(y)).backward(create_graph=True)
            first = [each.grad for each in model.parameters()]
            assert all(each.grad_fn is not None for each in first[:2])
            optimizer.zero_grad()
            sum(each.square().sum() for each in first).backward()
            optimizer.step()
        optimizer.zero_grad()
        return model

    assert_pair(team(2), loop)


def test_graph_of_a_gradient_outlives_the_averaging(team):
    def loop(setup):
        model, kept = net(), []
        setup.setup(model, sgd(model))
        model[0].weight.register_post_accumulate_grad_hook(lambda each: kept.append(each.grad.square().sum()))
        model(torch.ones(1, 6)).square().sum().backward(create_graph=True)
        torch.autograd.grad(kept[0], model[0].weight)  # raises if the gradient was changed in place
        model.zero_grad()
        return len(kept)

    assert team(2)(trained, loop) == [1, 1]


class Words(nn.Module):
    """Two sparse embeddings; only rank 1 uses the second, and a caller can ask for dense use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(20, 4, sparse=True)
        self.second = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 2)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sparse_gradients_stay_sparse(team, size):
    def step(step):
        words = step.setup.share((torch.arange(12) * 7 + step.number) % 20)
        for _ in range(2):  # accumulate gradients
            step.model.out(step.model.first(words)).square().mean().backward()
        gradient = step.model.first.weight.grad
        assert gradient.is_sparse
        return gradient, step.model.second.weight.grad is None

    assert_steps(team(size), step, Words)


@pair
def sparse_gradient_of_one_rank_reaches_ranks_without_and_becomes_dense_where_one_is(setup):
    model, optimizer = ready(setup, Words())
    words, is_last = torch.arange(6), setup.rank == setup.ranks.size - 1
    if is_last:
        (model.out(model.second(torch.tensor([3, 5, 3]))).sum() * setup.ranks.size).backward()
    else:
        (model.out(torch.zeros(1, 4)).sum() * 0).backward()
    share = model.first(words) if setup.ranks.size == 1 else None
    if share is None:
        share = embedding(setup.share(words), model.first.weight, sparse=setup.rank == 0)
    (model.out(share).sum() * setup.ranks.size).backward()
    optimizer.step()
    return model, model.second.weight.grad.is_sparse, model.first.weight.grad.to_dense()


LAYOUTS = {
    "channels_last": lambda: nn.Parameter(torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    "transposed": lambda: nn.Parameter(torch.rand(3, 4).t()),
    "with gaps": lambda: nn.Parameter(torch.rand(4, 6)[:, ::2]),
    "0-d": lambda: nn.Parameter(torch.rand(())),
    "empty": lambda: nn.Parameter(torch.rand(0, 3)),
    "complex": lambda: nn.Parameter(torch.rand(3, 2, dtype=torch.complex64)),
    "complex, transposed": lambda: nn.Parameter(torch.rand(3, 2, dtype=torch.complex128).t()),
    "double": lambda: nn.Parameter(torch.rand(3, dtype=torch.float64)),
    "bf16": lambda: nn.Parameter(torch.rand(8).bfloat16()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_keep_their_layout(team, layout):
    def loop(setup):
        model = nn.ParameterList([LAYOUTS[layout](), LAYOUTS[layout]()])
        setup.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = (model[0] * (setup.rank + 1)).abs().sum()
        if setup.rank == 0:
            loss = loss + (model[1] * 2).abs().sum()
        loss.backward()
        return [(each.grad, f"{each.grad.stride()}, {each.grad.dtype}") for each in model]

    first, second = team(2)(trained, loop)
    made = LAYOUTS[layout]()
    made.abs().sum().backward()
    for (one, one_is), (other, other_is) in zip(first, second, strict=True):
        assert one.equal(other)
        assert one_is == other_is == f"{made.grad.stride()}, {made.dtype}"
    one, other = first[0][0], first[1][0]
    torch.testing.assert_close(one.abs(), torch.full_like(one, 1.5).abs())
    torch.testing.assert_close(other.abs(), torch.full_like(other, 1).abs())


def values(scale):
    return torch.arange(6.0).view(2, 3) * scale


ASSIGNED = {
    "as torch does": values,
    "transposed": lambda scale: values(scale).t().contiguous().t(),
    "with gaps": lambda scale: values(scale).repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda scale: values(scale)[:, :1].expand(2, 3),
    "negative view": lambda scale: (values(scale) * -1j).conj().imag,
}


@pytest.mark.parametrize("first", ASSIGNED)
@pytest.mark.parametrize("second", ASSIGNED)
def test_gradients_of_any_layout_meet(team, first, second):
    def loop(setup):
        model, optimizer = ready(setup, nn.ParameterList([nn.Parameter(torch.zeros(2, 3))]))
        model[0].grad = given = ASSIGNED[(first, second)[setup.rank]](setup.rank + 1.0)
        stride = given.stride()
        optimizer.step()
        kept = model[0].grad is given and model[0].grad.stride() == stride
        return model[0], model[0].grad, kept

    mean = (ASSIGNED[first](1.0) + ASSIGNED[second](2.0)) / 2
    for rank, (weight, gradient, kept) in enumerate(team(2)(trained, loop)):
        assert gradient.equal(mean)
        torch.testing.assert_close(weight, mean * -0.1)
        assert kept == ((first, second)[rank] != "expanded")


def test_conjugated_gradient_is_averaged_as_what_it_stands_for(team):
    def loop(setup):
        model, optimizer = ready(setup, nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))
        gradient = torch.full((2,), 1 + 1j * (setup.rank + 1), dtype=torch.complex64)
        model[0].grad = gradient.conj() if setup.rank else gradient
        optimizer.step()
        return model[0].grad.resolve_conj()

    for gradient in team(2)(trained, loop):
        assert gradient.equal(torch.full((2,), 1 - 0.5j))


class Segments(nn.Module):
    """Layers with activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x, order):
        for number in order:
            x = checkpoint(lambda x, layer: layer(x).tanh(), x, self.layers[number], use_reentrant=self.reentrant)
        return x


def different_segments(step):
    for rank, part in enumerate(step.batch[0].chunk(2)):
        if step.size == 1 or step.rank == rank:
            out = step.model(part.requires_grad_(), ((0, 1, 0), (2, 0, 1))[rank])
            (out.square().mean() * step.size / 2).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_may_use_different_checkpointed_segments(team, reentrant):
    assert_steps(team(2), different_segments, lambda: Segments(reentrant))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(team, backend):
    def loop(setup):
        torch.compiler.reset()
        model = net()
        compiled = torch.compile(model, backend=backend)
        optimizer = sgd(model)
        setup.setup(compiled, optimizer)
        fit(setup, compiled, optimizer)
        torch.compiler.reset()
        return model

    assert_pair(team(2), loop)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch 2.8's own warning, from LBFGS
@pytest.mark.parametrize(("line_search", "is_set_up"), [(None, True), ("strong_wolfe", True), ("strong_wolfe", False)])
def test_lbfgs_searches_alike_on_every_rank(team, line_search, is_set_up):
    def loop(setup):
        model = net().double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn=line_search, max_iter=4)
        setup.setup(model, *[optimizer] * is_set_up)
        losses = []
        for x, y in batches(2):
            x, y = setup.share(x.double()), setup.share(y.double())

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure).detach()))
        return model, losses

    assert_pair(team(2), loop)


def test_closure_may_return_a_number_or_nothing(team):
    def loop(setup):
        _, optimizer = ready(setup)
        return [
            optimizer.step(closure=lambda: setup.rank * 2.0),
            optimizer.step(lambda: torch.tensor([float(setup.rank)])),
            optimizer.step(lambda: None),
        ]

    for number, tensor, nothing in team(2)(trained, loop):
        assert (number, tensor.tolist(), nothing) == (1.0, [0.5], None)


# --- additions by the loop ---


@pair
def layer_added_in_the_loop_begins_equal_and_is_averaged(setup):
    model, optimizer = ready(setup)
    fit(setup, model, optimizer)
    torch.manual_seed(setup.rank)
    model.append(nn.Linear(3, 3))
    model.append(nn.utils.spectral_norm(nn.Linear(3, 3)).eval())  # its buffers are random
    optimizer.add_param_group({"params": [*model[3].parameters(), *model[4].parameters()]})
    if setup.rank == 0:
        with torch.no_grad():
            model(torch.ones(1, 6))
    setup.ranks.barrier()
    return fit(setup, model, optimizer)


def test_buffers_of_every_dtype_that_are_added_in_the_loop_begin_equal(team):
    def loop(setup):
        model, optimizer = ready(setup)
        model.append(nn.Identity())
        for number, dtype in enumerate(DTYPES):
            buffer = torch.empty(4, dtype=dtype)
            buffer.view(torch.uint8).fill_(setup.rank)
            model[-1].register_buffer(f"buffer{number}", buffer)
        fit(setup, model, optimizer)
        return [bool(buffer.view(torch.uint8).any()) for buffer in model[-1].buffers()]

    assert team(2)(trained, loop) == [[False] * len(DTYPES)] * 2


@pair
def parameter_added_in_the_loop_begins_equal_and_is_averaged(setup):
    model, optimizer = ready(setup)
    torch.manual_seed(setup.rank)
    model[0].bias = nn.Parameter(torch.randn(8))
    free = torch.randn(3, requires_grad=True)
    optimizer.add_param_group({"params": [model[0].bias, free]})
    return fit(setup, model, optimizer, lambda x: model(x) + free), free


def test_layer_that_a_model_adds_in_its_forward_ends_equal(team):
    def loop(setup):
        model, _ = ready(setup)

        class Adds(nn.Module):
            def forward(self, x):
                if not hasattr(self, "late"):
                    torch.manual_seed(setup.rank)
                    self.late = nn.Linear(3, 3)
                return self.late(x)

        model.append(Adds())
        model(torch.ones(2, 6) * setup.rank).sum().backward()
        return model, [each.grad for each in model.parameters()]

    first, second = team(2)(trained, loop)
    assert_close(second, first, 0)


def test_ranks_that_add_different_layers_are_told(team):
    def loop(setup):
        model, _ = ready(setup)
        model.append(nn.Linear(3, 2 + setup.rank))
        with pytest.raises(NanoError, match=r"rank 1 has Sequential.3.weight.*\(3, 3\).*where rank 0 has.*\(2, 3\)"):
            model(torch.ones(1, 6))
        return True

    assert team(2)(trained, loop) == [True, True]


@pytest.mark.parametrize("swap", ["tensors", "loaded"])
def test_swapped_parameters_are_averaged(team, swap):
    def loop(setup):
        model, optimizer = ready(setup)
        fit(setup, model, optimizer)
        if swap == "tensors":
            torch.utils.swap_tensors(model[0].weight, nn.Parameter(0.5 * model[0].weight.detach()))
        else:
            torch.__future__.set_swap_module_params_on_conversion(True)
            model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
            model.double().float()  # converts the gradients, too
            torch.__future__.set_swap_module_params_on_conversion(False)
        fit(setup, model, optimizer)
        gradients = [each.grad.clone() for each in model.parameters()]
        setup.setup(model, optimizer)  # set up a second time
        return fit(setup, model, optimizer), gradients

    assert_pair(team(2), loop)


def test_removed_parameters_are_let_go(team):
    def loop(setup):
        model = net()
        setup.setup(model, sgd(net()))
        old = model[2].weight
        model[2] = nn.Linear(8, 3)
        model(torch.ones(1, 6)).sum().backward()
        return old._post_accumulate_grad_hooks is None, len(model[2].weight._post_accumulate_grad_hooks)

    assert team(2)(trained, loop) == [[True, 1]] * 2


@pytest.mark.parametrize("loop", PAIRS, ids=lambda loop: loop.__name__)
def test_ranks_end_as_one_process_does(team, loop):
    assert_pair(team(2), loop)


# --- ranks that diverge ---


def second_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.01


def added_layer(model, optimizer):
    model.append(nn.Linear(2, 2))


def removed_layer(model, optimizer):
    model[1] = nn.Identity()
    del optimizer.param_groups[0]["params"][2:]


def other_shape(model, optimizer):
    model[1].weight.data = torch.zeros(2, 3)


def other_dtype(model, optimizer):
    model[1].weight.data = torch.zeros(2, 2, dtype=torch.float64)


def one_step_more(model, optimizer):
    optimizer.step(lambda: None)


DIVERGING = {
    one_step_more: "different numbers of steps: rank 0 has 1, rank 1 has 2",
    second_rate: r"learning rates differ at step 1: rank 0 has \[0.1\], rank 1 has \[0.01",
    added_layer: "parameters differ at step 1: rank 0 has 4, rank 1 has 6",
    removed_layer: "parameters differ at step 1: rank 0 has 4, rank 1 has 2",
    other_shape: "shapes or dtypes of parameters differ at step 1",
    other_dtype: "shapes or dtypes of parameters differ at step 1",
}


@pytest.mark.parametrize("change", DIVERGING, ids=lambda change: change.__name__)
def test_what_rank_1_alone_changes_raises_on_every_rank(team, change):
    def loop(setup):
        model, optimizer = ready(setup, nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if setup.rank == 1:
            change(model, optimizer)
        with pytest.raises(NanoError, match=DIVERGING[change]):
            model[0](torch.ones(1, 2)).sum().backward()
        return True

    assert team(2)(trained, loop) == [True, True]


def test_learning_rates_of_nan_are_equal_and_groups_may_have_none(team):
    def loop(setup):
        model, optimizer = ready(setup)
        optimizer.param_groups[0]["lr"] = float("nan")
        model(torch.ones(1, 6)).sum().backward()
        del optimizer.param_groups[0]["lr"]
        model(torch.ones(1, 6)).sum().backward()
        return len(setup.transport.counts)

    assert team(2)(trained, loop) == [2, 2]


# --- tensors that calls change ---


def test_rows_that_an_embedding_renorms_by_its_batch_are_named_at_the_first_averaging(team):
    def loop(setup):
        model = nn.Sequential(nn.EmbeddingBag(40, 8, max_norm=0.5), nn.Linear(8, 4))
        setup.setup(model)
        with pytest.raises(NanoError, match=r"Sequential\.0\.weight is not the same .* an embedding's max_norm"):
            model(setup.share(torch.arange(40).view(10, 4))).sum().backward()
        return True

    assert team(2)(trained, loop) == [True, True]


def test_parameter_that_all_ranks_clamp_alike_is_trained(team):
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
            return super().forward(x)

    assert_steps(team(2), Step.backward, lambda: Clamped(6, 3))


class Counting(nn.Module):
    def __init__(self, name="codes", persistent=True):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.name = name
        self.register_buffer(name, torch.zeros(3), persistent=persistent)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        y = self.norm(self.linear(x))
        if not self.name.startswith("constant"):
            getattr(self, self.name).lerp_(y.detach().square().mean(0) * x.abs().max(), 0.5)
        return y


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, "Counting.codes"), ({"name": "constant"}, None), ({"persistent": False}, None)],
    ids=str,
)
def test_buffer_that_parts_is_named_once_on_rank_0(team, settings, named):
    def counted(setup):
        return nano_warnings(fit, setup, *ready(setup, Counting(**settings)))

    first, second = team(2)(trained, counted)
    assert second == []
    assert [named in each and "nano_loop.all_reduce(value)" in each for each in first] == [True] * (named is not None)


# --- messages and cleanup ---


def nano_warnings(function, *args):
    """Return the messages of the warnings that a call issues."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(each.message) for each in caught if issubclass(each.category, NanoWarning)]


def test_training_of_what_was_not_set_up_is_warned_of_once_a_run_and_of_what_was_is_not(team):
    def loop(setup):
        model = net()
        setup.setup(model)
        other = copy.deepcopy(model)

        def train(trained_model):
            fit(setup, trained_model, sgd(trained_model), given=batches(count=2))
            fit(setup, trained_model, torch.optim.Adam(trained_model.parameters()), given=batches(count=2))

        return [nano_warnings(train, each) for each in (model, other)]

    (nothing, (warned,)), silent = team(2)(trained, loop)
    assert "SGD steps parameters that were not set up" in warned
    assert [nothing, *silent] == [[], [], []]


def test_nothing_is_left_behind(team):
    def loop(ranks):
        plain, setup = torch.autograd.backward, Setup(ranks)
        torch.manual_seed(0)
        model = net()
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        handle = model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        setup.setup(model, optimizer)
        model(torch.ones(1, 6)).sum().backward()
        setup.close()
        hooks = [each._post_accumulate_grad_hooks for each in model.parameters()]
        assert [hook and len(hook) for hook in hooks] == [None, None, 1, None]
        assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]
        assert all(not vars(each) for each in model.parameters())
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not nn.modules.module._global_parameter_registration_hooks
        assert not nn.modules.module._global_module_registration_hooks
        handle.remove()
        return torch.autograd.backward is plain

    assert team(2)(loop) == [True, True]


def test_copies_made_in_the_loop_are_plain(team):
    def loop(setup):
        model, _ = ready(setup)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        if setup.rank == 0:  # no rank may wait for another one
            for each in copies:
                each(torch.ones(1, 6)).sum().backward()
        return [parameter._post_accumulate_grad_hooks for each in copies for parameter in each.parameters()]

    assert team(2)(trained, loop) == [[None] * 8] * 2
