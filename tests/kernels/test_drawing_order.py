"""With channels_last, random draws after a convolution are those of the plain loop, in every precision."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import accelerated
from nano_loop.patching.operators import gives_kernels


class Dropping(nn.Module):
    """A convolution and a random layer, of a size that benefits from vectorized draws."""

    def __init__(self, drop, dimensions=2, norm=False):
        super().__init__()
        self.conv = (nn.Conv2d if dimensions == 2 else nn.Conv3d)(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.drop = drop

    def forward(self, x):
        return self.drop(self.bn(self.conv(x)))


DROPS = {
    "Dropout": nn.Dropout(0.3),
    "Dropout2d": nn.Dropout2d(0.3),
    "AlphaDropout": nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.3),
    "dropout": lambda x: F.dropout(x, 0.7),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "dropout2d": F.dropout2d,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.2, training=True),
    "of some channels": lambda x: torch.cat([F.dropout(x[:, :3]), x[:, 3:]], 1),
    "by hand": lambda x: x * torch.empty_like(x).bernoulli_(0.9),
    "channels shuffled, then dropped": lambda x: F.dropout(F.pixel_shuffle(x, 2)),
    "checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=True),
}
NOISES = {
    "uniform": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x + torch.randn_like(x),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
}
KNOWN = pytest.mark.skipif(not gives_kernels(), reason="torch 2.8 does not tell like which tensor one is made")
ALL = {**DROPS, **(NOISES if gives_kernels() else {})}


def run(model, x, context=nullcontext):
    torch.manual_seed(3)
    with context():
        out = model(x)
        out.square().mean().backward()
    return out.detach(), model.conv.weight.grad, torch.rand(1)


def compare(model, x, rtol=1e-5, atol=1e-5, **options):
    twin = copy.deepcopy(model)
    found = run(model, x, lambda: accelerated(model, channels_last=True, verbose=False, **options))
    torch.testing.assert_close(found, run(twin, x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("fast", ["auto", False], ids=["fast_dropout", "torch's"])
@pytest.mark.parametrize("drop", ALL.values(), ids=ALL)
def test_masks_are_those_of_the_plain_loop(drop, fast):
    compare(Dropping(drop), torch.rand(4, 3, 16, 16), fast_dropout=fast)


def test_masks_behind_batch_norm_and_of_volumes_too():
    compare(Dropping(nn.Dropout(0.3), norm=True), torch.rand(4, 3, 16, 16))
    compare(Dropping(nn.Dropout(0.3), dimensions=3), torch.rand(2, 3, 8, 8, 8))


def test_bf16_masks_are_the_same():
    model, x = Dropping(nn.Dropout(0.3)), torch.rand(4, 3, 16, 16)
    plain, _, behind = run(copy.deepcopy(model), x)
    found, _, after = run(model, x, lambda: accelerated(model, channels_last=True, precision="bf16", verbose=False))
    assert torch.equal(found == 0, plain == 0)
    assert torch.equal(behind, after)


def test_dropout_stays_in_nhwc():
    seen = []
    model = Dropping(lambda x: seen.append(F.dropout(x)) or seen[-1])
    run(model, torch.rand(2, 3, 16, 16), lambda: accelerated(model, channels_last=True, verbose=False))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_model_that_the_user_has_converted_draws_as_before():
    model = Dropping(nn.Dropout(0.3)).to(memory_format=torch.channels_last)
    compare(model, torch.rand(4, 3, 16, 16))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permuting(nn.Module):
    """Permutes images to NHWC itself, as ConvNeXt, Swin, CvT, and models with channels-last inputs do."""

    def __init__(self, forward):
        super().__init__()
        self.conv, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.block, self.scale = Block(), nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.norm = self.block.norm
        self.of_model = forward

    def forward(self, x):
        return self.of_model(self, x)


def attention(model, x):
    heads = model.conv(x).flatten(2).transpose(1, 2).unflatten(2, (2, 4)).transpose(1, 2)
    return F.dropout((heads @ heads.mT).permute(0, 3, 1, 2) + 1)


def recomputed(reentrant):
    def forward(model, x):
        return checkpoint(lambda y: F.dropout(model.block(y)), model.conv(x), use_reentrant=reentrant)

    return forward


OWN = {
    "dropout behind a block": lambda model, x: F.dropout(model.block(model.conv(x))),
    "dropout2d": lambda model, x: F.dropout2d(model.block(model.conv(x))),
    "in place": lambda model, x: F.dropout(model.block(model.conv(x)) * 1, inplace=True),
    "by hand": lambda model, x: torch.empty_like(model.block(model.conv(x))).bernoulli_(0.9) * model.scale,
    "sum with a scaled block": lambda model, x: F.dropout(model.scale * model.block(y := model.conv(x)) + y),
    "sum with what is before": lambda model, x: F.dropout((y := model.conv(x)) + F.dropout(model.block(y))),
    "convolution behind a block": lambda model, x: F.dropout(model.inner(model.block(model.conv(x)))),
    "before tokens": lambda model, x: F.dropout(model.norm(model.conv(x).permute(0, 2, 3, 1))),
    "mask of attention": attention,
    "checkpoint": recomputed(False),
    "reentrant checkpoint": recomputed(True),
    "images with channels last": lambda model, x: F.dropout(model.conv(F.dropout(x.permute(0, 3, 1, 2) + 1))),
}
if gives_kernels():
    OWN["noise"] = lambda model, x: model.inner(model.block(y := model.conv(x))) * torch.randn_like(model.block(y))


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"channels_last": True}, marks=KNOWN), {"channels_last": "auto"}, {"exact": True}],
    ids=str,
)
@pytest.mark.parametrize("name", OWN)
def test_tensors_that_the_model_permutes_itself_are_drawn_as_they_lie(name, options):
    """With another model whose convolution is converted."""
    torch.manual_seed(0)
    model, other = Permuting(OWN[name]), nn.Conv2d(3, 3, 1)
    x = torch.rand(2, 16, 16, 3) if name.startswith("images") else torch.rand(2, 3, 16, 16)
    twin = copy.deepcopy(model)

    def context():
        return accelerated([model, other], verbose=False, **options)

    torch.testing.assert_close(run(model, x, context), run(twin, x), rtol=1e-4, atol=1e-4)


@KNOWN
def test_without_gradients_a_model_that_permutes_first_draws_as_it_lies():
    model, x = Permuting(lambda model, x: F.dropout(model.norm(x).permute(0, 3, 1, 2))), torch.rand(2, 16, 16, 8)
    outs = []
    for context in (nullcontext(), accelerated(model, channels_last=True, verbose=False)):
        torch.manual_seed(0)
        with context, torch.no_grad():
            outs.append(model(x))
    torch.testing.assert_close(*outs)


def test_what_was_not_set_up_draws_as_without_a_run():
    outside = torch.rand(4, 8, 16, 16).to(memory_format=torch.channels_last)
    draws = []
    for context in (nullcontext(), accelerated(Dropping(nn.Dropout()), channels_last=True, verbose=False)):
        with context:
            torch.manual_seed(0)
            noise = torch.empty_like(outside)
            draws.append([F.dropout(outside), torch.rand_like(outside), noise.normal_(), noise.exponential_()])
    torch.testing.assert_close(*draws, rtol=0, atol=0)
