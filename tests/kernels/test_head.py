"""A head and its loss are computed in chunks of rows, however the loss is written, and logits are unchanged."""

import copy
import gc
import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels import heads as heads_of_tests
from kernels.heads import WORDS, Language, batch, gradients_of, inside_and_outside, model_of, small_heads
from nano_loop import accelerated, nano
from nano_loop.kernels.head import head
from nano_loop.kernels.head.logits import LazyLogits
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import NO_RULES
from nano_loop.policy import product_precision


@pytest.fixture(autouse=True)
def heads():
    with small_heads():
        yield


def known(targets):
    return targets.clamp(min=0)


def mask(targets):
    return targets.ne(-100)


# --- ways to write the loss ---


def rows_of(logits):
    return logits.view(-1, WORDS)


def nano_gpt(logits, y):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-100)


def transformers(logits, y):
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(rows_of(logits.float()), y, ignore_index=-100, reduction="sum") / y.ne(-100).sum()


def shifted(logits, y):
    logits, y = logits.float()[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(rows_of(logits), y.view(-1))


def weighted(logits, y, **options):
    weight = torch.linspace(0.5, 2, WORDS).to(logits.dtype)
    return F.cross_entropy(rows_of(logits), y.view(-1), weight=weight, **options)


def trl(logits, y):
    logs = logits.log_softmax(-1)
    return -(torch.gather(logs, 2, known(y).unsqueeze(2)).squeeze(2) * mask(y)).sum() / mask(y).sum()


def trl_selective(logits, y):
    selected = torch.gather(logits, dim=-1, index=known(y).unsqueeze(-1)).squeeze(-1)
    sums = torch.stack([torch.logsumexp(each, dim=-1) for each in logits])
    return -((selected - sums) * mask(y)).sum() / mask(y).sum()


def trl_by_rows(logits, y):
    logs = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=of.unsqueeze(-1)).squeeze(-1)
        for row, of in zip(logits, known(y), strict=True)
    ]
    return -(torch.stack(logs) * mask(y)).mean()


