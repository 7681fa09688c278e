"""A run with split batches learns from the witness, an additional process that computes whole batches."""

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import time

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
    LOOPS,
    ODD,
    SAMPLES,
    Plain,
    by_sgd,
    dropout,
    fit,
    gan,
    lbfgs,
    loader_of,
    mlp,
    needs_kernels,
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


def trains(samples=SAMPLES, batch_size=BATCH):
    """Make a loop, which trains a small model, from a loss of the model, a batch and the number of the step."""

    def loop_of(loss_of):
        @functools.wraps(loss_of)
        def loop(run):
            steps = itertools.count(1)
            loader = loader_of(*vectors(samples), batch_size=batch_size)
            return fit(run, mlp(6, 8, 1), loader, lambda model, batch: loss_of(model, batch, next(steps)))

        return loop

    return loop_of


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


@trains()
def masked_by_numpy(model, batch, step):
    mask = torch.from_numpy(np.random.rand(*batch[0].shape) < 0.5)
    return squares(model, (batch[0] * mask, batch[1]))


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

    def loss_of(model, batch):
        optimizer.param_groups[0]["lr"] = 0.01 * len(batch[0])
        return squares(model, batch)

    return fit(run, model, loader_of(*vectors(36), batch_size=EVEN), loss_of, optimizer)


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


class Noise(nn.Module):
    """Draws in a checkpoint, and with the samples as the last dimension."""

    def forward(self, x):
        return checkpoint(lambda x: x + 0.1 * torch.rand(x.size(1), len(x), dtype=x.dtype).T, x, use_reentrant=False)


def checkpointed_noise(run):
    model = nn.Sequential(mlp(6, 8), Noise(), mlp(8, 1))
    return fit(run, model, loader_of(*vectors(36), batch_size=EVEN), squares)


def tokens_times_samples(run):
    """A mean over words that the loop scales to a sum over samples."""
    return tagging(run, lambda scores, classes: F.cross_entropy(scores, classes) * len(scores) / 9)


@trains()
def mixup_by_numpy(model, batch, step):
    """Only the factor is NumPy's, which all processes draw alike, so that gradients can be compared."""
    kept = np.random.beta(0.4, 0.4)
    return squares(model, [kept * one + (1 - kept) * one.flip(0) for one in batch])


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


@trains()
def filtered_later(model, batch, step):
    """The losses of the first step are all below the limit."""
    errors = (model(batch[0]) - batch[1]).square()
    return errors[errors < max(1e3 / 3**step, float(errors.detach().min()) + 1e-9)].mean()


@trains(36, EVEN)
def hardest_later(model, batch, step):
    """The share of a batch that counts is known only to the loop, so only the operator shows it."""
    errors = (model(batch[0]) - batch[1]).square().flatten()
    return errors.mean() if step < 3 else errors.topk(len(errors) // 2)[0].mean()


def mean_over_words(run, dtype=torch.float64):
    def loss_of(model, batch):
        x, y = batch
        counted = x[:, 0] > 0
        return (model(x) - y).square()[counted].sum() / counted.sum()

    return fit(run, mlp(6, 8, 1).to(dtype), loader_of(*vectors(dtype=dtype)), loss_of)


def clamped(run):
    """Clamped by hooks, which get the shares' gradients. The last layer's gradients are small enough."""
    model = mlp(6, 8, 1)
    for parameter in model[0].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
    return fit(run, model, loader_of(*vectors()), squares)


@trains()
def clamped_within(model, batch, step):
    """Like `clamped`, with a hook on an activation."""
    hidden = model[:2](batch[0])
    hidden.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return F.mse_loss(model[2:](hidden), batch[1])


def penalty(model):
    return sum(one.square().sum() for one in model.parameters())


@trains()
def decayed(model, batch, step):
    return squares(model, batch) + 0.1 * penalty(model)


@trains()
def slightly_decayed_sum(model, batch, step):
    """A sum over samples, and an unscaled penalty. In fp32, the difference would be as small as rounding."""
    return squares(model, batch) * len(batch[0]) + 1e-4 * penalty(model)


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


@trains(36)
def of_constant_size(model, batch, step):
    return squares(model, [column.view(9, -1) for column in batch])


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


@trains(36, EVEN)
def mixed_later(model, batch, step):
    """Mixes samples in an order of `random`, first in the third step."""
    count = len(batch[0])
    order = range(count) if step < 3 else random.sample(range(count), count)
    return squares(model, [0.7 * one + 0.3 * one[torch.tensor(order)] for one in batch])


@trains(36)
def flipped_later(model, batch, step):
    """Each sample is mixed with another one of the rank's part, first in the third step."""
    x, y = batch
    return squares(model, (0.5 * x + 0.5 * x.flip(0), y) if step > 2 else batch)


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
    assert [psutil.Process(server.pid).children() for server in kept] == [[]]


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
        *(sgd, dropout, decayed, functools.partial(sampling, size=EVEN), functools.partial(gan, size=EVEN)),
        *(padding, own_gradients, own_gradients_of_two, LOOPS["own_generator_of_equal_shares"], scaled_by_libraries),
        *(noise_on_gradients, noise_of_inputs_and_weights, functools.partial(noise_of_inputs_and_weights, size=ODD)),
        *(by_own_optimizer, models_in_turn, checkpointed_noise, tokens_times_samples),
    ],
)
def test_mean_is_compared(loop):
    found, result = run_of(loop)
    assert_equal({"": found}, {"": plain(loop)})
    assert result.status == "applied"
    assert ("is a sum" in result.detail) is (loop is tokens_times_samples)
    assert result.code is None


