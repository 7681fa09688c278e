"""Small models that train in fp64 for 20 steps, plain or with each batch shared by the ranks, to equal weights.

A loop gets ``run``, a `TorchNano` or a `Plain`. Most batches have 9 samples, divided unequally among the ranks. The
last batch of an epoch has one sample, which all ranks compute.
"""

import contextlib
import itertools
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nano_loop import TorchNano
from nano_loop.patching.operators import gives_kernels

needs_kernels = pytest.mark.skipif(not gives_kernels(), reason="torch does not say which kernel an operator has")
SAMPLES, BATCH, EPOCHS = 37, 9, 4
#: 2, 3 or 4 ranks get unequal shares of 11 samples, and equal shares of 12.
ODD, EVEN = 11, 12


class Plain:
    """Passed to a loop in one process, without nano_loop."""

    def setup(self, *parts):
        return parts

    def no_backward_sync(self, model, enabled=True):
        return contextlib.nullcontext()

    def all_reduce(self, data, reduce_op="mean"):
        return data

    def share(self):
        return 1.0


class Shared(TorchNano):
    def train(self, names, **settings):
        return trained(self, names, **settings)


def trained(run, names, **settings):
    """The results of the loops, by name."""
    results = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = LOOPS[name](run, **settings)
        except Exception as error:
            raise AssertionError(name) from error
    return results


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def vectors(count=SAMPLES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x.sin().sum(1, keepdim=True) + x[:, :1]).to(dtype)


def loader_of(*columns, **settings):
    return DataLoader(TensorDataset(*columns), **{"shuffle": True, "batch_size": BATCH} | settings)


def mlp(*sizes):
    layers = [[nn.Linear(one, two, dtype=torch.float64), nn.Tanh()] for one, two in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


def by_sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)