def focal(logits, y):
    losses = F.cross_entropy(rows_of(logits), y.view(-1), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def in_parts_by_hand(logits, y):
    parts = zip(rows_of(logits).split(4), y.view(-1).split(4), strict=True)
    return sum(F.cross_entropy(part, of, reduction="sum") for part, of in parts) / mask(y).sum()


def with_accuracy(logits, y):
    best = logits.detach().topk(5, dim=-1).indices
    return nano_gpt(logits, y) * (1 + (best == y.unsqueeze(-1)).any(-1).double().mean()).to(logits.dtype)


def masked_before(logits, y):
    keeps = torch.arange(WORDS) % 10 != 7
    return F.cross_entropy(rows_of(logits.masked_fill(~keeps, -1e4)), known(y).view(-1) // 10 * 10)


def written_before(logits, y):
    logits[..., 7] = -1e4
    return nano_gpt(logits, y)


def distilled(logits, y):
    teacher = torch.linspace(0, 3, WORDS, dtype=logits.dtype).softmax(0)
    return F.kl_div(F.log_softmax(logits, -1), teacher.expand_as(logits), reduction="batchmean") / 7


def own_targets(logits, y):
    with torch.no_grad():
        targets = logits.softmax(-1)
    return nano_gpt(logits, y) - (targets * logits.log_softmax(-1)).sum(-1).mean()


def of_each_row(logits, y):
    pairs = [*zip(rows_of(logits), known(y).view(-1), strict=True)]
    losses = [row.logsumexp(0) - row.gather(0, of.view(1)).squeeze(0) for row, of in pairs]
    logs = [row.log_softmax(-1).gather(0, of.view(1)) for row, of in pairs]
    return (
        torch.stack(losses).mean() - torch.cat(logs).mean() + sum(row.max(0)[0] + row.mean(-1) for row, _ in pairs) / 9
    )


def smoothed_by_transformers(logits, y):
    losses = -F.log_softmax(logits[..., :-1, :].contiguous(), dim=-1)
    y = y[..., 1:].unsqueeze(-1)
    ignored = y.eq(-100)
    of_labels = losses.gather(dim=-1, index=known(y)).masked_fill_(ignored, 0)
    of_all = losses.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill_(ignored, 0)
    return (0.9 * of_labels.sum() + 0.1 * of_all.sum() / WORDS) / (~ignored).sum()


#: Losses that are computed in chunks.
CHUNKED = {
    "nanoGPT": nano_gpt,
    "transformers": transformers,
    "transformers, smoothed": smoothed_by_transformers,
    "shifted": shifted,
    "shifted by slices": lambda logits, y: F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1)),
    "flattened": lambda logits, y: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.flatten(0, 1), y.flatten()),
    "transposed": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "permuted": lambda logits, y: (
        (F.cross_entropy(logits.permute(0, 2, 1), y, reduction="none") * mask(y)).sum() / mask(y).sum()
    ),
    "weighted": weighted,
    "weighted and smoothed": lambda logits, y: weighted(logits, y, label_smoothing=0.2),
    "likelihood": lambda logits, y: F.nll_loss(rows_of(F.log_softmax(logits, dim=-1)), y.view(-1)),
    "likelihood by modules": lambda logits, y: (
        nn.NLLLoss(reduction="sum")(nn.LogSoftmax(dim=-1)(logits).flatten(0, 1), y.flatten()) / 9
    ),
    "likelihood of each step": lambda logits, y: F.nll_loss(logits.log_softmax(-1).permute(1, 2, 0), y.t()),
    "likelihood of known rows": lambda logits, y: F.nll_loss(F.log_softmax(logits, -1)[mask(y)], y[mask(y)]),
    "logarithms, shifted": lambda logits, y: -logits.log_softmax(-1)[:, :-1].gather(2, known(y)[:, 1:, None]).mean(),
    "logarithms of each step": lambda logits, y: (
        -(
            logits.log_softmax(-1).transpose(0, 1).gather(-1, known(y).t().unsqueeze(-1)).squeeze(-1) * mask(y).t()
        ).mean()
    ),
    "TRL": trl,
    "TRL, selective": trl_selective,
    "TRL, by rows": trl_by_rows,
    "z loss": lambda logits, y: nano_gpt(logits, y) + 1e-2 * logits.logsumexp(-1).pow(2).mean(),
    "temperature": lambda logits, y: nano_gpt(logits / 0.7, y),
    "capped": lambda logits, y: nano_gpt(torch.tanh(logits / 5) * 5, y),
    "entropy": lambda logits, y: nano_gpt(logits, y) - (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "own targets": own_targets,
    "each row": of_each_row,
    "targets of a twin": lambda logits, y: -(logits.detach().softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "half of the gradient": lambda logits, y: nano_gpt(logits.data / 2 + logits / 2, y),
    "known rows": lambda logits, y: F.cross_entropy(logits[mask(y)], y[mask(y)]),
    "each sequence": lambda logits, y: (
        sum(F.cross_entropy(row, of) for row, of in zip(logits, y, strict=True)) / len(y)
    ),
    "two losses": lambda logits, y: nano_gpt(logits, y) + nano_gpt(logits, y.view(-1).flip(0)) / 2,
    "largest": lambda logits, y: nano_gpt(logits, y) + logits.max(-1).values.mean() + logits.topk(3, -1)[0].mean(),
    "focal": focal,
    "in parts by hand": in_parts_by_hand,
    "accuracy": with_accuracy,
}
WHOLE = {
    "masked before": masked_before,
    "written before": written_before,
    "distilled": distilled,
    "checkpointed": lambda logits, y: checkpoint(nano_gpt, logits, y, use_reentrant=False),
}


def gradients(model, loss):
    words, targets = batch()
    value = loss(model(words), targets)
    value.backward()
    return [value.detach(), *gradients_of(model)]


def errors(found, exact):
    pairs = [*zip(found, exact, strict=True)]
    assert all((each is None) is (right is None) for each, right in pairs)  # in frozen parts
    return [((each.double() - right).norm() / right.norm()).item() for each, right in pairs if right is not None]


@pytest.mark.parametrize(
    "settings",
    [{}, {"tied": True, "bias": False}, {"frozen": ("head",)}, {"frozen": ("embedding", "inner")}],
    ids=str,
)
@pytest.mark.parametrize("where", ["in the loop", "in the model"])
@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_loss_and_gradients_are_as_exact_as_torchs(name, where, settings):
    loss = (CHUNKED | WHOLE)[name]
    exact = gradients(model_of(**settings).double(), loss)
    theirs = gradients(model_of(**settings), loss)
    model, (words, targets) = model_of(loss if where == "in the model" else None, **settings), batch()
    with accelerated(model, verbose=False):
        output = model(words, targets) if model.loss else model(words)
        assert isinstance(output, LazyLogits) is (model.loss is None)
        value = output if model.loss else loss(output, targets)
        assert value.__class__ is torch.Tensor
        value.backward()
        assert bool(head.noted().whole) is (name in WHOLE)
    ours = [value.detach(), *gradients_of(model)]
    for mine, other in zip(errors(ours, exact), errors(theirs, exact), strict=True):
        assert mine <= 1.5 * other + 2e-7


@pytest.mark.parametrize("precision", ["auto", "bf16", "bf16-true"])
@pytest.mark.parametrize("loss", CHUNKED.values(), ids=CHUNKED)
def test_loss_and_gradients_in_reduced_precision_are_as_exact_as_those_of_whole_logits(precision, loss, monkeypatch):
    monkeypatch.setitem(product_precision.MIN_MULTIPLICATIONS, product_precision.PRODUCT, 1)

    def trained(is_chunked):
        model, (words, targets) = model_of(), batch()
        with accelerated(
            model, precision=precision, fast_cross_entropy=is_chunked, tune_operators=False, verbose=False
        ):
            logits = model(words)
            assert isinstance(logits, LazyLogits) is is_chunked
            value = loss(logits, targets)
            value.backward()
        return [value.detach(), *gradients_of(model)]

    exact = gradients(model_of().double(), loss)
    for mine, other in zip(errors(trained(True), exact), errors(trained(False), exact), strict=True):
        assert mine <= 1.5 * other + 2**-9


def test_listed_operators_of_logits_run_in_the_dtype_of_their_list():
    seen, (words, _) = [], batch()
    model = model_of(lambda logits: seen.append(logits.log_softmax(-1).dtype))
    for options in ({}, {"fp32_ops": "safe"}):
        with accelerated(model, precision="bf16", verbose=False, **options):
            model(words)
    assert seen == [torch.bfloat16, torch.float32]


READINGS = {
    "argmax": lambda logits: logits.argmax(-1),
    "argmax, kept": lambda logits: torch.argmax(logits, dim=2, keepdim=True),
    "max": lambda logits: torch.stack([each.double() for each in torch.max(logits, -1)]),
    "topk": lambda logits: logits.topk(5)[1],
    "logsumexp": lambda logits: torch.logsumexp(logits, -1, keepdim=True),
    "accuracy": lambda logits: (logits.detach().argmax(dim=-1) == batch()[1]).float().mean(),
    "of a transposed": lambda logits: logits.transpose(1, 2).argmax(1),
}
PARTS = {
    "all": lambda logits: logits,
    "all but the last": lambda logits: logits[:, :-1],
    "known": lambda logits: logits[mask(batch()[1])],
    "last": lambda logits: logits[:, -1],
    "halved": lambda logits: logits / 2,
    "transposed": lambda logits: logits.transpose(0, 1),
}


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_largest_logits_are_equal_to_those_that_are_read_later(part, has_gradient):
    model, (words, _) = model_of(), batch()
    with accelerated(model, verbose=False), torch.set_grad_enabled(has_gradient):
        logits = PARTS[part](model(words))
        third, largest = logits.topk(3)[0][..., -1:], logits.max(-1, keepdim=True)[0]
        assert ((logits < third).sum(-1) == WORDS - 3).all()  # all others are masked, as before sampling
        assert ((logits == largest).sum(-1) == 1).all()
        assert torch.equal(logits.amax(-1, keepdim=True), largest)


@pytest.mark.parametrize("part", PARTS)
def test_ranks_of_classes_are_those_of_the_logits(part):
    model, (words, _) = model_of(), batch()
    with accelerated(model, verbose=False), torch.no_grad():
        logits = PARTS[part](model(words))
        chosen = torch.full((*logits.shape[:-1], 1), 7)
        ranks = (logits > logits.gather(-1, chosen)).sum(-1)
        assert torch.equal(ranks, (logits.clone() > logits.clone()[..., 7:8]).sum(-1))


OF_ALL = {
    "last": lambda logits: logits[:, -1, :],
    "one class": lambda logits: logits[..., 3],
    "sum": lambda logits: logits.sum(),
    "probabilities": lambda logits: logits.softmax(-1),
    "copy": lambda logits: copy.deepcopy(logits.detach()),
}


@pytest.mark.parametrize("when", ["before the loss", "after the loss", "after the step", "after the run"])
@pytest.mark.parametrize("reading", [*READINGS, *OF_ALL])
def test_logits_that_are_read_are_what_they_were(reading, when):
    read = (READINGS | OF_ALL)[reading]

    def trained(model):
        optimizer, (words, targets) = torch.optim.AdamW(model.parameters(), lr=0.1), batch()
        logits = model(words)
        found = read(logits).clone() if when == "before the loss" else None
        loss = nano_gpt(logits, targets)
        found = read(logits).clone() if when == "after the loss" else found
        loss.backward()
        optimizer.step()
        found = read(logits).clone() if when == "after the step" else found
        return found, logits

    expected, logits = trained(model_of())
    expected = read(logits) if expected is None else expected
    model = model_of()
    with accelerated(model, verbose=False):
        found, logits = trained(model)
        assert reading in OF_ALL or not head.noted().whole
    found = read(logits) if found is None else found
    torch.testing.assert_close(found.clone(), expected.clone(), rtol=1e-5, atol=1e-5)


def test_logits_of_an_epoch_are_what_they_were_with_one_old_weight_a_step():
    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kept = []
        for step in range(3):
            words, targets = batch(step)
            for _ in range(2):
                logits = model(words)
                kept.append(logits.detach())
                nano_gpt(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return kept

    expected, model = trained(model_of()), model_of()
    with accelerated(model, verbose=False):
        found = trained(model)
        weights = {each.head.weight.data_ptr() for each in found}
        assert len(weights) == len(found) / 2
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.clone(), other, rtol=1e-5, atol=1e-5)


def test_logits_of_a_frozen_head_that_is_trained_later_are_what_they_were():
    def trained(model):
        optimizer, (words, targets) = torch.optim.SGD(model.parameters(), 0.5), batch()
        model.head.requires_grad_(False)
        logits = model(words)
        nano_gpt(logits, targets).backward()
        model.head.requires_grad_(True)
        nano_gpt(model(words), targets).backward()
        optimizer.step()
        return logits.argmax(-1), logits.detach().clone()

    torch.testing.assert_close(*inside_and_outside(trained))


def test_write_in_inference_mode_to_the_input_does_not_change_the_logits():
    def read(model):
        with torch.inference_mode():
            hidden = model.inner(model.embedding(batch()[0]))
            logits = model.head(hidden)
            hidden.mul_(2)
            return logits.argmax(-1), logits.logsumexp(-1)

    torch.testing.assert_close(*inside_and_outside(read))


def test_losses_that_are_kept_hold_nothing_of_the_head():
    model, (words, targets) = model_of(nano_gpt), batch()
    with accelerated(model, verbose=False):
        losses = [model(words, targets) for _ in range(2)]
        assert head.noted().heads
        for loss in losses:
            loss.backward()
        assert not head.noted().heads


def of_each_sequence(model, words, targets):
    return [F.cross_entropy(row, of) for row, of in zip(model(words), targets, strict=True)]


def of_parts_of_the_input(model, words, targets):
    parts = torch.tanh(model.inner(model.embedding(words))).chunk(4, 1)
    logits = [model.head(part) for part in parts]
    return [nano_gpt(part, of.contiguous()) for part, of in zip(logits, targets.chunk(4, 1), strict=True)]


def of_micro_batches(model, words, targets):
    return [nano_gpt(model(words[:1]), targets[:1]) for _ in range(3)]


@pytest.mark.parametrize("losses_of", [of_each_sequence, of_parts_of_the_input, of_micro_batches])
def test_losses_of_small_parts_hold_one_gradient_of_the_weight_between_forward_and_backward(losses_of):
    def held():
        shape = model.head.weight.shape
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]
        return len({each.untyped_storage().data_ptr() for each in tensors} - {model.head.weight.data_ptr()})

    theirs, model = model_of(), model_of()
    sum(losses_of(theirs, *batch())).backward()
    gc.collect()
    with accelerated(model, verbose=False):
        before = held()
        losses = losses_of(model, *batch())
        assert not head.noted().whole
        assert held() <= before + 1
        sum(losses).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(theirs), rtol=1e-4, atol=1e-6)


