"""Changes of data and optimizers: datasets, collate functions, samplers, schedules."""

import copy
import functools
import sys
from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from .program import SAMPLES
from .table import row

# --- data ---


def collated(batch):
    images, words, targets = default_collate(batch)
    return 0.5 * images, words.flip(1), targets


@row()
def collate_fn(program):
    program.set(program.loader, collate_fn=collated)


@row()
def registered_collate_functions(program):
    """torch looks the function up in its map for each type."""

    def halved(batch, *, collate_fn_map=None):
        out = torch.stack(batch)
        return out.square() if out.is_floating_point() else out

    program.within(mock.patch.dict(default_collate_fn_map, {torch.Tensor: halved}))


@row()
def samples_of_a_dataset(program):
    def item(self, index):
        return -self.images[index], self.words[index].flip(0), self.targets[index]

    program.set(type(program.loader.dataset), __getitem__=item)


@row()
def tensors_of_a_dataset(program):
    samples = program.loader.dataset
    program.set(samples, images=-samples.images, words=samples.words.flip(0))
    samples.targets.sub_(1).remainder_(12)


@row()
def batch_size(program):
    program.set(program.loader.batch_sampler, batch_size=5, drop_last=True)


@row()
def sampler_of_the_batches(program):
    program.set(program.loader.batch_sampler, sampler=SequentialSampler(range(12)))


@row()
def epoch_of_a_sampler(program):
    """As in `DistributedSampler.set_epoch`, which determines the order."""

    class ByEpoch(SequentialSampler):
        epoch = 0

        def __iter__(self):
            return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    sampler = ByEpoch(range(SAMPLES))
    program.loader.batch_sampler.sampler = sampler
    train = program.train

    def train_epochs():
        sampler.epoch += 1
        train()

    program.set(program, train=train_epochs)


@row()
def class_of_the_loader(program):
    class Halved(type(program.loader)):
        def _get_iterator(self):
            return (batch for place, batch in enumerate(super()._get_iterator()) if place % 2)

    program.undo.callback(setattr, program.loader, "__class__", type(program.loader))
    program.loader.__class__ = Halved


@row()
def a_batch_sampler_that_counts(program):
    """A user-defined class for the next two steps."""

    class Counted(BatchSampler):
        def __iter__(self):
            for batch in super().__iter__():
                program.seen.append(list(batch))
                yield batch[:4]

    sampler = program.loader.batch_sampler
    program.undo.callback(setattr, sampler, "__class__", BatchSampler)
    sampler.__class__ = Counted


# --- schedules ---


def setting(optimizers, **settings):
    def change(program):
        for name in optimizers:
            for group in getattr(program, name).param_groups:
                program.within(mock.patch.dict(group, settings))

    return change


@row()
def lr_that_is_a_tensor(program):
    setting(("sgd", "adamw"), lr=torch.tensor(0.05))(program)


@row()
def settings_of_each_kind(program):
    setting(("sgd",), momentum=0.3, dampening=0.5)(program)
    setting(("adamw",), betas=(0.5, 0.6), eps=0.3)(program)
    setting(("adamw", "adagrad"), maximize=True)(program)
    setting(("sgd", "adamw", "adagrad"), weight_decay=0.3)(program)


@row()
def counters_of_steps(program):
    """As saved by other programs; several parameters share one counter."""
    for optimizer in (program.adamw, program.adagrad):
        states = [*optimizer.state.values()]
        for state in states:
            state["step"] = torch.tensor(7)
        states[1]["step"] = states[2]["step"]


@row()
def class_of_optimizers(program):
    class Halving:
        def step(self, *args):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)
            return super().step(*args)

    for optimizer in program.optimizers:
        program.undo.callback(setattr, optimizer, "__class__", type(optimizer))
        optimizer.__class__ = type("Halving", (Halving, type(optimizer)), {})


FUNCTIONS = (
    *((kind, "step") for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)),
    *((torch.optim.Optimizer, "zero_grad"), (torch.optim.SGD, "zero_grad"), (torch.optim.AdamW, "zero_grad")),
    *((sys.modules[f"torch.optim.{name}"], name) for name in ("sgd", "adam", "adagrad")),
)


