"""How a loop steps its optimizers: several, by closure, with gradients accumulated, clipped or set by hand."""

import functools

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from .pairs import BF16, EXACT, FP64, FUSED, SHIPPED, WITH_IPEX, pair, untouched
from .tasks import ADAM, ADAMW, SGD, Net, Normed, entropy, job, train, vectors

EACH_FUSED_KIND = {"sgd": SGD, "adam": ADAM, "adamw": ADAMW, "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1)}


def two_optimizers():
    model = Net()
    encoder = torch.optim.AdamW(model.encoder.parameters(), lr=0.01)
    head = torch.optim.SGD([*model.head.parameters(), model.scale], lr=0.1, momentum=0.9)
    return {"model": model, "first": encoder, "second": head, "loader": vectors()}


@pair(two_optimizers)
def test_two_optimizers_over_one_model(model, first, second, loader, by_hand=untouched):
    optimizers = [first, second]
    return [train(entropy(by_hand(model)), loader, *each) for each in (optimizers, [second], optimizers)]


@pair(job("adamw", optimizer=ADAMW), job("norms", Normed), kernels_in_bf16=True)
def test_gradients_are_accumulated(model, optimizer, loader, by_hand=untouched):
    losses = []
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            loss = cross_entropy(by_hand(model)(x), y) / 2
            loss.backward()
            if (step + 1) % 2 == 0 or step + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            losses.append((epoch, loss.item()))
    return losses


def lbfgs():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    return {"model": model, "optimizer": optimizer, "loader": vectors(shuffle=False)}


def lbfgs_in_double():
    """In fp32, its line searches amplify the last digit to a thousandth, so other orders of summation drift apart."""
    arguments = lbfgs()
    arguments["model"].double()
    data = arguments["loader"].dataset
    data.tensors = data.tensors[0].double(), data.tensors[1]
    return arguments


def fit_by_closures(model, optimizer, loader, by_hand=untouched):
    """Return each loss that a closure has computed, and those that the steps return."""
    calls, losses = [], []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(by_hand(model)(x), y)
            loss.backward()
            calls.append(loss.item())
            return loss

        losses.append(optimizer.step(closure).item())
    return calls, losses


LBFGS_CONFIGS = EXACT, FUSED, BF16
test_lbfgs_calls_its_closure = pair(lbfgs, configs=LBFGS_CONFIGS)(fit_by_closures)
IN_DOUBLE = [config for config in (*LBFGS_CONFIGS, SHIPPED, *WITH_IPEX) if not config.autocast]
test_lbfgs_calls_its_closure_in_double = pair(lbfgs_in_double, configs=IN_DOUBLE)(fit_by_closures)
test_step_returns_what_its_closure_gives = pair(job("sgd"), job("adamw", optimizer=ADAMW))(fit_by_closures)


@pair(*(job(name, optimizer=factory) for name, factory in EACH_FUSED_KIND.items()))
def test_gradients_assigned_by_hand_in_any_layout(model, optimizer, loader, by_hand=untouched):
    """Transposed, expanded and strided gradients: fused kernels read them as if they had the parameter's layout."""
    for x, y in loader:
        gradients = torch.autograd.grad(cross_entropy(by_hand(model)(x), y), [*model.parameters()])
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient.t().contiguous().t() if gradient.dim() == 2 else gradient
        model.head.bias.grad = torch.ones(()).expand(3)
        model.encoder[1].weight.grad = torch.stack([gradients[2], gradients[2]], 1)[:, 0]
        optimizer.step()
        optimizer.zero_grad()


def odd_parameters():
    model = nn.Linear(6, 3)
    model.weight = nn.Parameter(torch.randn(6, 3).t())
    model.extra = nn.Parameter(torch.randn(2, 2, dtype=torch.float64)[:, :1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "loader": vectors()}


@pair(odd_parameters, without=[FP64])
def test_parameters_of_odd_layouts_and_dtypes(model, optimizer, loader, by_hand=untouched):
    return train(lambda x, y: cross_entropy(by_hand(model)(x), y) + model.extra.sin().sum(), loader, optimizer)


@pair(job("sgd"), job("adam", optimizer=ADAM))
def test_gradients_are_scaled_and_clipped(model, optimizer, loader, by_hand=untouched):
    """The user's own GradScaler, with a step that it has to skip."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(by_hand(model)(x), y) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), norm))
    return scales