WRITES = {
    "the weight": lambda head, hidden: head.weight.data.mul_(2),
    "the bias": lambda head, hidden: head.bias.data.mul_(2),
    "rows of the weight": lambda head, hidden: head.weight[WORDS // 2 :].data.mul_(2),
    "the input": lambda head, hidden: hidden.data.mul_(2),
    "a part of the input": lambda head, hidden: hidden[1:].data.mul_(2),
}


@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("has_few_rows", [False, True])
def test_logits_that_are_read_after_a_write_by_data_are_what_they_were(written, is_frozen, has_few_rows):
    def trained(model):
        words, targets = batch()
        words, targets = (words[:, :4], targets[:, :4].contiguous()) if has_few_rows else (words, targets)
        model.head.requires_grad_(not is_frozen)
        hidden = model.inner(model.embedding(words)).detach().requires_grad_()
        logits = model.head(hidden)
        nano_gpt(logits, targets).backward()
        assert nn.Parameter(torch.eye(2).to_sparse()).data.is_sparse  # it has no storage
        torch.func.grad(lambda x: x.data.sum() + x.sum())(torch.ones(2))  # nor has this tensor
        WRITES[written](model.head, hidden)
        return logits.detach()[0].clone(), logits.argmax(-1)

    torch.testing.assert_close(*inside_and_outside(trained))


@pytest.mark.parametrize("has_few_rows", [False, True])
@pytest.mark.parametrize("follows", ["nothing", "a step", "a read of .data"])
def test_weight_that_is_written_before_the_logits_are_read_is_an_error_of_the_read_alone(has_few_rows, follows):
    model, (words, targets) = model_of(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with accelerated(model, verbose=False):
        logits = model(words[:, :4] if has_few_rows else words)
        nano_gpt(logits, targets[:, :4].contiguous() if has_few_rows else targets).backward()
        with torch.no_grad():
            model.head.weight.mul_(2)
        if follows == "a step":
            optimizer.step()
        elif follows == "a read of .data":
            model.head.weight.data.clamp_(-1, 1)
        with pytest.raises(RuntimeError, match="Read logits before"):
            logits.sum()


# --- gradients ---


def seen_by_retain_grad(logits, loss):
    logits.retain_grad()
    loss().backward()
    return logits.grad


def seen_by_retain_grad_after_the_loss(logits, loss):
    value = loss()
    logits.retain_grad()
    value.backward()
    return logits.grad


def seen_by_a_hook(logits, loss):
    seen, value = [], loss()
    logits.register_hook(seen.append)
    value.backward()
    return seen[0]


def seen_by_a_hook_that_doubles(logits, loss):
    logits.register_hook(lambda gradient: 2 * gradient)
    loss().backward()
    return torch.zeros(())


def seen_by_backward_with_inputs(logits, loss):
    loss().backward(inputs=[logits])
    return logits.grad


OBSERVERS = [
    *(seen_by_retain_grad, seen_by_retain_grad_after_the_loss, seen_by_a_hook, seen_by_a_hook_that_doubles),
    *(seen_by_backward_with_inputs, lambda logits, loss: torch.autograd.grad(loss(), logits, retain_graph=True)[0]),
]


def gathered(logs, targets):
    return -logs[:-1].gather(1, known(targets)[:-1].unsqueeze(1)).mean()


OBSERVED = {
    "logits": (lambda logits: logits, F.cross_entropy),
    "a view": (rows_of, F.cross_entropy),
    "a copy": (lambda logits: logits / 2, F.cross_entropy),
    "a log-softmax": (lambda logits: logits.log_softmax(-1), F.nll_loss),
    "gathered logarithms": (lambda logits: F.log_softmax(logits, -1), gathered),
}


@pytest.mark.parametrize("of", OBSERVED)
@pytest.mark.parametrize("observe", OBSERVERS)
def test_who_looks_at_the_gradient_of_logits_sees_it(observe, of):
    change, loss = OBSERVED[of]

    def observed(model):
        words, targets = batch()
        logits = change(model(words))
        seen = observe(logits, lambda: loss(logits.view(-1, WORDS), targets.view(-1)))
        return [seen, *gradients_of(model)]

    torch.testing.assert_close(*inside_and_outside(observed), rtol=1e-4, atol=1e-7)


def scaled_twice(model, words, targets):
    for part in (words, words.flip(0)):
        (nano_gpt(model(part), targets) / 2).backward()


def backward_twice(model, words, targets):
    loss = nano_gpt(model(words), targets)
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def of_two_heads(model, words, targets):
    hidden = model.inner(model.embedding(words))
    first, second = model.head(hidden), model.head(hidden.tanh())
    (nano_gpt(first, targets) + nano_gpt(second, targets.flip(0)) + (first + second).square().mean()).backward()


def with_a_penalty(model, words, targets):
    logits = model(words)
    (nano_gpt(logits, targets) + 1e-2 * logits[..., :3].square().mean()).backward()


def with_a_second_derivative(model, words, targets):
    loss = nano_gpt(model(words), targets)
    found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + sum(each.square().sum() for each in found)).backward()


def with_torch_func(model, words, targets):
    weights = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights):
        return nano_gpt(torch.func.functional_call(model, weights, (words,)), targets)

    for name, gradient in torch.func.grad(loss)(weights).items():
        model.get_parameter(name).grad = gradient


