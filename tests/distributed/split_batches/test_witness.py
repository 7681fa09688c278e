"""A run with split batches learns from the witness, an additional process that computes whole batches."""

import contextlib
import functools
import os
import random
import signal
import socket
import time
import warnings

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from distributed.small import OPTIONS
from distributed.split_batches.loops import (
    BATCH,
    EVEN,
    ODD,
    Plain,
    by_sgd,
    fit,
    lbfgs,
    loader_of,
    mlp,
    needs_kernels,
    own_generator_of_equal_shares,
    own_gradients,
    padding,
    sampling,
    sgd,
    squares,
    tagging,
    vectors,
    weights,
)
from distributed.split_batches.test_loops import assert_equal
from nano_loop import NanoError, NanoWarning, NanoWorkerError, TorchNano
from nano_loop.distributed.comm.split_batches import batch_sums
from nano_loop.distributed.data_parallel.comparison import _are_parts
from nano_loop.distributed.launch_local import process
from nano_loop.distributed.launch_local.server import kept

pytestmark = needs_kernels


class Shared(TorchNano):
    def train(self, loop):
        torch.manual_seed(0)
        return loop(self)


def run_of(loop, **options):
    run = Shared(**OPTIONS, split_batches=True, **options)
    found = run.train(loop)
    return found, run.report["split_batches"]


def plain(loop):
    torch.manual_seed(0)
    return loop(Plain())


def total(run):
    """A sum over samples with clipped gradients; the shares are unequal from the start."""
    model = mlp(6, 8, 1)
    return fit(
        run,
        model,
        loader_of(*vectors()),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1], reduction="sum"),
        by_sgd(model, lr=0.01),
        before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 5.0),
    )


def noisy(run):
    model = nn.Sequential(mlp(6, 8), nn.Dropout(), mlp(8, 1))
    return fit(run, model, loader_of(*vectors()), squares, by_sgd(model, lr=0.01))


def masked_by_numpy(run):
    def loss_of(model, batch):
        mask = torch.from_numpy(np.random.rand(*batch[0].shape) < 0.5)
        return squares(model, (batch[0] * mask, batch[1]))

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


class Flipped(Dataset):
    """Samples that the dataset flips at random."""

    def __len__(self):
        return 36

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 6, dtype=torch.float64) + index
        return (x.flip(0) if torch.rand(()) < 0.5 else x), x[:1]


def augmented(run):
    return fit(run, mlp(6, 8, 1), DataLoader(Flipped(), 9, num_workers=1), squares)


def unseeded(run):
    model = mlp(6, 8, 1)
    own = torch.Generator().manual_seed(os.getpid())
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=own)
    return fit(run, model, loader_of(*vectors()), squares)


def raising(run):
    if run.world_size == 1:
        raise ValueError("only here")
    return sgd(run)


def connecting(run):
    if run.is_global_zero:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
    return sgd(run)


def writing(run):
    if run.is_global_zero:
        with open(os.environ["WITNESS_FILE"], "a") as file:
            print("begins", file=file)
        print("said")
    return sgd(run)


def sleeping(run):
    if run.world_size == 1:
        time.sleep(600)
    return sgd(run)


def killed(run):
    if run.world_size == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return sgd(run)


