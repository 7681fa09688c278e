"""Other kinds of gradients: sparse, complex, recomputed, per sample, through parametrized weights."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, embedding
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from .pairs import FP64, ROUNDED, named, pair, untouched
from .tasks import ADAM, ADAMW, SGD, entropy, fit, job, steps, train, vectors

ADAGRAD = functools.partial(torch.optim.Adagrad, lr=0.1)


def words(sparse_module, optimizer):
    """A model whose first layer has sparse gradients. SparseAdam trains only that layer, as it accepts no others."""

    def build():
        model = Words(sparse_module)
        arguments = {"model": model, "loader": vectors(shuffle=False)}
        if optimizer is torch.optim.SparseAdam:
            dense = torch.optim.Adam(model.head.parameters(), lr=0.01)
            return {**arguments, "sparse": optimizer([model.table.weight], lr=0.01), "dense": dense}
        return {**arguments, "sparse": optimizer(model.parameters()), "dense": None}

    kind = "module" if sparse_module else "function"
    return named(f"{kind}-{getattr(optimizer, 'func', optimizer).__name__}", build)


class Words(nn.Module):
    def __init__(self, sparse_module):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=sparse_module)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        found = self.table(x) if self.table.sparse else embedding(x, self.table.weight, sparse=True)
        return self.head(found)


WITHOUT_MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1)
KINDS = WITHOUT_MOMENTUM, SGD, ADAGRAD, torch.optim.SparseAdam


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own, of Adagrad
@pair(*(words(module, kind) for module in (True, False) for kind in KINDS))
def test_sparse_gradients(model, sparse, dense, loader, by_hand=untouched):
    losses = []
    for _, y in steps(loader, *filter(None, (sparse, dense))):
        losses.append(cross_entropy(by_hand(model)(y), y))
        losses[-1].backward()
        assert model.table.weight.grad.is_sparse
    return losses


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


WITH_WAVES = (job(name, Waves, kind) for name, kind in {"sgd": SGD, "adam": ADAM, "adagrad": ADAGRAD}.items())
test_complex_parameters = pair(*WITH_WAVES, without=[FP64])(fit)


class Recomputing(nn.Module):
    """Recomputes its middle in backward, so modules run there, outside any call into the model."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16))

    def forward(self, x):
        x = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        x = checkpoint(lambda y: self.middle[0](y).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)


RECOMPUTING = [
    job("reentrant", functools.partial(Recomputing, True), ADAMW),
    job("not_reentrant", functools.partial(Recomputing, False), ADAMW),
]
test_activation_checkpointing_inside_forward = pair(
    *RECOMPUTING, without=ROUNDED, repeats_weights=True, kernels_in_bf16=True
)(fit)


@pair(*RECOMPUTING)
def test_activation_checkpointing_in_the_loop(model, optimizer, loader, by_hand=untouched):
    def call(x):
        hidden = by_hand(model.first)(x)
        return by_hand(model.last)(checkpoint(by_hand(model.middle), hidden, use_reentrant=model.reentrant))

    return train(entropy(call), loader, optimizer)


def deep():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def parametrized(kind):
    """A model with two such layers. Batch norm after one would leave only noise in its gradients."""

    def build():
        model = deep()
        kind(model[0])
        kind(model[4])
        return model

    return build


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "older_weight_norm": nn.utils.weight_norm,
    "older_spectral_norm": nn.utils.spectral_norm,
    "pruned": functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pair(*(job(name, parametrized(kind), ADAMW) for name, kind in PARAMETRIZATIONS.items()))
def test_parametrized_weights(model, optimizer, loader, by_hand=untouched):
    weight = model[4].weight.detach().clone()
    losses = fit(model, optimizer, loader, by_hand)
    with parametrize.cached():
        return weight, losses, by_hand(model)(torch.ones(2, 6)), parametrize.is_parametrized(model[4])


@pair(job(model=deep, optimizer=ADAM))
def test_functional_calls(model, optimizer, loader, by_hand=untouched):
    """MAML: the loss after one step of gradient descent, with weights that are not parameters."""
    losses = []
    for x, y in loader:
        weights = dict(model.named_parameters())
        loss = cross_entropy(by_hand(model)(x), y)
        gradients = torch.autograd.grad(loss, weights.values(), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        after = train(entropy(by_hand(functools.partial(functional_call, model, moved))), [(x, y)], optimizer)
        losses.append((loss.item(), after))
    return losses


@pair(job(model=deep, optimizer=ADAM), without=ROUNDED)
def test_gradients_of_each_sample(model, optimizer, loader, by_hand=untouched):
    def loss_of_one(weights, x, y):
        call = by_hand(lambda batch: functional_call(model, weights, (batch,)))
        return cross_entropy(call(x.unsqueeze(0)), y.unsqueeze(0))

    norms = []
    for x, y in loader:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        gradients = vmap(grad(loss_of_one), (None, 0, 0))(weights, x, y)
        norms.append(torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0))
        for name, p in model.named_parameters():
            p.grad = gradients[name].clamp(-0.1, 0.1).mean(0)
        optimizer.step()
    return norms


class RecomputingInFp32(nn.Module):
    """Recomputes a part that its author keeps in fp32."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.delicate, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = checkpoint(self.delicate, x.float(), use_reentrant=self.reentrant).tanh()
        return self.last(x)


IN_FP32 = (job(name, functools.partial(RecomputingInFp32, name == "reentrant")) for name in ("reentrant", "not"))
test_activation_checkpointing_of_an_fp32_region = pair(*IN_FP32, without=ROUNDED)(fit)