def with_a_checkpoint(model, words, targets):
    checkpoint(lambda words: nano_gpt(model(words), targets), words, use_reentrant=False).backward()


def with_hooks_on_the_head(model, words, targets):
    handles = [
        model.head.register_forward_hook(lambda module, inputs, output: output * 2),
        model.head.register_full_backward_hook(lambda module, inwards, outwards: (inwards[0] / 2,)),
    ]
    nano_gpt(model(words), targets).backward()
    for handle in handles:
        handle.remove()


def with_generation_between(model, words, targets):
    nano_gpt(model(words), targets).backward()
    with torch.no_grad():
        for _ in range(3):
            following = model(words)[:, -1].softmax(-1).argmax(-1, keepdim=True)
            words = torch.cat((words[:, 1:], following), 1)
    nano_gpt(model(words), targets).backward()


def with_a_compiled_loss(model, words, targets):
    torch.compile(lambda logits: nano_gpt(logits, targets) + logits[..., :3].mean(), backend="aot_eager")(
        model(words)
    ).backward()
    torch.compiler.reset()


def masked_after_the_loss(model, words, targets):
    logits = model(words)
    loss = nano_gpt(logits, targets)
    with torch.no_grad():
        logits[..., 0] = -torch.inf
    assert logits[..., 0].isinf().all()
    loss.backward()


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.mark_dirty(logits)
        return logits.neg_()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def negated_by_a_function(model, words, targets):
    nano_gpt(Negated.apply(model(words)), targets).backward()