class Rounded(torch.autograd.Function):
    """Has a gradient that depends on the number of rows, as in a deep network in fp32."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1 / (20 * len(gradient)))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = mlp(6, 8), mlp(8, 1)

    def forward(self, x):
        return self.head(Rounded.apply(self.stem(x)))


def deep(run):
    model = Deep()
    return fit(run, model, loader_of(*vectors()), squares, by_sgd(model, lr=1e-9))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.actor, self.critic = mlp(6, 8), mlp(8, 1), mlp(8, 1)

    def forward(self, x):
        hidden = Rounded.apply(self.stem(x).tanh())
        return self.actor(hidden), self.critic(hidden)


def actor_critic(run, normalized=False):
    """The loss is that of the critic, so normalizing advantages by the share changes only gradients, by 0.1%."""
    model = ActorCritic()

    def loss_of(model, batch):
        x, y = batch
        advantages = (y - y.mean()) / y.std() if normalized else y
        actions, values = model(x)
        return ((actions - actions.detach()).exp() * advantages).mean() + 100 * F.mse_loss(values, y)

    return fit(run, model, loader_of(*vectors(36)), loss_of, by_sgd(model, lr=1e-9))


def normalized_advantages(run):
    return actor_critic(run, normalized=True)


def missing_labels(run):
    def loss_of(model, batch):
        x, y = batch
        known = ~y.isnan()
        return F.mse_loss(model(x)[known], y[known])

    x, y = vectors()
    return fit(run, mlp(6, 8, 1), loader_of(x, y.where(x[:, :1] > 0, torch.nan)), loss_of)


def models_in_turn(run):
    """The last batch has a single sample on some ranks, so that its loss has no reduction."""
    return (torch.cat([fit(run, mlp(6, 8, 1), loader_of(*vectors(25), batch_size=ODD), squares)[0] for _ in range(2)]),)


def rate_by_samples(run):
    """The linear scaling rule, for the rank's samples."""
    model = mlp(6, 8, 1)
    optimizer = by_sgd(model)
    return fit(run, model, loader_of(*vectors(36), batch_size=EVEN), rated(optimizer), optimizer)


def rated(optimizer):
    def loss_of(model, batch):
        optimizer.param_groups[0]["lr"] = 0.01 * len(batch[0])
        return squares(model, batch)

    return loss_of


def steps_by_samples(run):
    """Steps as soon as 20 samples are accumulated."""
    model = mlp(6, 8, 1)
    optimizer = by_sgd(model)
    run.setup(model, optimizer)
    seen = 0
    for _ in range(4):
        for x, y in loader_of(*vectors(36), batch_size=EVEN):
            F.mse_loss(model(x), y).backward()
            seen += len(x)
            if seen >= 20:
                optimizer.step()
                optimizer.zero_grad()
                seen = 0
    return (weights(model),)


def noise_on_gradients(run):
    """As wide as a share, and drawn after the backward."""
    model = mlp(6, EVEN // 2, 1)

    def add_noise():
        for parameter in model.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter.grad))

    return fit(run, model, loader_of(*vectors(36), batch_size=EVEN), squares, before_step=add_noise)


def divided_by_samples(run):
    """A sum over samples, whose gradients the loop divides by the samples that it has seen."""
    model = mlp(6, 8, 1)
    optimizer = by_sgd(model)
    run.setup(model, optimizer)
    for x, y in loader_of(*vectors(36), batch_size=EVEN):
        optimizer.zero_grad()
        F.mse_loss(model(x), y, reduction="sum").backward()
        for parameter in model.parameters():
            parameter.grad /= len(x)
        optimizer.step()
    return (weights(model),)


def contrastive(run, *more, dtype=torch.float64):
    def loss_of(model, batch):
        z = F.normalize(model(batch[0]))
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

    return fit(run, nn.Sequential(mlp(6, 8, 4), *more).to(dtype), loader_of(*vectors(dtype=dtype)), loss_of)


def contrastive_with_dropout(run):
    """The random draws are divided, so they do not explain differing gradients."""
    return contrastive(run, nn.Dropout(0.1))


def sampling_of_equal_shares(run):
    return sampling(run, EVEN)


class Noise(nn.Module):
    """Draws by the number of samples, and again in a checkpoint, where the samples are the last dimension."""

    def forward(self, x):
        return checkpoint(self._noisy, x, use_reentrant=False)

    def _noisy(self, x):
        return x + 0.1 * torch.rand(x.size(1), len(x), dtype=x.dtype).T


def noise_of_equal_shares(run):
    """Noise of a GAN with the batch's size, of layers that draw, and of weights of another size."""
    generator, critic = nn.Sequential(mlp(3, 6, 6), Noise()), mlp(6, 6, 1)
    optimizers = by_sgd(generator, 0.02), by_sgd(critic, 0.02)
    run.setup([generator, critic], [*optimizers])
    for _ in range(4):
        for x, _ in loader_of(*vectors(36), batch_size=EVEN):
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                z = torch.empty(len(x), 3, dtype=torch.float64).uniform_(-1, 1) + torch.randn(len(x), 1).double()
                optimizer.zero_grad()
                scale = nn.Linear(6, len(x), dtype=torch.float64).weight.detach().abs().mean()  # equal on all ranks
                real = critic(x + scale * 0 + torch.empty(len(x), 6).bernoulli_(0.5))
                (sign * (F.softplus(real).mean() + F.softplus(-critic(generator(z))).mean())).backward()
                optimizer.step()
    return weights(generator), weights(critic), torch.get_rng_state().double()


