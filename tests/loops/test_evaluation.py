"""Evaluation inside the loop, early exits, and errors that the loop itself catches."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from nano_loop import nano

from .nested import differences, mapped
from .pairs import CONVOLUTIONS, built, left_as_found, named, pair, untouched
from .records import laid_otherwise, record, record_strides
from .tasks import ADAM, ADAMW, ConvNet, Net, entropy, fit, images, job, train, vectors


def with_validation(name="", model=Net, loader=vectors):
    def build():
        return {**job(model=model, optimizer=ADAMW, loader=loader)(), "validation": loader()}

    return named(name, build)


def accuracy(model, loader, by_hand):
    model.eval()
    hits = [(by_hand(model)(x).argmax(1) == y).float().mean().item() for x, y in loader]
    model.train()
    return hits


def evaluated_each_epoch(model, optimizer, loader, validation, by_hand=untouched):
    found = []
    for _ in range(2):
        found.append(fit(model, optimizer, loader, by_hand, epochs=1))
        with torch.no_grad():
            found.append(accuracy(model, validation, by_hand))
        with torch.inference_mode():
            found.append(accuracy(model, validation, by_hand))
    return found


test_evaluation_each_epoch = pair(with_validation(), kernels_in_bf16=True)(evaluated_each_epoch)
test_evaluation_of_images_each_epoch = pair(with_validation("convolutional", ConvNet, images), configs=CONVOLUTIONS)(
    evaluated_each_epoch
)


@pair(job(optimizer=ADAM))
def test_batches_taken_by_hand_and_a_loop_that_ends_early(model, optimizer, loader, by_hand=untouched):
    x, y = next(iter(loader))
    batches = iter(loader)
    seen = [len(loader), loader.batch_size, len(loader.dataset), next(batches), by_hand(model)(x), y]
    for step, (x, y) in enumerate(loader):
        losses = train(entropy(by_hand(model)), [(x, y)], optimizer)
        if step == 2:
            break
    return seen, step, losses, [x for x, _ in loader]


class Picky(nn.Linear):
    """Raises in the middle of its forward, on incomplete batches."""

    def forward(self, x):
        out = super().forward(x)
        if len(x) < 8:
            raise ValueError("not a full batch")
        return out


@pair(job(model=lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), Picky(4, 3)))))
def test_an_error_inside_forward_that_the_loop_catches(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for x, y in loader:
        try:
            out = by_hand(model)(x)
        except ValueError as error:
            outputs.append((str(error), torch.is_autocast_enabled("cpu")))
            continue
        train(cross_entropy, [(out, y)], optimizer)
        outputs.append((out, torch.is_autocast_enabled("cpu")))
    outputs.append(by_hand(model)(torch.ones(8, 6)))
    assert any(isinstance(first, str) for first, _ in outputs[:-1])
    return outputs


@pair(job())
def test_a_model_called_in_another_thread(model, optimizer, loader, by_hand=untouched):
    """Autocast is thread-local, so a depth counted for all threads together would be wrong."""
    model.eval()
    with ThreadPoolExecutor(2) as pool:
        outputs = [*pool.map(by_hand(model), [x for x, _ in loader] * 5)]
    model.train()
    return outputs, fit(model, optimizer, loader, by_hand)


@pair(job(optimizer=ADAM))
def test_weights_change_between_two_calls_without_gradients(model, optimizer, loader, by_hand=untouched):
    """Autocast caches its casts of the weights until it exits: a stale cast would show here."""
    outputs = []
    for x, y in loader:
        cross_entropy(by_hand(model)(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            outputs.append(by_hand(model.head)(torch.ones(1, 16)))
            model.head.weight.mul_(0.9)
            outputs.append(by_hand(model.head)(torch.ones(1, 16)))
    return outputs


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_midst_of_a_step_leaves_nothing_behind(error):
    """Inside the model, after some steps: the same error is raised, and the state is the plain loop's."""
    options = {"precision": "bf16", "channels_last": True, "verbose": False}
    results = []
    for accelerate in (untouched, nano(**options)):
        arguments = built(job(model=ConvNet, loader=images, optimizer=ADAM))
        raising = error("in the midst")

        def fail_at_the_second_call(module, args, calls=[], raising=raising):  # noqa: B006 - one list for each run
            calls.append(module)
            if len(calls) == 2:
                raise raising

        hook = arguments["model"].head.register_forward_pre_hook(fail_at_the_second_call)
        with left_as_found(), pytest.raises(error) as caught:
            accelerate(fit)(**arguments, by_hand=untouched)
        assert caught.value is raising
        hook.remove()
        results.append((record(arguments), record_strides(arguments), laid_otherwise(arguments)))
    found = [*differences(results[1][1:], results[0][1:]), *differences(*(looks(r[0]) for r in results))]
    assert not found, "\n".join(found)


def looks(recorded):
    """Return a record without its values, which depend on the precision."""
    return mapped(recorded, lambda tensor: torch.empty(0, dtype=tensor.dtype))
