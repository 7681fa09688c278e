"""Models that train only partly: frozen, unfrozen, unused or adapted layers, or no training at all."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from nano_loop.config.declarations import EXACT as VALUES

from .pairs import BF16, EXACT, SHIPPED, WITH_IPEX, Config, named, pair, untouched
from .tasks import ADAM, Net, entropy, fit, job, steps, train, vectors


class WithUnused(Net):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(6, 3)

    def forward(self, x):
        out = super().forward(x)
        return out + self.sometimes(x) if len(x) < 8 else out


@pair(job("sgd", model=WithUnused), job("adam", model=WithUnused, optimizer=ADAM))
def test_parameters_that_are_not_used(model, optimizer, loader, by_hand=untouched):
    losses = fit(model, optimizer, loader, by_hand)
    assert model.never.weight.grad is None
    return losses


class LowRank(nn.Module):
    """Frozen layers, each with a low-rank adapter, as PEFT adds them to language models."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(*sizes) for sizes in ((6, 16), (16, 16), (16, 3))).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(layer.in_features, 2, bias=False) for layer in self.base)
        self.up = nn.ModuleList(nn.Linear(2, layer.out_features, bias=False) for layer in self.base)
        self.recomputes = False

    def forward(self, x):
        for place in range(3):
            x = checkpoint(self.layer, x, place, use_reentrant=False) if self.recomputes else self.layer(x, place)
        return x

    def layer(self, x, place):
        x = self.base[place](x) + self.up[place](self.down[place](x))
        return torch.tanh(x) if place < 2 else x


def add_deltas(model, sign):
    """Merge the adapters into the layers, as PEFT does, or unmerge them."""
    for layer, down, up in zip(model.base, model.down, model.up, strict=True):
        layer.weight.data += sign * (up.weight.detach() @ down.weight.detach())


def merged_and_unmerged(model, optimizer):
    add_deltas(model, 1)
    yield
    add_deltas(model, -1)


def clamped_by_data(model, optimizer):
    for layer in model.base:
        layer.weight.data.clamp_(-0.1, 0.1)
    yield


def written_by_an_array_that_is_kept(model, optimizer):
    arrays = [layer.weight.numpy() for layer in model.base]
    yield
    for array in arrays:
        array *= 0.5


def set_to_other_memory(model, optimizer):
    for layer in model.base:
        layer.weight.data = 0.5 * layer.weight.data
    yield


def thawed_and_frozen(model, optimizer):
    weight = model.base[1].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})
    yield
    weight.requires_grad_(False).grad = None


def recomputed(model, optimizer):
    model.recomputes = True
    yield
    model.recomputes = False


def state_loaded_in_another_place(model, optimizer):
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    yield


def written_in_place_and_by_a_view_of_before(model, optimizer):
    view = model.base[0].weight.data[3]
    with torch.no_grad():
        model.base[0].weight.mul_(1.01)
        model.base[1].weight[3:5].zero_()
    yield
    view.fill_(0.3)


def replaced(model, optimizer):
    model.base[1].weight = nn.Parameter(model.base[1].weight * 2, requires_grad=False)
    yield


#: Keeps only the bf16 values of frozen weights, which are exactly representable in bf16.
ROUNDED_ONCE = Config("frozen-bf16", VALUES | {"frozen_dtype": "bf16"})


def adapted(change):
    def build():
        model = LowRank()
        for layer in model.base:
            layer.weight.data = layer.weight.data.bfloat16().float()
        trained = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.01), "loader": vectors(), "change": change}

    return named(change.__name__, build, LowRank)


@pair(
    *map(
        adapted,
        (
            *(merged_and_unmerged, clamped_by_data, written_by_an_array_that_is_kept, set_to_other_memory),
            *(thawed_and_frozen, recomputed, state_loaded_in_another_place),
            *(written_in_place_and_by_a_view_of_before, replaced),
        ),
    ),
    configs=(BF16, SHIPPED, ROUNDED_ONCE),
)
def test_frozen_weights_that_change_between_steps(model, optimizer, loader, change, by_hand=untouched):
    """And between forward and backward, and between the forwards of one step."""
    losses = fit(model, optimizer, loader, by_hand, epochs=1)
    changing = change(model, optimizer)
    next(changing)
    losses += fit(model, optimizer, loader, by_hand, epochs=1)
    next(changing, None)
    loss_of = entropy(by_hand(model))
    for x, y in steps(loader, optimizer):
        first = loss_of(x, y)
        model.base[1].weight.data.mul_(0.9)
        second = loss_of(x, y)
        first.backward()
        second.backward()
        losses += [first.item(), second.item()]
    return losses


@pair(lambda: {"model": Net().requires_grad_(False).eval(), "loader": vectors(shuffle=False)})
def test_a_model_with_nothing_to_train(model, loader, by_hand=untouched):
    with torch.inference_mode():
        scores = torch.cat([by_hand(model)(x) for x, _ in loader])
    assert scores.is_inference()
    return scores.clone().sum(), [by_hand(model)(x) for x, _ in loader]


def a_frozen_teacher():
    teacher = Net().requires_grad_(False).eval()
    return {**job(optimizer=ADAM)(), "teacher": teacher, "criterion": nn.KLDivLoss(reduction="batchmean")}


@pair(a_frozen_teacher)
def test_a_student_and_its_teacher(model, optimizer, loader, teacher, criterion, by_hand=untouched):
    """With a loss among the arguments, which is not a model."""

    def loss(x, y):
        with torch.no_grad():
            target = by_hand(teacher)(x).softmax(1)
        out = by_hand(model)(x)
        return cross_entropy(out, y) + criterion(out.log_softmax(1), target)

    losses = train(loss, loader, optimizer)
    assert type(criterion) is nn.KLDivLoss
    return losses


@pair(job(optimizer=ADAM), configs=[EXACT, *WITH_IPEX])
def test_requires_grad_of_the_inputs_is_left_alone(model, optimizer, loader, by_hand=untouched):
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0].requires_grad))
    fit(model, optimizer, loader, by_hand, epochs=1)
    return seen