@pytest.mark.slow
def test_rounding_in_deep_networks_is_no_other_loss():
    (_, losses, _), result = run_of(actor_critic)
    assert torch.allclose(losses, plain(actor_critic)[1], rtol=1e-6)
    assert result.status == "applied"
    assert "rounding" in result.detail


OTHER_LOSS = r"differ by .* from those of whole batches.*nano_loop\.share\(\)"
REFUSED = {
    **dict.fromkeys((contrastive, contrastive_with_dropout, mean_over_words, missing_labels), OTHER_LOSS),
    **dict.fromkeys((slightly_decayed_sum, clamped, clamped_within, own_signs), OTHER_LOSS),
    **dict.fromkeys((normalized_advantages, mixup_by_numpy), OTHER_LOSS),
    twice_as_one_batch: r"differ by .* If a dropout gets several batches as one.*for each of them",
    divided_by_samples: r"step\(\) with the norm .* unlike after the backward.*all_reduce\(len\(x\)",
    rate_by_samples: r"learning rates \[0\.06\], and \[0\.12\] with whole batches",
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_other_losses_are_refused_before_a_second_step(loop):
    with pytest.raises(NanoError, match=REFUSED[loop]):
        run_of(loop)
    assert_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [32, "bf16"])
@pytest.mark.parametrize("loop", [contrastive, mean_over_words])
def test_other_losses_of_fp32_models_are_refused_and_means_are_not(loop, precision):
    with pytest.raises(NanoError, match=r"differ by .* from those of whole batches"):
        run_of(functools.partial(loop, dtype=torch.float32), precision=precision)
    _, result = run_of(functools.partial(sgd, dtype=torch.float32), precision=precision)
    assert result.status == "applied"


KEPT = r"a loss of .* after the first steps, and of .* with whole batches"
WARNED = {
    steps_by_samples: "a backward where the loop with whole batches has a step",
    filtered_later: "weights samples differently on each rank",
    own_clipped_later: "weights samples differently on each rank",
    hardest_later: "combines samples .* Topk",
    flipped_later: r"combines samples .* flip in test_witness\.py",
    mixed_later: "NumPy or random draw for a batch, first after the first step",
    centered: KEPT,
    queued: KEPT,
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", WARNED, ids=lambda loop: loop.__name__)
def test_loops_that_differ_in_later_steps_are_warned_of(loop):
    with pytest.warns(NanoWarning, match=WARNED[loop]):
        run_of(loop)
    assert_no_process_is_left()


def test_constant_number_of_samples_is_named():
    with pytest.raises((NanoError, NanoWorkerError), match=r"[45] of 9 samples"):
        run_of(of_constant_size)
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


def test_lists_of_samples_are_known():
    batch = torch.rand(3, 4, 5)
    samples = [*batch]
    assert _are_parts(batch_sums(samples), [batch_sums(samples[:2]), batch_sums(samples[2:])])
    assert not _are_parts(batch_sums(samples), [batch_sums(samples[:2]), batch_sums(samples[:1])])