def tokens_times_samples(run):
    """A mean over words that the loop scales to a sum over samples."""
    return tagging(run, lambda scores, classes: F.cross_entropy(scores, classes) * len(scores) / 9)


def divided_by_own_count(run):
    """A sum over words divided by a count, as Hugging Face's Trainer does for each rank's batch."""
    return tagging(
        run, lambda scores, classes: F.cross_entropy(scores, classes, reduction="sum") / (classes >= 0).sum()
    )


def mixup(run):
    def loss_of(model, batch):
        x, y = batch
        partner = torch.randperm(len(x))
        return squares(model, (0.7 * x + 0.3 * x[partner], 0.7 * y + 0.3 * y[partner]))

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(), batch_size=EVEN), loss_of)


def mixup_by_numpy(run):
    """Only the factor is NumPy's, which all processes draw alike, so that gradients can be compared."""

    def loss_of(model, batch):
        x, y = batch
        kept = np.random.beta(0.4, 0.4)
        return squares(model, (kept * x + (1 - kept) * x.flip(0), kept * y + (1 - kept) * y.flip(0)))

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def scaled_by_libraries(run):
    random.seed(0)
    np.random.seed(0)

    def loss_of(model, batch):
        return squares(model, batch) * (0.5 if random.random() < 0.5 else np.random.uniform())

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


class NoisyLayer(nn.Linear):
    """Adds noise to its input and its weight, drawn by one line. The weight has as many rows as a share."""

    def forward(self, x):
        x, weight = (one + 0.1 * torch.randn(one.shape, dtype=one.dtype) for one in (x, self.weight))
        return F.linear(x, weight, self.bias)


def noise_of_inputs_and_weights(run, size=EVEN):
    model = nn.Sequential(NoisyLayer(6, EVEN // 2), nn.Tanh(), NoisyLayer(EVEN // 2, 1)).double()
    return fit(run, model, loader_of(*vectors(36), batch_size=size), squares)


def noise_of_inputs_and_weights_of_unequal_shares(run):
    return noise_of_inputs_and_weights(run, ODD)


def filtered_later(run):
    """The losses of the first step are all below the limit."""
    limit = [1e3]

    def loss_of(model, batch):
        errors = (model(batch[0]) - batch[1]).square()
        limit[0] /= 3
        return errors[errors < max(limit[0], float(errors.detach().min()) + 1e-9)].mean()

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def hardest_later(run):
    """The share of a batch that counts is known only to the loop, so only the operator shows it."""
    steps = [0]

    def loss_of(model, batch):
        steps[0] += 1
        errors = (model(batch[0]) - batch[1]).square().flatten()
        return errors.mean() if steps[0] < 3 else errors.topk(len(errors) // 2)[0].mean()

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36), batch_size=EVEN), loss_of)


def mean_over_words_of_a_loader_that_is_set_up(run):
    """Before the model, so that the witness knows only the loader."""
    return fit(run, mlp(6, 8, 1), run.setup_dataloaders(loader_of(*vectors())), words_of)


def words_of(model, batch):
    x, y = batch
    counted = x[:, 0] > 0
    return (model(x) - y).square()[counted].sum() / counted.sum()


def mean_over_words(run, dtype=torch.float64):
    return fit(run, mlp(6, 8, 1).to(dtype), loader_of(*vectors(dtype=dtype)), words_of)


def clamped(run):
    """Clamped by hooks, which get the shares' gradients. The last layer's gradients are small enough."""
    model = mlp(6, 8, 1)
    for parameter in model[0].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
    return fit(run, model, loader_of(*vectors()), squares)


