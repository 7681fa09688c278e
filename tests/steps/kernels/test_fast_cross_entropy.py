"""The loss of language models with the kernel of `nano_loop.kernels.head.cross_entropy`; see also `tests/kernels`."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
from steps.kernels.cases import BY_NAME, use_for_all_sizes

WORDS = 5000


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_cross_entropy"])


class Words(nn.Module):
    """Predicts words, and computes a loss from the logits."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS), loss

    def forward(self, words, targets):
        return self.loss(self.head(self.embedding(words)), targets)


def model_of(loss):
    torch.manual_seed(0)
    return Words(loss)


def data():
    return torch.randint(WORDS, (2, 4, 16), generator=torch.Generator().manual_seed(1))


def of_two(logits, targets):
    """Two losses that share one cast."""
    logits = logits.float().view(-1, WORDS)
    return F.cross_entropy(logits, targets.view(-1)) + F.cross_entropy(logits, targets.view(-1).flip(0))


def test_layout_of_images_is_torch_s():
    torch.manual_seed(0)
    model, images = nn.Conv2d(3, 1000, 1), torch.randn(2, 3, 4, 4)
    targets = torch.randint(1000, (2, 4, 4))
    with accelerated(model, precision="bf16", fast_cross_entropy=True, verbose=False):
        F.cross_entropy(model(images), targets).backward()
    assert model.weight.grad.abs().sum() > 0


def test_who_holds_the_copy_sees_its_gradient(called):
    seen = {}

    def watched(logits, targets):
        seen["copy"] = logits.float()
        return F.cross_entropy(seen["copy"].view(-1, WORDS), targets.view(-1))

    def hooked(logits, targets):
        copy = logits.float()
        copy.register_hook(lambda gradient: seen.update(hooked=gradient))
        return F.cross_entropy(copy.view(-1, WORDS), targets.view(-1))

    words, targets = data()
    model = model_of(watched)
    with accelerated(model, precision="bf16", verbose=False):
        loss = model(words, targets)
        (gradient,) = torch.autograd.grad(loss, seen["copy"], retain_graph=True)
        assert gradient.dtype is torch.float32
        assert gradient.abs().sum() == pytest.approx(2, rel=1e-3)  # softmax minus the target
        loss.backward()
        model.loss = hooked
        model(words, targets).backward()
    torch.testing.assert_close(seen["hooked"], gradient, rtol=1e-5, atol=1e-9)
    assert "gradient_float_to_float" in called


def test_backward_can_be_repeated_and_can_have_been_interrupted():
    model, (words, targets) = model_of(of_two), data()

    def interrupt(gradient):
        raise InterruptedError

    with accelerated(model, precision="bf16", verbose=False):
        loss = model(words, targets)
        handle = model.head.weight.register_hook(interrupt)
        with pytest.raises(InterruptedError):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        loss.backward(retain_graph=True)
        once = model.head.weight.grad.clone()
        loss.backward()
    assert torch.equal(model.head.weight.grad, 2 * once)


def test_casts_of_code_that_was_not_set_up_are_torch_s(called):
    torch.manual_seed(0)
    logits, targets = torch.randn(64, WORDS, requires_grad=True), torch.randint(WORDS, (64,))

    def losses():
        with torch.autocast("cpu", torch.bfloat16):
            under = F.cross_entropy(logits.bfloat16(), targets)
        cast = logits.bfloat16().float()
        return under, F.cross_entropy(cast, targets), F.cross_entropy(logits * 2, targets)

    plain, in_thread = losses(), []
    with accelerated(model_of(of_two), precision="bf16", verbose=False):
        thread = threading.Thread(target=lambda: in_thread.extend(losses()))
        thread.start()
        thread.join()
        for found in (losses(), in_thread):
            assert all(map(torch.equal, found, plain))
    assert not called
