"""Before training, every rank gets rank 0's values, in its own objects."""

import pickle

import pytest
import torch
import torch.fx
from distributed.data_parallel.averaged import make_step
from torch import nn

from nano_loop.distributed.data_parallel.initial_sync import named_parameters
from nano_loop.errors import NanoError
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.broadcast import Broadcast


def parts(seed, optimizer_of=lambda each: torch.optim.Adam(each)):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
    model[1].running_mean.normal_()
    return TrainingObjects([model], [optimizer_of(model.parameters())])


def stepped(given):
    given.models[0](torch.rand(2, 3, 4, 4)).square().sum().backward()
    given.optimizers[0].step()
    given.optimizers[0].zero_grad()
    return given


def test_parameters_and_buffers_become_rank_0s_in_place(team):
    def loop(ranks):
        given = parts(ranks.rank)
        model = given.models[0]
        model[0].to(memory_format=torch.channels_last)
        model.register_buffer("expanded", torch.tensor(ranks.rank).expand(3))
        model.register_buffer("narrow", torch.full((2,), ranks.rank, dtype=torch.bfloat16), persistent=False)
        model.register_buffer("sparse", torch.full((2,), ranks.rank + 1.0).to_sparse())
        tensors = [*model.parameters(), *model.buffers()]
        strides = model[0].weight.stride()
        step, _ = make_step(Broadcast, ranks)
        assert step.enabled
        assert step.skip_reason(given) is None
        free = torch.full((2,), float(ranks.rank), requires_grad=True)
        step.apply(TrainingObjects(given.models, [*given.optimizers, torch.optim.SGD([free], lr=0.1)]))
        with torch.no_grad():
            model[0].bias.fill_(ranks.rank)
        step.apply(given)  # broadcast only once
        assert float(model[0].bias[0]) == ranks.rank
        assert free.tolist() == [0.0, 0.0]
        assert [id(each) for each in tensors] == [id(each) for each in (*model.parameters(), *model.buffers())]
        assert model[0].weight.stride() == strides
        assert model.expanded.stride() == (0,)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: each.detach().to_dense() for name, each in named.items()}

    first, second = team(2)(loop)
    expected = parts(0).models[0]
    for name in first.keys() - {"0.bias"}:
        assert first[name].equal(second[name])
    assert first["0.weight"].equal(expected[0].weight)
    assert first["1.running_mean"].equal(expected[1].running_mean)
    assert second["narrow"].tolist() == [0.0, 0.0]
    assert second["sparse"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loaded", [(0,), (1,), (0, 1)])
def test_optimizer_state_becomes_rank_0s(team, loaded):
    def loop(ranks):
        given = parts(0)
        if ranks.rank in loaded:
            torch.manual_seed(ranks.rank)
            stepped(given)
        optimizer = given.optimizers[0]

        def states():
            return [optimizer.state[each] for each in given.models[0].parameters() if each in optimizer.state]

        make_step(Broadcast, ranks)[0].apply(given)
        places = [id(value) for state in states() for value in state.values()]
        make_step(Broadcast, ranks)[0].apply(given)  # equal states are not sent
        assert places == [id(value) for state in states() for value in state.values()]
        return states()

    first, second = team(2)(loop)
    assert len(first) == len(second) == (4 if 0 in loaded else 0)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize(
    "value", [[torch.ones(2), 3], {"a": torch.ones(2, dtype=torch.complex64).conj()}, None, 5, "x"]
)
def test_state_of_any_kind_travels_if_it_differs(team, value):
    def loop(ranks):
        given = parts(0, lambda each: torch.optim.SGD(each, lr=0.1))
        weight = given.models[0][0].weight
        given.optimizers[0].state[weight]["mine"] = value if ranks.rank == 0 else [torch.zeros(2), 3]
        make_step(Broadcast, ranks)[0].apply(given)
        return given.optimizers[0].state[weight]["mine"]

    first, second = team(2)(loop)
    assert str(first) == str(second) == str(value)


def with_another(change):
    """Make a rank's objects, with a change of the model on rank 1, and without the optimizer."""

    def build(rank):
        model = parts(0).models[0]
        if rank == 1:
            change(model)
        return TrainingObjects([model])

    return build


def with_another_group(rank):
    given = parts(0)
    if rank == 1:
        given.optimizers[0].add_param_group({"params": []})
    return given


DIFFERENT = {
    "shape": (
        with_another(lambda model: model.register_buffer("new", torch.ones(2))),
        r"Sequential.new, torch.float32 of shape \(2,\)",
    ),
    "dtype": (
        with_another(lambda model: model[1].double()),
        r"Sequential.1.weight, torch.float64 .* rank 0 .* torch.float32",
    ),
    "name": (
        with_another(lambda model: setattr(model[0], "bias", None)),
        r"rank 1 has Sequential.1.weight.*where rank 0 has Sequential.0.bias",
    ),
    "groups": (with_another_group, r"rank 1 has Adam with 2 parameter groups where rank 0 has Adam with 1"),
    "lazy": (lambda rank: TrainingObjects([nn.LazyLinear(2)]), r"LazyLinear.weight has no shape yet"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_whose_objects_differ_are_told_so(team, what):
    build, message = DIFFERENT[what]

    def loop(ranks):
        with pytest.raises(NanoError, match=message):
            make_step(Broadcast, ranks)[0].apply(build(ranks.rank))
        return True

    assert team(2)(loop) == [True, True]


def test_traced_model_is_the_same_after_it_has_travelled():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 1)))
    travelled = pickle.loads(pickle.dumps(model))
    assert type(travelled).__name__ != type(model).__name__  # the premise of this test
    here, there = ([name for name, _ in named_parameters([each], [])] for each in (model, travelled))
    assert here == there