def clamped_within(run):
    """Like `clamped`, with a hook on an activation."""
    model = mlp(6, 8, 1)

    def loss_of(model, batch):
        hidden = model[:2](batch[0])
        hidden.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return F.mse_loss(model[2:](hidden), batch[1])

    return fit(run, model, loader_of(*vectors()), loss_of)


def decayed(run):
    """A mean over samples, and a penalty."""

    def loss_of(model, batch):
        return squares(model, batch) + 0.1 * sum(one.square().sum() for one in model.parameters())

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def decayed_sum(run):
    """A sum over samples, and an unscaled penalty."""

    def loss_of(model, batch):
        return squares(model, batch) * len(batch[0]) + sum(one.square().sum() for one in model.parameters())

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def slightly_decayed_sum(run):
    """In fp32, the difference would be as small as rounding."""

    def loss_of(model, batch):
        return squares(model, batch) * len(batch[0]) + 1e-4 * sum(one.square().sum() for one in model.parameters())

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def total_by_lbfgs(run):
    """The closure returns a sum over samples, by which line searches decide."""
    return lbfgs(run, reduction="sum")


def stepped_in_backward(run):
    """The optimizer steps in hooks, before the backward that the witness would report has ended."""
    model = mlp(6, 8, 1)
    optimizers = {one: torch.optim.SGD([one], 0.05) for one in model.parameters()}
    run.setup(model, [*optimizers.values()])
    for one in optimizers:
        one.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    for x, y in loader_of(*vectors()):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
    return (weights(model),)


def of_constant_size(run):
    def loss_of(model, batch):
        return squares(model, [column.view(9, -1) for column in batch])

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36)), loss_of)


def centered(run):
    """The outputs' mean over the last batch is that of the rank's part."""
    center = [torch.zeros(1, dtype=torch.float64)]

    def loss_of(model, batch):
        outputs = model(batch[0])
        loss = F.mse_loss(outputs - center[0], batch[1])
        center[0] = outputs.detach().mean(0)
        return loss

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def queued(run):
    """A memory bank, to which each rank adds its samples."""
    queue = [torch.zeros(BATCH, 6, dtype=torch.float64)]

    def loss_of(model, batch):
        similar = batch[0] @ queue[0].T
        queue[0] = torch.cat([queue[0], batch[0]])[-BATCH:]
        return squares(model, batch) + (model(batch[0]) * similar.exp().mean(1, keepdim=True)).mean()

    return fit(run, mlp(6, 8, 1), loader_of(*vectors()), loss_of)


def by_own_optimizer(run):
    """The loop creates the optimizer, as Hugging Face's Trainer does."""
    model = mlp(6, 8, 1)
    run.setup(model)
    optimizer = by_sgd(model)
    for x, y in loader_of(*vectors()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return (weights(model),)


def mixed_later(run, shuffled=np.random.permutation):
    """Mixes samples in an order of NumPy, first in the third step."""
    steps = [0]

    def loss_of(model, batch):
        steps[0] += 1
        order = torch.arange(len(batch[0]))
        if steps[0] > 2:
            order = torch.from_numpy(shuffled(len(order)))
        return squares(model, [0.7 * one + 0.3 * one[order] for one in batch])

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36), batch_size=EVEN), loss_of)


def mixed_later_by_random(run):
    return mixed_later(run, lambda count: np.array(random.sample(range(count), count)))


def flipped_later(run):
    """Each sample is mixed with another one of the rank's part, first in the third step."""
    steps = [0]

    def loss_of(model, batch):
        steps[0] += 1
        x, y = batch
        return squares(model, (0.5 * x + 0.5 * x.flip(0), y) if steps[0] > 2 else batch)

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36)), loss_of)


def own_clipped_later(run):
    """The norms by which the loop clips are those of the rank's part."""
    seen = [0]

    def clipped(gradient):
        seen[0] += 1
        return gradient * (0.01 / gradient.norm()).clamp(max=1) if seen[0] > 12 else gradient

    return own_gradients(run, clipped)


