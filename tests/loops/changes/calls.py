"""Changes of the parts of a call: forwards, classes, functions of torch, hooks."""

import functools
from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .layers import norms_of
from .table import row

#: The configs in which a loop by hand calls other functions: it enters autocast, where attention has a fast path.
IN_BF16 = ("channels_last-as-shipped",)
#: By hand, products round in a `TorchFunctionMode`, and torch calls a function twice in such a mode.
IN_MODE = ("bf16-products",)


def halved(function):
    """Wrap a function of torch or a forward, as programs do."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return 0.5 * function(*args, **kwargs)

    return call


# --- forwards ---


@row()
def forward_of_an_instance(program):
    def scaled(module, factor, *args):
        return factor * type(module).forward(module, *args)

    for module in (program.model.batch_norm, program.model.relu, program.model.layer_norm, program.model.mlp[4]):
        program.set(module, forward=halved(module.forward))
    for module in (program.model.group_norm, program.model.silu, program.model.mlp[7]):
        program.set(module, forward=functools.partial(scaled, module, 0.5))
    recurrent = program.model.gru.forward
    program.set(program.model.gru, forward=lambda x: (0.5 * recurrent(x)[0], None))


@row()
def methods_of_the_models_class(program):
    kind = type(program.model)
    program.set(kind, forward=halved(kind.forward), seen=halved(kind.seen))


@row()
def forward_of_torchs_classes(program):
    for kind in (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.LeakyReLU, nn.Linear):
        program.set(kind, forward=halved(kind.forward))


@row()
def call_of_all_modules(program):
    """As wrapped by `torch.fx` and profilers."""
    call = nn.Module.__call__

    def counted(self, *args, **kwargs):
        program.seen.append(type(self))
        return call(self, *args, **kwargs)

    program.set(nn.Module, __call__=counted)


# --- classes ---


class Doubled:
    def forward(self, *args):
        return 2 * super().forward(*args)


class DoubledByCall:
    def __call__(self, *args):
        return 2 * super().__call__(*args)


def of_class(program, mixin, *modules):
    for module in modules:
        kind = type(module)
        program.undo.callback(setattr, module, "__class__", kind)
        module.__class__ = type(kind.__name__, (mixin, kind), {})


@row()
def class_with_another_forward(program):
    model = program.model
    modules = (model.batch_norm, model.silu, model.rms_norm, model.embedding, model.mlp[1], model.mlp[7], model.head)
    of_class(program, Doubled, *modules)
    for module, kind in ((model.relu, nn.Sigmoid), (model.mlp[8], nn.Softsign)):
        program.undo.callback(setattr, module, "__class__", type(module))
        module.__class__ = kind


@row()
def class_with_another_call(program):
    model = program.model
    of_class(program, DoubledByCall, model.group_norm, model.relu, model.layer_norm, model.mlp[2], model.mlp[4])


class Computed:
    """Hyperparameters that the class computes, although the instance has others."""

    eps = property(lambda self: 0.5)
    p = property(lambda self: 0.6)


@row()
def class_that_computes_hyperparameters(program):
    model = program.model
    of_class(program, Computed, model.batch_norm, model.group_norm, model.layer_norm, model.rms_norm, model.dropout)


# --- functions of torch ---

FUNCTIONS = (
    *((F, name) for name in ("relu", "silu", "leaky_relu", "gelu", "batch_norm", "group_norm", "layer_norm")),
    *((F, name) for name in ("rms_norm", "linear", "dropout", "embedding", "scaled_dot_product_attention", "conv2d")),
    *((torch, "relu"), (torch, "batch_norm"), (torch, "gru"), (torch.Tensor, "mean"), (F, "cross_entropy")),
)


class Wrapper:
    """Wraps functions of torch, as programs do: results are halved, and their properties recorded."""

    def __init__(self):
        self.noted = []

    def around(self, owner, name):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            out = original(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            self.noted.append((name, type(first), first.dtype, first.shape))
            return (0.5 * first, *out[1:]) if isinstance(out, tuple) else 0.5 * out

        return mock.patch.object(owner, name, call)

    def around_all(self):
        contexts = ExitStack()
        for owner, name in FUNCTIONS:
            contexts.enter_context(self.around(owner, name))
        return contexts


@row(without=IN_BF16 + IN_MODE)
def functions_wrapped_in_the_run(program):
    wrapper = Wrapper()
    program.within(wrapper.around_all())
    program.seen.append(wrapper.noted)


WRAPPER = Wrapper()


@row(before=WRAPPER.around_all, is_seen=False, without=IN_BF16 + IN_MODE)
def functions_wrapped_before_the_run(program):
    noted = len(WRAPPER.noted)
    program.undo.callback(lambda: program.seen.append(WRAPPER.noted[noted:]))


@row(is_seen=False, without=IN_BF16 + IN_MODE)
def every_function_of_torch_noted(program):
    """In forward and backward, an accelerated loop calls no torch function that the plain one does not."""
    called, is_noted = [], []

    def noting(owner, name):
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args, **kwargs):
            if is_noted:
                called.append(name)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    def noted(function):
        def call(*args):
            is_noted.append(True)
            out = function(*args)
            is_noted.clear()
            return out

        return call

    def loss(*args, computed=program.loss):
        out = computed(*args)
        out.register_hook(lambda _: is_noted.append(True))
        program.model.embedding.weight.register_post_accumulate_grad_hook(lambda _: is_noted.clear())
        return out

    for owner in (torch, F):
        for function in torch.overrides.get_overridable_functions()[owner]:
            name = getattr(function, "__name__", "")
            is_function = hasattr(owner, name) and not isinstance(function, type)
            if is_function and name != "empty_like":  # it computes nothing
                program.within(noting(owner, name))
    program.set(program, call=noted(program.call), loss=noted(program.loss))
    program.seen.append(called)


# --- hooks ---


@row()
def forward_hooks(program):
    def hook(module, _, out):
        out = out[0] if isinstance(out, tuple) else out
        program.seen.append((type(out), out.requires_grad, out.stride(), out.detach().abs().mean().item()))
        return None if module in recurrent or module is program.model.attention else 0.5 * out

    recurrent = (program.model.gru, program.model.lstm)
    for module in program.model.modules():
        if not [*module.children()]:
            program.undo.callback(module.register_forward_hook(hook).remove)


@row()
def forward_pre_hooks(program):
    for module in (program.model.batch_norm, program.model.relu, program.model.layer_norm, program.model.mlp[4]):
        program.undo.callback(module.register_forward_pre_hook(lambda _, inputs: (0.5 * inputs[0],)).remove)


@row()
def full_backward_hooks(program):
    def hook(_, of_inputs, of_outputs):
        program.seen.append(of_outputs[0].abs().mean().item())
        return tuple(None if each is None else 0.5 * each for each in of_inputs)

    for module in (program.model.batch_norm, program.model.silu, program.model.layer_norm, program.model.mlp[4]):
        program.undo.callback(module.register_full_backward_hook(hook).remove)
    for module in (program.model.group_norm, program.model.gelu, program.model.rms_norm, program.model.mlp[2]):
        handle = module.register_full_backward_pre_hook(lambda _, of_outputs: (0.5 * of_outputs[0],))
        program.undo.callback(handle.remove)


@row()
def tensor_hooks_of_weights(program):
    for parameter in program.model.parameters():
        program.undo.callback(parameter.register_hook(lambda gradient: 0.5 * gradient).remove)


@row()
def hooks_behind_accumulation(program):
    def halved_gradient(parameter):
        parameter.grad.mul_(0.5)

    for parameter in program.model.parameters():
        program.undo.callback(parameter.register_post_accumulate_grad_hook(halved_gradient).remove)


@row()
def tensor_hooks_of_outputs(program):
    """They see gradients between two layers, and change them; other tensors are kept."""
    kept = []

    def hook(_, __, out):
        if out.requires_grad:  # not in the validation
            out.register_hook(lambda gradient: 2 * gradient)
            out.retain_grad()
            kept.append(out)

    for module in (program.model.batch_norm, program.model.relu, program.model.layer_norm, program.model.mlp[0]):
        program.undo.callback(module.register_forward_hook(hook).remove)
    program.undo.callback(lambda: program.seen.extend(each.grad for each in kept))


@row(is_seen=False)
def hooks_of_saved_tensors(program):
    program.within(saved_tensors_hooks(lambda x: (x.dtype, x.double()), lambda packed: packed[1].to(packed[0])))


@row()
def state_dict_hooks(program):
    def hook(module, state, prefix, _):
        state[f"{prefix}head.bias"] = 2 * state[f"{prefix}head.bias"]

    program.undo.callback(program.model.register_state_dict_post_hook(hook).remove)
    program.undo.callback(lambda: program.model.load_state_dict(program.model.state_dict()))


@row()
def hooks_before_steps_of_optimizers(program):
    def scaled(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)

    for optimizer in program.optimizers:
        program.undo.callback(optimizer.register_step_pre_hook(scaled).remove)


@row()
def hooks_after_steps_of_optimizers(program):
    @torch.no_grad()
    def shrunk(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            program.seen.append(
                {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
            )
            for parameter in group["params"]:
                parameter.mul_(0.9)

    for optimizer in program.optimizers:
        program.undo.callback(optimizer.register_step_post_hook(shrunk).remove)


@row()
def outputs_changed_in_place(program):
    """For all layers whose output is not needed by torch's backward."""
    model, losses = program.model, functools.partial(F.cross_entropy, reduction="none")

    def hook(_, __, out):
        (out[0] if isinstance(out, tuple) else out).mul_(0.5)

    others = (model.convolution, model.embedding, model.queries, model.attention, model.gru, model.silu, model.head)
    for module in (*norms_of(model), *others):
        program.undo.callback(module.register_forward_hook(hook).remove)
    program.set(program, loss=lambda out, targets: losses(out, targets).mul_(0.5).mean())
