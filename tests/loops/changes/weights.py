"""Weights that get other values, tensors, shapes, strides and dtypes."""

import copy

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters

from .layers import norms_of
from .table import row

#: The configs in which a model by hand has weights in NHWC.
CHANNELS_LAST = ("channels_last-fused", "channels_last-as-shipped")


def weights_of(model):
    """Return a weight of each kind of layer, all of whose elements may be changed."""
    products = (model.queries, model.mlp[0], model.mlp[4], model.head)
    others = (model.convolution, model.depthwise, model.embedding, *products)
    return [module.weight for module in (*norms_of(model), *others)] + [model.gru.weight_hh_l0, model.lstm.weight_ih_l0]


def in_group(optimizer, parameter, other):
    """Let an optimizer train another parameter, with the old one's state cut to its shape."""
    for group in optimizer.param_groups:
        group["params"] = [other if each is parameter else each for each in group["params"]]
    for name, value in optimizer.state.pop(parameter).items():
        is_like = torch.is_tensor(value) and value.shape == parameter.shape
        optimizer.state[other][name] = value[tuple(map(slice, other.shape))].clone() if is_like else value


# --- values ---


@row()
def data_set(program):
    for weight in weights_of(program.model):
        weight.data = 0.5 * weight.data


@row()
def copied_into(program):
    with torch.no_grad():
        for weight in weights_of(program.model):
            weight.copy_(weight.flip(0))


@row(without=CHANNELS_LAST)  # by hand, weights are channels_last, so they cannot be views of a vector
def memory_shared(program):
    vector_to_parameters(0.9 * parameters_to_vector(program.model.parameters()), program.model.parameters())


@row()
def set_to_another_tensor(program):
    with torch.no_grad():
        for weight in weights_of(program.model):
            weight.set_(0.5 * weight)


@row()
def state_loaded(program):
    state = copy.deepcopy(program.model.state_dict())
    program.undo.callback(lambda: program.model.load_state_dict(state))


@row()
def swapped(program):
    """Trained, frozen and tied weights, a large table, and moments of optimizers."""
    model = program.model
    model.head.requires_grad_(False)
    program.undo.callback(model.head.requires_grad_, True)
    model.mlp[7].weight = model.mlp[4].weight
    moments = [state["sum"] for state in program.adagrad.state.values()]
    # Recurrent layers refuse: they have weak references to their own weights.
    modules = [module for module in model.children() if not isinstance(module, nn.RNNBase)]
    weights = [weight for module in modules for weight in module.parameters()]
    for tensor in (*weights, *moments):
        other = 0.5 * tensor.detach()
        is_weight = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(other, tensor.requires_grad) if is_weight else other)


@row(is_seen=False)
def state_assigned(program):
    """The model then has other parameters, which the optimizers get by name."""
    before = dict(program.model.named_parameters())
    program.model.load_state_dict(copy.deepcopy(program.model.state_dict()), assign=True)
    for name, parameter in program.model.named_parameters():
        for optimizer in program.optimizers:
            if before[name] in optimizer.state:
                in_group(optimizer, before[name], parameter)


# --- parameters ---


@row()
def a_new_parameter(program):
    for module, optimizer in (
        *((program.model.batch_norm, program.sgd), (program.model.layer_norm, program.adamw)),
        *((program.model.embedding, program.adamw), (program.model.mlp[4], program.adagrad)),
    ):
        before = module.weight
        module.weight = nn.Parameter(0.5 * before.detach())
        in_group(optimizer, before, module.weight)


@row()
def frozen(program):
    """Layers without gradients in two steps, as in training by phases."""
    model = program.model
    for module in (model.batch_norm, model.convolution, model.embedding, model.gru, model.mlp):
        module.requires_grad_(False)
        program.undo.callback(module.requires_grad_, True)


@row()
def tied(program):
    program.model.mlp[7].weight = program.model.mlp[4].weight
    program.model.mlp[1].weight = program.model.mlp[5].weight
    program.model.gru.weight_ih_l1 = program.model.gru.weight_ih_l0


@row(without=CHANNELS_LAST)  # see above
def pruned(program):
    for module in (program.model.mlp[4], program.model.convolution, program.model.layer_norm, program.model.mlp[1]):
        prune.l1_unstructured(module, "weight", amount=0.3)
        program.undo.callback(prune.remove, module, "weight")


class Squared(nn.Module):
    def forward(self, weight):
        return weight.square()


@row()
def parametrized(program):
    for module in (program.model.mlp[4], program.model.batch_norm, program.model.mlp[5], program.model.head):
        parametrize.register_parametrization(module, "weight", Squared())
        program.undo.callback(parametrize.remove_parametrizations, module, "weight")


@row()
def weight_norm(program):
    model = program.model
    for module, name in ((model.mlp[7], "weight"), (model.queries, "weight"), (model.gru, "weight_hh_l0")):
        parametrizations.weight_norm(module, name)
        program.adagrad.add_param_group({"params": [*module.parametrizations.parameters()]})
        program.undo.callback(parametrize.remove_parametrizations, module, name)


# --- shapes and strides ---


@row()
def a_slice_with_gaps(program):
    """As in width pruning: shorter rows of the old weight, in its memory."""
    model = program.model
    for weight in (model.mlp[7].weight, model.mlp[4].weight):
        weight.data = weight.data[:, :20]
        weight.grad = None
        for value in program.adagrad.state[weight].values():
            if value.dim():
                value.data = value.data[:, :20]
    for module in (model.mlp[3], model.mlp[6]):
        module.register_forward_hook(lambda _, __, out: out[:, :20])


@row()
def a_new_parameter_with_gaps(program):
    """The optimizer continues with it; the memory around it is checked."""
    generator = torch.Generator().manual_seed(2)
    table, image = torch.randn(32, 40, generator=generator) / 6, torch.rand(16, 16, generator=generator)
    for module, weight, optimizer in (
        (program.model.mlp[4], table[:, 4:36], program.adagrad),
        (program.model.batch_norm, image[:, 3], program.sgd),
    ):
        before = module.weight
        module.weight = nn.Parameter(weight)
        in_group(optimizer, before, module.weight)
    program.seen += [table, image]  # in their final state


@row(is_seen=False)
def transposed(program):
    model = program.model
    recurrent = (model.gru.weight_hh_l0, model.lstm.weight_ih_l0)
    for weight in (model.queries.weight, model.mlp[4].weight, model.head.weight, model.embedding.weight, *recurrent):
        weight.data = weight.data.t().contiguous().t()


@row(is_seen=False)
def weights_in_channels_last(program):
    program.model.to(memory_format=torch.channels_last)
    program.undo.callback(program.model.to, memory_format=torch.contiguous_format)


@row(is_seen=False)
def images_in_channels_last(program):
    call = program.call
    program.set(program, call=lambda images, words: call(images.contiguous(memory_format=torch.channels_last), words))


@row()
def a_narrower_layer(program):
    mlp = program.model.mlp
    for name, place, shape in (
        ("weight", 4, (20, 32)),
        ("bias", 4, (20,)),
        ("weight", 5, (20,)),
        ("bias", 5, (20,)),
        ("weight", 7, (32, 20)),
    ):
        before = getattr(mlp[place], name)
        other = nn.Parameter(before.detach()[tuple(map(slice, shape))].clone())
        setattr(mlp[place], name, other)
        in_group(program.adagrad, before, other)
    mlp[5].normalized_shape = (20,)