def twice_as_one_batch(run):
    """The rows of dropout's mask are those of all samples, twice."""
    model = nn.Sequential(mlp(6, 8), nn.Dropout(0.5), mlp(8, 1))

    def loss_of(model, batch):
        one, other = model(torch.cat([batch[0], batch[0]])).chunk(2)
        return F.mse_loss(one, batch[1]) + F.mse_loss(other, one)

    return fit(run, model, loader_of(*vectors(36), batch_size=EVEN), loss_of)


def of_asserted_size(run):
    def loss_of(model, batch):
        assert batch[0].shape == (9, 6)
        return squares(model, batch)

    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36)), loss_of)


def of_indexed_size(run):
    return fit(run, mlp(6, 8, 1), loader_of(*vectors(36)), lambda model, batch: squares(model, batch) + batch[1][8, 0])


def own_signs(run):
    """The sign of a mean is no mean of signs."""
    return own_gradients(run, torch.sign)


def own_gradients_of_two(run):
    """Two optimizers, one of which steps by a backward."""
    model, other = mlp(6, 8, 1), mlp(6, 8, 1)
    optimizers = by_sgd(model), by_sgd(other)
    run.setup([model, other], [*optimizers])
    for x, y in loader_of(*vectors()):
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(F.mse_loss(model(x), y), [*model.parameters()]), strict=True
        ):
            parameter.grad = gradient
        optimizers[0].step()
        optimizers[1].zero_grad()
        F.mse_loss(other(x), y).backward()
        optimizers[1].step()
    return weights(model), weights(other)


def assert_no_process_is_left():
    assert [psutil.Process(server.pid).children() for server in kept()] == [[]]


@pytest.mark.parametrize(("loop", "name"), [(total, "total"), (total_by_lbfgs, "lbfgs")])
def test_sum_gets_the_weight_of_a_sum(loop, name):
    found, result = run_of(loop)
    assert_equal({name: found}, {name: plain(loop)})
    assert result.status == "applied"
    assert "is a sum" in result.detail
    assert_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        *(sgd, noisy, decayed, sampling_of_equal_shares, noise_of_equal_shares, tokens_times_samples, padding),
        *(own_gradients, own_gradients_of_two, own_generator_of_equal_shares, scaled_by_libraries, noise_on_gradients),
        *(noise_of_inputs_and_weights, noise_of_inputs_and_weights_of_unequal_shares, by_own_optimizer),
    ],
)
def test_mean_is_compared(loop):
    found, result = run_of(loop)
    assert_equal({"": found}, {"": plain(loop)})
    assert result.status == "applied"
    assert ("is a sum" in result.detail) is (loop is tokens_times_samples)
    assert result.code is None


@pytest.mark.slow
@pytest.mark.parametrize("loop", [deep, actor_critic])
def test_rounding_in_deep_networks_is_no_other_loss(loop):
    (_, losses, _), result = run_of(loop)
    assert torch.allclose(losses, plain(loop)[1], rtol=1e-6)
    assert result.status == "applied"
    assert "rounding" in result.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        *(contrastive, contrastive_with_dropout, mean_over_words, decayed_sum, divided_by_own_count),
        *(
            slightly_decayed_sum,
            clamped,
            clamped_within,
            own_signs,
            normalized_advantages,
            mixup_by_numpy,
            missing_labels,
        ),
    ],
)
def test_other_losses_are_refused_before_a_second_step(loop):
    with pytest.raises(NanoError, match=r"differ by .* from those of whole batches") as raised:
        run_of(loop)
    assert "nano_loop.share()" in str(raised.value)
    assert_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [32, "bf16"])
@pytest.mark.parametrize("loop", [contrastive, mean_over_words])
def test_other_losses_of_fp32_models_are_refused_and_means_are_not(loop, precision):
    with pytest.raises(NanoError, match=r"differ by .* from those of whole batches"):
        run_of(functools.partial(loop, dtype=torch.float32), precision=precision)
    _, result = run_of(functools.partial(sgd, dtype=torch.float32), precision=precision)
    assert result.status == "applied"