def half_negated_by_a_function(model, words, targets):
    nano_gpt(Negated.apply(model(words) / 2), targets).backward()


def negated_twice_by_a_function(model, words, targets):
    logits = Negated.apply(model(words))
    (nano_gpt(logits, targets) + nano_gpt(Negated.apply(logits * 2), targets)).backward()


def interrupted(model, words, targets):
    def interrupt(gradient):
        raise InterruptedError

    loss = nano_gpt(model(words), targets)
    handle = model.inner.weight.register_hook(interrupt)
    with pytest.raises(InterruptedError):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    loss.backward()


@pytest.mark.parametrize(
    "train",
    [
        *(scaled_twice, backward_twice, of_two_heads, with_a_penalty, with_a_second_derivative, with_torch_func),
        *(with_a_checkpoint, with_hooks_on_the_head, with_generation_between, with_a_compiled_loss),
        *(masked_after_the_loss, interrupted),
        *(negated_by_a_function, half_negated_by_a_function, negated_twice_by_a_function),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, where a graph breaks
def test_gradients_are_torchs(train):
    def trained(model):
        train(model, *batch())
        return gradients_of(model)

    torch.testing.assert_close(*inside_and_outside(trained, fast_cross_entropy=True), rtol=1e-3, atol=1e-6)


def test_rows_without_a_label_are_never_computed(monkeypatch):
    rows = []
    logits = head.Head.logits
    monkeypatch.setattr(head.Head, "logits", lambda self, of: (rows.append(len(out := logits(self, of))), out)[1])
    model, (words, targets) = model_of(), batch()
    with accelerated(model, verbose=False):
        nano_gpt(model(words), targets).backward()
        assert sum(rows) == mask(targets).sum()
        nothing = nano_gpt(model(words), torch.full_like(targets, -100))
        nothing.backward()
        assert nothing.isnan()
    assert sum(rows) == mask(targets).sum()


def test_label_that_is_no_class_raises_torchs_error():
    model, (words, targets) = model_of(), batch()
    targets[0, 1] = WORDS
    with accelerated(model, verbose=False), pytest.raises(IndexError, match=f"Target {WORDS}"):
        nano_gpt(model(words), targets)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.log_softmax(5),
        lambda logits: logits.argmax(-4),
        lambda logits: logits.logsumexp(5),
        lambda logits: logits.gather(5, torch.zeros(3, 7, 1, dtype=torch.int64)),
        lambda logits: logits[:, -1].topk(3, 3),
    ],
)
def test_dimension_that_does_not_exist_raises_torchs_error(function):
    model, (words, _) = model_of(), batch()
    with pytest.raises(IndexError, match="Dimension out of range"):
        function(model(words))
    with accelerated(model, verbose=False), pytest.raises(IndexError, match="Dimension out of range"):
        function(model(words))