def noted_functions(noted):
    """Return a context in which functions of optimizers record their calls."""
    contexts = ExitStack()
    for owner, name in FUNCTIONS:
        original = getattr(owner, name)

        def call(*args, original=original, name=name, **kwargs):
            noted.append(name)
            return original(*args, **kwargs)

        contexts.enter_context(mock.patch.object(owner, name, functools.wraps(original)(call)))
    return contexts


@row()
def functions_of_optimizers(program):
    program.within(noted_functions(program.seen))


NOTED = []


@row(before=lambda: noted_functions(NOTED))
def functions_of_optimizers_before_the_run(program):
    NOTED.clear()
    program.undo.callback(lambda: program.seen.append([*NOTED]))


@row()
def a_new_group(program):
    torch.manual_seed(4)
    program.model.head.scale = nn.Parameter(torch.ones(12))
    program.sgd.add_param_group({"params": [program.model.head.scale], "lr": 0.3})
    program.model.head.register_forward_hook(lambda module, _, out: out * module.scale)


@row()
def a_parameter_taken_out(program):
    for optimizer in program.optimizers:
        optimizer.state.pop(optimizer.param_groups[0]["params"].pop(1))


@row()
def state_cleared(program):
    for optimizer in program.optimizers:
        optimizer.state.clear()


@row()
def state_written(program):
    for optimizer in program.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if name != "step":
                    value.mul_(0.5)
        for state in optimizer.state.values():
            state.update({name: 3 * value for name, value in state.items() if name != "step"})


@row()
def state_of_optimizers_loaded(program):
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in program.optimizers]
    program.undo.callback(
        lambda: [each.load_state_dict(state) for each, state in zip(program.optimizers, saved, strict=True)]
    )


@row()
def copies_go_on(program):
    """A copy of the model and its optimizers takes the next two steps, and both are compared."""
    model, optimizers = copy.deepcopy((program.model, program.optimizers))
    program.set(program, model=model, **dict(zip(("sgd", "adamw", "adagrad"), optimizers, strict=True)))
    program.undo.callback(lambda: program.seen.extend(each.detach() for each in model.parameters()))


@row(is_seen=False)
def gradients_zeroed_in_place(program):
    for optimizer in program.optimizers:
        zero = optimizer.zero_grad

        def zero_in_place(zero=zero):
            zero(set_to_none=False)
            program.seen.append(program.gradients())

        program.set(optimizer, zero_grad=zero_in_place)


@row()
def gradients_written(program):
    """Gradients that the program sets itself, in another layout, or removes."""
    step = program.adamw.step

    def with_others(*args):
        model = program.model
        model.queries.weight.grad = model.queries.weight.grad.t().contiguous().t().neg()
        model.embedding.weight.grad[3] = 0.1
        model.gru.weight_hh_l0.grad = None
        return step(*args)

    program.set(program.adamw, step=with_others)


@row()
def gradients_negated_when_they_are_read(program):
    """Gradients with the negative bit: the imaginary part of a conjugate, and a negated view."""

    def negated(gradient):
        return torch.complex(torch.zeros_like(gradient), gradient).conj().imag

    for optimizer in program.optimizers:
        step = optimizer.step

        def with_others(*args, optimizer=optimizer, step=step):
            first, second, *_ = optimizer.param_groups[0]["params"]
            first.grad, second.grad = negated(first.grad), torch._neg_view(second.grad)
            return step(*args)

        program.set(optimizer, step=with_others)


@row()
def moments_kept_and_written(program):
    """A program may write to state tensors that it fetched earlier, through other references."""
    state = program.adamw.state[program.model.embedding.weight]
    kept = [state["exp_avg"].data, torch.from_dlpack(state["exp_avg_sq"])]

    def written(*_):
        for moment in kept:
            moment.data.mul_(0.5).add_(0.01)

    program.undo.callback(program.adamw.register_step_post_hook(written).remove)


@row(without=("bf16-products",))  # the errors name other tensors
def a_backward_behind_a_step(program):
    """torch rejects it, because the weights have changed since."""
    loss = F.cross_entropy(program.call(*program.samples), program.loader.dataset.targets)
    loss.backward(retain_graph=True)
    for optimizer in program.optimizers:
        optimizer.step()
    loss.backward()
