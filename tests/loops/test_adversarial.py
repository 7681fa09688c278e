"""Two models against each other, several forwards per backward, and gradients of gradients."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from .pairs import CONVOLUTIONS, ROUNDED, pair, untouched
from .tasks import ADAM, ADAMW, images, job, steps, train


def convolutional_gan():
    generator = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, stride=2))
    critic = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 6))
    return {
        "generator": generator,
        "critic": critic,
        "for_generator": torch.optim.SGD(generator.parameters(), lr=0.1),
        "for_critic": torch.optim.SGD(critic.parameters(), lr=0.1),
        "loader": images(),
    }


@pair(convolutional_gan, configs=CONVOLUTIONS)
def test_convolutional_gan(generator, critic, for_generator, for_critic, loader, by_hand=untouched):
    losses = []
    for real, _ in loader:
        fake = by_hand(generator)(torch.randn(len(real), 4, 1, 1))

        apart = train(
            lambda real, fake: (softplus(-by_hand(critic)(real)) + softplus(by_hand(critic)(fake))).mean(),
            [(real, fake.detach())],
            for_critic,
        )
        fooled = train(lambda fake: softplus(-by_hand(critic)(fake)).mean(), [(fake,)], for_generator)
        losses.append((apart, fooled, fake.detach().contiguous()))
    return losses


def smooth_convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 1, 6))


@pair(job(model=smooth_convolutions, optimizer=ADAM, loader=images), configs=CONVOLUTIONS, without=ROUNDED)
def test_gradient_penalty_through_convolutions(model, optimizer, loader, by_hand=untouched):
    penalties = []
    for real, _ in steps(loader, optimizer):
        real.requires_grad_()
        score = by_hand(model)(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        penalty = (slope.square().sum((1, 2, 3)) - 1).square().mean()
        (score.mean() + penalty).backward()
        penalties.append((penalty.item(), real.grad.contiguous()))
    return penalties


@pair(job(optimizer=ADAMW))
def test_several_forwards_and_backwards(model, optimizer, loader, by_hand=untouched):
    norms = []
    for x, y in steps(loader, optimizer):
        first = by_hand(model)(x)
        second = by_hand(model)(x + 0.1 * torch.randn_like(x))
        (cross_entropy(first, y) + (first - second).square().mean()).backward(retain_graph=True)
        norms.append(model.head.weight.grad.norm())
        first.square().mean().backward()
    return norms