def test_layer_in_the_midst_of_a_model_is_no_head():
    model = nn.Sequential(nn.Linear(16, WORDS), nn.ReLU(), nn.Linear(WORDS, 3))
    kinds = []
    with accelerated(model, fast_cross_entropy=True, verbose=False):
        for _ in range(2):
            kinds.append(isinstance(model[0](torch.randn(4, 16)), LazyLogits))
            model(torch.randn(4, 16)).sum().backward()
    assert kinds == [True, False]


def test_code_that_names_exact_types_gets_them():
    def loss(logits, targets):
        seen.append({torch.Tensor: 1}[type(logits)])
        return nano_gpt(logits, targets)

    class Asking(Language):
        def forward(self, words):
            out = super().forward(words)
            return out if type(out) is torch.Tensor else None

    seen, (words, targets) = [], batch()
    model, asking = model_of(), Asking()
    with accelerated(model, verbose=False), accelerated(asking, verbose=False):
        assert asking(words) is not None
        out = model(words)
        if type(out) is torch.Tensor:
            seen.append(2)
        loss(out, targets).backward()
    assert seen == [2, 1]


@pytest.mark.parametrize("options", [{"exact": True}, {"fast_cross_entropy": False}, {"precision": "64"}, {}])
def test_options_and_small_sizes_that_leave_it_to_torch_return_plain_tensors(options, monkeypatch):
    model, (words, _) = model_of(), batch()
    if not options:
        monkeypatch.setattr("nano_loop.kernels.head.layers.LEAST_LOGITS", 1 << 23)
    if "precision" in options:
        model = model.double()
    with accelerated(model, verbose=False, **options):
        assert not isinstance(model(words), LazyLogits)