@pytest.mark.slow
def test_steps_that_depend_on_the_samples_of_a_rank_are_noticed():
    with pytest.raises(NanoError, match=r"step\(\) with the norm .* unlike after the backward.*all_reduce\(len\(x\)"):
        run_of(divided_by_samples)
    with pytest.raises(NanoError, match=r"learning rates \[0\.06\], and \[0\.12\] with whole batches"):
        run_of(rate_by_samples)
    with pytest.warns(NanoWarning, match="a backward where the loop with whole batches has a step"):
        run_of(steps_by_samples)
    assert_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (filtered_later, "weights samples differently on each rank"),
        (hardest_later, "combines samples .* Topk"),
        (flipped_later, r"combines samples .* flip in test_witness\.py"),
        (own_clipped_later, "weights samples differently on each rank"),
        (mixed_later, "NumPy or random draw for a batch, first after the first step"),
        (mixed_later_by_random, "NumPy or random draw for a batch, first after the first step"),
    ],
)
def test_losses_that_become_no_means_later_are_warned_of(loop, what):
    with pytest.warns(NanoWarning, match=what):
        run_of(loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [centered, queued])
def test_values_of_the_ranks_part_that_the_loop_keeps_are_warned_of(loop):
    with pytest.warns(NanoWarning, match=r"a loss of .* after the first steps, and of .* with whole batches"):
        run_of(loop)
    assert_no_process_is_left()


@pytest.mark.slow
def test_losses_that_stay_means_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", NanoWarning)
        found, _ = run_of(models_in_turn)
    assert_equal({"": found}, {"": plain(models_in_turn)})


@pytest.mark.slow
def test_dropout_of_several_batches_as_one_is_named():
    with pytest.raises(NanoError, match=r"differ by .* If a dropout gets several batches as one.*for each of them"):
        run_of(twice_as_one_batch)


@pytest.mark.slow
def test_mixup_is_refused_where_it_draws():
    with pytest.raises(NanoError, match=r"randperm of the 6 samples that this rank has of 12"):
        run_of(mixup)
    assert_no_process_is_left()


@pytest.mark.parametrize(
    "loop",
    [of_constant_size, *(pytest.param(one, marks=pytest.mark.slow) for one in (of_asserted_size, of_indexed_size))],
)
def test_constant_number_of_samples_is_named(loop):
    with pytest.raises((NanoError, NanoWorkerError), match=r"[45] of 9 samples"):
        run_of(loop)
    assert_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (masked_by_numpy, "random numbers"),
        (augmented, "samples that are drawn at random"),
        (unseeded, "parameters begin with other values"),
        (raising, "raised ValueError: only here"),
        (connecting, "opens a socket"),
        (killed, "has ended"),
        (sleeping, "it took"),
        (stepped_in_backward, "it has ended"),
    ],
)
def test_run_goes_on_where_nothing_can_be_compared(loop, why, monkeypatch):
    monkeypatch.setattr(process, "_PATIENCE", 2.0)
    differs = loop is masked_by_numpy
    with pytest.warns(NanoWarning, match="differ .* random numbers") if differs else contextlib.nullcontext():
        _, result = run_of(loop)
    assert result.code == "not_compared"
    assert why in result.detail
    assert_no_process_is_left()


@pytest.mark.slow
def test_files_of_the_witness_are_dropped(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WITNESS_FILE", str(tmp_path / "log"))
    _, result = run_of(writing)
    assert result.status == "applied"
    assert (tmp_path / "log").read_text() == "begins\n"
    assert capfd.readouterr().out == "said\n"


def test_sums_know_a_sample_that_is_turned_around():
    batch = {"x": torch.rand(3, 4, 5), "y": torch.arange(3), "names": ["a", "b"]}
    whole = batch_sums(batch)
    assert len(whole) == 1
    assert batch_sums({"x": batch["x"][:2]})[0] + batch_sums({"x": batch["x"][2:]})[0] == pytest.approx(whole[0])
    assert abs(batch_sums({"x": batch["x"].flip(2)})[0] - whole[0]) > 1e-3
    samples = [*batch["x"]]
    assert _are_parts(batch_sums(samples), [batch_sums(samples[:2]), batch_sums(samples[2:])])
    assert not _are_parts(batch_sums(samples), [batch_sums(samples[:2]), batch_sums(samples[:1])])