def fit(run, model, loader, loss_of, optimizer=None, before_step=lambda: None, after_step=lambda loss: None):
    optimizer = by_sgd(model) if optimizer is None else optimizer
    run.setup(model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            before_step()
            optimizer.step()
            losses.append(loss.item())
            after_step(loss)
    return weights(model), torch.tensor(losses, dtype=torch.float64), torch.tensor(len(loader))


def squares(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def sgd(run, dtype=torch.float64):
    return fit(run, mlp(6, 8, 1).to(dtype), loader_of(*vectors(dtype=dtype)), squares)


def adam(run, dtype=torch.float64):
    model = mlp(6, 8, 1).to(dtype)
    return fit(run, model, loader_of(*vectors(dtype=dtype)), squares, torch.optim.Adam(model.parameters(), lr=1e-2))


def experts(run):
    """Sometimes all samples of a rank are for the same expert, so that the other one has no gradient there."""
    model = nn.ModuleList([mlp(6, 8, 1), mlp(6, 8, 1)])

    def loss_of(model, batch):
        x, y = batch
        outputs = torch.zeros_like(y)
        for expert, is_chosen in zip(model, (x[:, 0] > 0.7, x[:, 0] <= 0.7), strict=True):
            if is_chosen.any():
                outputs = outputs + is_chosen[:, None] * expert(x)
        return F.mse_loss(outputs, y)

    return fit(run, model, loader_of(*vectors()), loss_of)


def lbfgs(run, reduction="mean"):
    model = mlp(6, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    run.setup(model, optimizer)
    for _ in range(EPOCHS):
        for x, y in loader_of(*vectors()):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y, reduction=reduction)
                loss.backward()
                return loss

            optimizer.step(closure)
    return (weights(model),)


def sentences():
    """Make sequences of varying length."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 9, (SAMPLES,), generator=generator).tolist()
    return [torch.randint(1, 11, (length,), generator=generator) for length in lengths]


class Tagger(nn.Module):
    """Scores the classes of each word."""

    def __init__(self, classes=3, dropout=0.0, batch_first=True):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, classes)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        self.double()

    def forward(self, words):
        return self.head(self.layer(self.words(words), src_key_padding_mask=words == 0))


def padded_to_100(samples):
    """Pad sentences and their classes; short sentences, such as the first ones, have only ignored classes."""
    classes = [
        torch.where(one % 5 < 3, one % 5, -100) if len(one) > 2 else torch.full_like(one, -100) for one in samples
    ]
    return pad_sequence(samples, batch_first=True), pad_sequence(classes, batch_first=True, padding_value=-100)


def tagging(run, loss_of, dtype=torch.float64):
    model = Tagger().to(dtype)
    loader = DataLoader(sentences(), BATCH, shuffle=True, collate_fn=padded_to_100)
    return fit(
        run, model, loader, lambda model, batch: loss_of(model(batch[0]).transpose(1, 2), batch[1]), by_sgd(model, 0.02)
    )


def padding(run, dtype=torch.float64):
    return tagging(run, lambda scores, classes: F.cross_entropy(scores, classes), dtype)


def probabilities(run):
    """Losses of class probabilities, and of the words that a mask keeps."""

    def loss_of(scores, classes):
        rows, kept = scores.transpose(1, 2), classes >= 0
        targets = F.one_hot(classes.clamp(min=0), 3).double()
        return F.cross_entropy(rows[kept], targets[kept]) + F.cross_entropy(rows[kept], classes[kept])

    return tagging(run, loss_of)


def accumulated_words(run):
    """Means over words, accumulated over several batches, with an evaluation on rank 0 alone in between."""
    model = Tagger()
    optimizer = by_sgd(model, 0.02)
    run.setup(model, optimizer)
    losses = []
    loader = DataLoader(sentences(), BATCH, shuffle=True, collate_fn=padded_to_100)
    for _ in range(EPOCHS):
        for number, (words, classes) in enumerate(loader, 1):
            loss = F.cross_entropy(model(words).transpose(1, 2), classes) / 2
            if getattr(run, "global_rank", 0) == 0:
                with torch.no_grad():
                    F.cross_entropy(model(words).transpose(1, 2), classes)
            losses.append(loss.item())  # the whole batch's loss, before the backward, too
            loss.backward()
            if number % 2 == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model), torch.tensor(losses, dtype=torch.float64)


def accumulation(run, paused=False, dtype=torch.float64):
    """Accumulate three batches; the rest at the end of an epoch is a short batch, alone or with others."""
    model = mlp(6, 8, 1).to(dtype)
    optimizer = by_sgd(model)
    run.setup(model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        loader = loader_of(*vectors(SAMPLES + 4, dtype))
        for number, (x, y) in enumerate(loader, 1):
            steps = number % 3 == 0 or number == len(loader)
            with run.no_backward_sync(model, enabled=paused and not steps):
                loss = F.mse_loss(model(x), y) / 3
                loss.backward()
                losses.append(loss.item())
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model), torch.tensor(losses, dtype=torch.float64)


def clipping(run, dtype=torch.float64):
    model, norms = mlp(6, 8, 1).to(dtype), []

    def clip():
        norms.append(clip_grad_norm_(model.parameters(), 0.3))

    return *fit(run, model, loader_of(*vectors(dtype=dtype)), squares, before_step=clip), torch.stack(norms)


class Images(nn.Module):
    """Norms of images and of vectors, one with a cumulative mean, which checkpointing may compute again."""

    def __init__(self, repeats=None):
        super().__init__()
        self.repeats = repeats
        self.images = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.vectors = nn.Sequential(nn.Linear(96, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        x = self.images(x).flatten(1)
        x = self.vectors(x) if self.repeats is None else checkpoint(self.vectors, x, use_reentrant=self.repeats)
        return self.head(x)


def norms(run, dtype=torch.float64, repeats=None):
    """A network with batch norms, an average of its weights, and learning rates that change by epoch.

    Epochs end with five samples: with two, a norm of vectors amplifies rounding.
    """
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES + 4, 2, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(3, (len(x),), generator=generator)
    model = Images(repeats).to(dtype)
    optimizer = by_sgd(model, 0.02)
    run.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
    )
    losses = []
    for _ in range(EPOCHS):
        for batch, target in loader_of(x, labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            losses.append(loss.item())
        scheduler.step()
    buffers = [one.double() for kept in (model, average.module) for one in kept.buffers()]
    found = torch.cat([one.flatten() for one in buffers])
    return (
        weights(model),
        weights(average),
        found,
        torch.tensor([*losses, *scheduler.get_last_lr()], dtype=torch.float64),
    )


def two_losses(run):
    """Separately, from several roots, with gradients of the roots, and in a retained graph."""
    model = mlp(6, 8, 1)
    optimizer = by_sgd(model, lr=0.02)
    run.setup(model, optimizer)
    seen = []
    for x, y in itertools.chain(loader_of(*vectors()), loader_of(*vectors())):
        optimizer.zero_grad()
        near = F.mse_loss(model(x), y)
        far = model(x).exp().mean()
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        torch.autograd.backward([near, far], [torch.tensor(0.5).double(), None], retain_graph=True)
        far.backward(retain_graph=True)
        (far.log() * penalty * 1e-2 + near).backward(torch.tensor(2.0).double())
        optimizer.step()
        seen += [near.item(), far.item()]
    return weights(model), torch.tensor(seen, dtype=torch.float64)


def gradient_penalty(run):
    """`torch.autograd.grad` of each sample's score with respect to its input, as in WGAN-GP."""
    model = mlp(6, 8, 1)

    def loss_of(model, batch):
        x, y = batch
        x = x.clone().requires_grad_()
        scores = model(x)
        (slopes,) = torch.autograd.grad(scores, x, torch.ones_like(scores), create_graph=True)
        return (scores * y).mean() + (slopes.norm(dim=1) - 1).square().mean()

    return fit(run, model, loader_of(*vectors()), loss_of, by_sgd(model, 0.02))


def own_gradients(run, change=lambda gradient: gradient):
    """Gradients that the loop assigns to ``p.grad``, from a backward or without one."""
    model = mlp(6, 8, 1)
    optimizer = by_sgd(model)
    run.setup(model, optimizer)
    parameters = list(model.parameters())
    for x, y in loader_of(*vectors()):
        loss = F.mse_loss(model(x), y)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = change(gradient)
        optimizer.step()
    return (weights(model),)


def own_count(run):
    """A mean over the batch's words, weighted by the loop."""
    model = nn.Embedding(11, 1, dtype=torch.float64)

    def loss_of(model, words):
        count = run.all_reduce((words != 0).sum().double(), reduce_op="sum")
        return ((model(words).squeeze(2) - 1).square() * (words != 0)).sum() / count / run.share()

    return fit(run, model, DataLoader(sentences(), BATCH, collate_fn=partial(pad_sequence, batch_first=True)), loss_of)


def averages(run):
    """`all_reduce` of means, before a backward and without one."""
    found, model = [], mlp(6, 1)
    run.setup(model, by_sgd(model))
    for x, y in loader_of(*vectors()):
        found += [run.all_reduce(x.mean().clone()), run.all_reduce({"y": y.mean().clone()})["y"]]
    return (torch.stack(found),)


def evaluated_between(run):
    """An evaluation of whole batches between a batch's forward and its backward."""
    model = mlp(6, 8, 1)
    held_out = loader_of(*vectors(14), shuffle=False)
    found = []

    def loss_of(model, batch):
        with torch.no_grad():
            found.append(torch.stack([squares(model, one) for one in held_out]).mean())
        return squares(model, batch)

    return *fit(run, model, loader_of(*vectors()), loss_of), torch.stack(found)


class Stream(IterableDataset):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return zip(*vectors(), strict=True)


def streamed(run):
    return fit(run, mlp(6, 8, 1), DataLoader(Stream(), BATCH), squares)


def by_workers(run):
    return fit(run, mlp(6, 8, 1), loader_of(*vectors(), num_workers=2, persistent_workers=True), squares)


def ahead(batches):
    """Read a batch ahead, as Accelerate's loaders do."""
    batch = next(batches)
    for after in batches:
        yield batch
        batch = after
    yield batch


class Ahead(DataLoader):
    def __iter__(self):
        yield from ahead(super().__iter__())


def read_ahead(run):
    return fit(run, mlp(6, 8, 1), Ahead(TensorDataset(*vectors()), BATCH, shuffle=True), squares)


def trained_in_body(run):
    """An epoch that begins in eval mode is not divided."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_of(model, batch):
        model.train()
        return squares(model, batch)

    return fit(run, model, loader_of(*vectors(SAMPLES + 3)), loss_of, after_step=lambda loss: model.eval())


def kept(run):
    """The batches of the first epoch are read at once, and used again."""
    batches = []

    def all_of_them():
        batches.extend([] if batches else loader_of(*vectors()))
        return iter(batches)

    return fit(run, mlp(6, 8, 1), Repeated(all_of_them), squares)


def prefetched(run):
    """A generator that converts the next batch before the loop computes this one."""

    def converted():
        return ahead([part.clone() for part in batch] for batch in loader_of(*vectors()))

    return fit(run, mlp(6, 8, 1), Repeated(converted), squares)


class Repeated:
    """Iterates what a function makes anew."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()

    def __len__(self):
        return 5


def dropout(run):
    """Dropout of activations, in a model after setup and in the loop, and a layer as wide as the share."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(), nn.Linear(8, 1)).double()

    def loss_of(model, batch):
        x, y = batch
        drawn = nn.Linear(6, 5, dtype=torch.float64), torch.empty(4, dtype=torch.float64).uniform_(), torch.rand(5)
        probabilities = torch.bernoulli(x.sigmoid()).sum(1, keepdim=True)
        return (
            F.mse_loss(model(x) + drawn[0](x).mean(1, keepdim=True), y + probabilities)
            + drawn[1].sum()
            + drawn[2].mean()
        )

    return *fit(run, model, loader_of(*vectors(), batch_size=ODD), loss_of), torch.get_rng_state().double()


def own_generator(run, size=ODD):
    """Noise, and a mask, of a generator that also decides the order of samples."""
    own = torch.Generator().manual_seed(5)

    def loss_of(model, batch):
        x, y = batch
        mask = torch.empty_like(x).bernoulli_(0.5, generator=own)
        return F.mse_loss(model(x * mask + torch.randn(len(x), 6, generator=own, dtype=x.dtype)), y)

    loader = loader_of(*vectors(), batch_size=size, generator=own)
    return *fit(run, mlp(6, 8, 1), loader, loss_of), own.get_state().double()


class Noisy(Tagger):
    """Samples of 5 words; the word dimension comes first if attention returns its weights."""

    def __init__(self, weights_needed):
        super().__init__(1, dropout=0.2, batch_first=not weights_needed)
        self.weights_needed = weights_needed
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=not weights_needed, dtype=torch.float64)

    def forward(self, words):
        states = self.layer(self.words(words.T if self.weights_needed else words))
        states = states + self.attention(states, states, states, need_weights=self.weights_needed)[0]
        return self.head(states.mean(0 if self.weights_needed else 1)).squeeze(1)


def noisy_transformer(run, weights_needed=True, size=ODD):
    words = torch.randint(11, (SAMPLES, 5), generator=torch.Generator().manual_seed(4))
    model = Noisy(weights_needed)
    loader = DataLoader(TensorDataset(words, words.double().mean(1)), size, shuffle=True)
    result = fit(run, model, loader, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), by_sgd(model, 0.01))
    return *result, torch.get_rng_state().double()


def noisy_transformer_of_equal_shares(run):  # with draws at its own places in the program, for its own layout
    return noisy_transformer(run, weights_needed=False, size=EVEN)


class NoisyReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.3, dtype=torch.float64)
        self.head = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(1) * torch.arange(1.0, 4.0).double().view(1, 3, 1))[0][:, -1])


def noisy_lstm(run, size=ODD):
    result = fit(run, NoisyReader(), loader_of(*vectors(), batch_size=size), squares)
    return *result, torch.get_rng_state().double()


def gan(run, size=ODD, noise_like=None):
    """Noise of the batch's size, by the number of samples or the shape of a tensor."""
    generator, critic = mlp(3, 6, 6), mlp(6, 6, 1)
    optimizers = by_sgd(generator, 0.02), by_sgd(critic, 0.02)
    for model, optimizer in zip((generator, critic), optimizers, strict=True):
        run.setup(model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        for x, _ in loader_of(*vectors(), batch_size=size):
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                z = torch.randn(len(x), 3, dtype=torch.float64) if noise_like is None else noise_like(x[:, :3])
                optimizer.zero_grad()
                real = critic(x + 0.1 * torch.rand_like(x))
                loss = sign * (F.softplus(real).mean() + F.softplus(-critic(generator(z))).mean())
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    found = weights(generator), weights(critic), torch.tensor(losses, dtype=torch.float64)
    return *found, torch.get_rng_state().double()


def sampling(run, size=ODD):
    """Sample each distribution that torch draws elementwise or row by row."""
    model = mlp(6, 1)

    def loss_of(model, batch):
        x, y = batch
        by_mean = torch.normal(x, x.abs() + 1) + torch.normal(x, 0.5) + torch.normal(0.25, x.abs())
        parts = (
            F.gumbel_softmax(x),
            torch.empty_like(x).log_normal_(),
            torch.randint_like(x, 4),
            torch.randint(3, x.shape),
            torch.poisson(x.exp()),
            torch.binomial(x.abs().ceil(), x.sigmoid()),
            torch.distributions.Gamma(x.abs() + 0.1, 1.0).sample(),
            torch.distributions.Dirichlet(x.abs() + 0.1).sample(),
            torch.multinomial(x.sigmoid(), 6, replacement=True),
            torch.multinomial(x.sigmoid(), 6),
            torch.multinomial(torch.ones(99), len(x), replacement=True).unsqueeze(1),
        )
        wide = torch.randn(4, len(x), 6, dtype=torch.float64)[0].T.unsqueeze(0).expand(1, 6, len(x)).mT[0]
        return F.mse_loss(model(by_mean + sum(parts) + wide), y)

    return *fit(
        run, model, loader_of(*vectors(), batch_size=size), loss_of, by_sgd(model, 0.001)
    ), torch.get_rng_state().double()


def checkpointed_dropout(run, reentrant=False):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_of(model, batch):
        x, y = batch
        return F.mse_loss(model[3:](checkpoint(model[:3], x.requires_grad_(), use_reentrant=reentrant)), y)

    return *fit(run, model, loader_of(*vectors(), batch_size=ODD), loss_of), torch.get_rng_state().double()


class Augmented(TensorDataset):
    """Draws random numbers for each sample without using them, so that the samples equal the plain loop's."""

    def __getitem__(self, index):
        random.random(), torch.rand(index % 3)
        return super().__getitem__(index)


def augmented(run):
    """The loop and the data set draw from different generators."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    loader = DataLoader(Augmented(*vectors()), ODD)
    return fit(run, model, loader, squares)


LOOPS = {
    loop.__name__: loop
    for loop in (
        *(sgd, adam, lbfgs, accumulation, clipping, two_losses, gradient_penalty, padding, probabilities),
        *(accumulated_words, own_gradients, own_count, averages, evaluated_between, streamed, by_workers, read_ahead),
        *(kept, prefetched, trained_in_body, augmented, dropout, noisy_transformer, own_generator, noisy_lstm, gan),
        *(noisy_transformer_of_equal_shares, sampling, checkpointed_dropout, norms, experts),
    )
} | {
    "paused_accumulation": partial(accumulation, paused=True),
    "own_generator_of_equal_shares": partial(own_generator, size=EVEN),
    "noisy_lstm_of_equal_shares": partial(noisy_lstm, size=EVEN),
    "gan_of_equal_shares": partial(gan, size=EVEN, noise_like=torch.randn_like),
    "checkpointed_dropout_reentrant": partial(checkpointed_dropout, reentrant=True),
    "checkpointed_norms": partial(norms, repeats=False),
    "checkpointed_norms_reentrant": partial(norms, repeats=True),
}
