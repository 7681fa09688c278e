"""The loss of language models by the kernel of `nano_loop.kernels.loss.cross_entropy`, in runs."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import accelerated, nano
from nano_loop.patching.operators import upcasts

WORDS, WIDTH = 5000, 16


@pytest.fixture(autouse=True)
def every_cast_is_noted(monkeypatch):
    monkeypatch.setattr(upcasts, "WORTH_NOTING", 1)


IN_FP32, IN_BF16 = ["cross_entropy_float", "gradient_float_to_float"], ["cross_entropy_bf16", "gradient_bf16_to_bf16"]


class Words(nn.Module):
    """Predicts words; `loss` computes the loss from its logits."""

    def __init__(self, loss=None):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), loss

    def forward(self, words, targets):
        logits = self.head(self.embedding(words))
        return logits if self.loss is None else self.loss(logits, targets)


def of_cast(logits, targets):
    """As Hugging Face's models compute it."""
    return F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1))


def of_cast_by_to(logits, targets):
    return F.cross_entropy(logits.to(torch.float32).flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def of_bf16(logits, targets):
    """As nanoGPT does."""
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=7)


def of_shifted(logits, targets):
    """As older models of Hugging Face's do."""
    logits = logits.float()
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, WORDS), targets[:, 1:].reshape(-1))


def of_changed(logits, targets):
    """Writes to the cast."""
    logits = logits.float()
    logits[..., 9] = -1e4
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def of_two(logits, targets):
    """Two losses of one cast."""
    logits = logits.float().view(-1, WORDS)
    return F.cross_entropy(logits, targets.view(-1)) + F.cross_entropy(logits, targets.view(-1).flip(0))


def with_penalty(logits, targets):
    """Another operator reads the cast, too."""
    logits = logits.float()
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1)) + 1e-2 * logits[:, :3].square().mean()


def recomputed(logits, targets):
    return checkpoint(of_cast, logits, targets, use_reentrant=False)


def flat(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def viewed(logits, targets):
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), label_smoothing=0.1)


def reshaped(logits, targets):
    return nn.CrossEntropyLoss()(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def transposed(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=7)


def permuted(logits, targets):
    return F.cross_entropy(logits.permute(0, 2, 1), targets, reduction="none").mean()


def of_rows(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).contiguous().view(-1, WORDS), targets.flatten(), reduction="sum") / 99


OUTSIDE = (flat, viewed, reshaped, transposed, permuted, of_rows)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (2, 4, 16), generator=generator)