def trained_by_rank(model, optimizer):
    words, targets = batch(torch.distributed.get_rank())
    with small_heads():
        nano_gpt(model(words), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
def test_two_ranks_average_the_gradients_of_the_head():
    for module in (sys.modules[__name__], heads_of_tests):
        cloudpickle.register_pickle_by_value(module)
    models = model_of(), model_of()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    (sum(nano_gpt(models[0](words), targets) for words, targets in map(batch, range(2))) / 2).backward()
    optimizers[0].step()
    train = nano(num_processes=2, auto_lr=False, verbose=False)(trained_by_rank)
    for ours, theirs in zip(train(models[1], optimizers[1]), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


def test_report_names_the_line_that_asks_for_all_logits():
    model, (words, _) = model_of(), batch()
    with accelerated(model, verbose=False) as run:
        model(words).sum()
    assert "test_head.py:" in str(run.report["fast_cross_entropy"])


pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[slice(0, 4)], [slice(0, 2), torch.tensor([7, 6])], []], ids=["one", "two", "none"])
def test_gradients_of_chunks_that_were_expected_to_be_one_are_right(dtype, rows):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(8, 16).to(dtype), torch.randn(WORDS, 16).to(dtype), torch.zeros(WORDS).to(dtype)
    made = head.Gradients(head.Head(hidden, weight, bias, NO_RULES), (True, True, True), rows=4)
    gradient = torch.zeros(8, WORDS).to(dtype)
    for each in rows:
        gradient[each] = torch.randn_like(gradient[each])
        made.add(each, gradient[each])
    gradient, bound = gradient.double(), 4 * torch.finfo(dtype).eps
    exact = gradient @ weight.double(), gradient.t() @ hidden.double(), gradient.sum(0)
    for mine, true in zip(made.scaled(None), exact, strict=True):
        assert mine.dtype is dtype
        assert (mine.double() - true).norm() <= bound * true.norm()