def trained(model, outside=flat, held=None, **options):
    """Return two losses, and the parameters after two steps of SGD."""
    losses = []

    @nano(precision="bf16", tune_operators=False, verbose=False, **options)
    def train(model, optimizer):
        words, targets = data()
        for _ in range(2):
            optimizer.zero_grad()
            if model.loss:
                loss = model(words, targets)
            elif held is None:
                loss = outside(model(words, targets), targets)
            else:
                held.append(model(words, targets))
                loss = outside(held[-1], targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            assert loss.dtype is torch.float32

    train(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return [*losses, *(each.detach() for each in model.parameters())], train.report


def model_of(loss):
    torch.manual_seed(0)
    return Words(loss)


@pytest.mark.parametrize(
    ("loss", "functions"),
    [
        (of_cast, IN_BF16),
        (of_cast_by_to, IN_BF16),
        (of_bf16, IN_BF16),
        (of_two, IN_BF16),
        (with_penalty, IN_BF16),
        (of_shifted, IN_FP32),
        (of_changed, IN_FP32),
        (None, IN_BF16),
        (recomputed, ["cross_entropy_bf16", "cross_entropy_bf16", "gradient_bf16_to_bf16"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_loop_trains_as_with_torch_s_kernels(called, loss, functions):
    found, report = trained(model_of(loss))
    assert report["fast_cross_entropy"].status == "applied"
    assert set(called) == set(functions)
    assert called[: len(functions)] == functions or loss is of_two
    called.clear()
    theirs, report = trained(model_of(loss), fast_cross_entropy=False)
    assert not called
    assert "fast_cross_entropy" not in report.applied
    # Logits are bf16 in both, and sums in fp32 have another order. Where two operators read the cast, either the sum of
    # their gradients is rounded to bf16 or each.
    tolerance = 2**-11 if loss in (of_two, with_penalty) else 1e-6
    for mine, other in zip(found, theirs, strict=True):
        assert (mine - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("is_held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("outside", OUTSIDE)
def test_loss_outside_of_the_model_trains_as_with_torch_s_kernels(called, outside, is_held):
    found, _ = trained(model_of(None), outside, [] if is_held else None)
    assert set(called) == set(IN_BF16)
    called.clear()
    theirs, _ = trained(model_of(None), outside, fast_cross_entropy=False)
    assert not called
    for mine, other in zip(found, theirs, strict=True):
        assert (mine - other).norm() <= 1e-6 * other.norm()


def seen_by_hook(out, loss_of, seen):
    out.register_hook(seen.append)
    loss_of(out).backward()


def seen_by_hook_of_a_view(out, loss_of, seen):
    view = out[:]
    view.register_hook(seen.append)
    loss_of(view).backward()


def seen_by_hook_after_the_loss(out, loss_of, seen):
    loss = loss_of(out)
    out.register_hook(seen.append)
    loss.backward()


def seen_by_hook_of_a_view_that_is_gone(out, loss_of, seen):
    view = out[:]
    loss = loss_of(view)
    view.register_hook(seen.append)
    del view
    loss.backward()


def seen_by_retain_grad(out, loss_of, seen):
    loss = loss_of(out)
    out.retain_grad()
    loss.backward()
    seen.append(out.grad)


def seen_by_retain_grad_of_a_view(out, loss_of, seen):
    view = out[:]
    view.retain_grad()
    loss_of(view[:]).backward()
    seen.append(view.grad)


def seen_by_grad(out, loss_of, seen):
    seen += torch.autograd.grad(loss_of(out), out)


def seen_by_backward_with_inputs(out, loss_of, seen):
    head = out.grad_fn.next_functions[0][0].next_functions
    leaves = [node.variable for node, _ in head if hasattr(node, "variable")]
    loss_of(out).backward(inputs=[out, *leaves])
    seen.append(out.grad)


def seen_by_backward_hook_of_a_module_outside(out, loss_of, seen):
    outside = nn.Identity()
    outside.register_full_backward_hook(lambda module, inwards, outwards: seen.append(inwards[0]))
    loss_of(outside(out)).backward()


OBSERVERS = [each for name, each in [*globals().items()] if name.startswith("seen_by")]


@pytest.mark.parametrize("observe", OBSERVERS)
@pytest.mark.parametrize("outside", [flat, transposed])
def test_who_looks_at_the_gradient_of_an_output_sees_it(outside, observe):
    model, (words, targets) = model_of(None), data()
    found = []
    with accelerated(model, precision="bf16", tune_operators=False, verbose=False):
        observe(model(words, targets), lambda out: outside(out, targets), found)
        out = model(words, targets).detach().requires_grad_()
    (expected,) = torch.autograd.grad(outside(out, targets), out)
    for gradient in found:
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-9)
    assert found


def test_other_uses_of_an_output_add_to_its_gradient():
    def penalised(logits, targets):
        return flat(logits, targets) + 1e-2 * logits[..., :3].square().mean()

    found, _ = trained(model_of(None), penalised, [])
    theirs, _ = trained(model_of(None), penalised, fast_cross_entropy=False)
    for mine, other in zip(found, theirs, strict=True):
        assert (mine - other).norm() <= 2**-11 * other.norm()


def test_layout_of_images_is_torch_s():
    torch.manual_seed(0)
    model, images = nn.Conv2d(3, 1000, 1), torch.randn(2, 3, 4, 4)
    targets = torch.randint(1000, (2, 4, 4))
    with accelerated(model, precision="bf16", fast_cross_entropy=True, verbose=False):
        F.cross_entropy(model(images), targets).backward()
    assert model.weight.grad.abs().sum() > 0


def test_neither_the_copy_nor_its_gradient_is_kept_for_the_backward(called):
    shapes = []

    def noted(tensor):
        shapes.append((tensor.dtype, tensor.numel()))
        return tensor

    model, (words, targets) = model_of(of_cast), data()
    with accelerated(model, precision="bf16", verbose=False), torch.autograd.graph.saved_tensors_hooks(noted, noted):
        loss = model(words, targets)
        assert (torch.bfloat16, words.numel() * WORDS) in shapes
        assert (torch.float32, words.numel() * WORDS) not in shapes
        gc.collect()
        alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype is torch.float32]
        assert not [each for each in alive if each.numel() == words.numel() * WORDS]
        loss.backward()
    assert called == IN_BF16


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
        assert gradient.abs().sum() == pytest.approx(2, rel=1e-3)  # softmax less the target
        loss.backward()
        model.loss = hooked
        model(words, targets).backward()
    torch.testing.assert_close(seen["hooked"], gradient, rtol=1e-5, atol=1e-9)
    assert "gradient_bf16_to_float" in called


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


def test_output_that_was_cast_in_the_model_is_that_cast():
    def both(logits, targets):
        return of_cast(logits, targets), logits

    model, (words, targets) = model_of(both), data()
    casts = []
    with accelerated(model, precision="bf16", verbose=False):
        model.loss = lambda logits, targets: (casts.append(logits.float()), logits)[1]
        output = model(words, targets)
        assert output is casts[0]
        model.loss = both
        loss, output = model(words, targets)
        assert output.dtype is torch.float32
        (loss + 0 * output.sum()).backward()
    assert upcasts.held.casts is None


def test_code_that_was_not_set_up_keeps_torch_s_kernels(called):
    torch.manual_seed(0)
    logits, targets = torch.randn(64, WORDS), torch.randint(WORDS, (64,))

    def loss_and_gradient():
        leaf = logits.clone().requires_grad_()
        loss = F.cross_entropy(leaf * 2, targets)
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            under = F.cross_entropy(leaf.bfloat16(), targets)
        cast = leaf.bfloat16().float()
        assert type(cast.grad_fn).__name__ == "ToCopyBackward0"
        return loss.detach(), leaf.grad, under.detach(), F.cross_entropy(cast, targets).detach()

    plain, in_thread = loss_and_gradient(), []
    with accelerated(model_of(of_cast), precision="bf16", verbose=False) as run:
        assert "fast_cross_entropy" in run.report.applied
        thread = threading.Thread(target=lambda: in_thread.extend(loss_and_gradient()))
        thread.start()
        thread.join()
        for found in (loss_and_gradient(), in_thread):
            assert all(map(torch.equal, found, plain))
    assert not called
    assert not vars(torch.Tensor).keys() & {"float", "to"}


def test_target_that_is_no_class_raises_torch_s_error():
    model, (words, targets) = model_of(of_cast), data()
    targets[1, 3] = WORDS
    with accelerated(model, precision="bf16", verbose=False), pytest.raises(IndexError, match=f"Target {WORDS}"):
        model(words, targets)


@pytest.mark.slow
def test_compiled_model_computes_its_loss_by_torch(called):
    found, report = trained(model_of(of_cast), compile={"backend": "aot_eager"})
    assert {"fast_cross_entropy", "compile"} <= set(report.applied)
    assert not called
    theirs, _ = trained(model_of(of_cast), fast_cross_entropy=False)
    for mine, other in zip(found, theirs, strict=True):
        assert (mine - other).norm() <= 2**-8 * other.norm()
