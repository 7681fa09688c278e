"""Changes of attributes of each kind of layer, and layers that are added or removed."""

import torch
from torch import nn

from .table import row


def norms_of(model):
    return model.batch_norm, model.group_norm, model.rms_norm, model.layer_norm, model.mlp[1], model.mlp[5]


@row()
def numbers_of_layers(program):
    model = program.model
    for norm in norms_of(model):
        program.set(norm, eps=0.5)
    program.set(model.batch_norm, momentum=0.5)
    program.set(model.mlp[1], momentum=None)
    program.set(model.group_norm, num_groups=2)
    program.set(model.mlp[2], negative_slope=0.5)
    program.set(model.mlp[6], alpha=0.3)
    program.set(model.gelu, approximate="tanh")
    program.set(model.convolution, stride=(2, 1), padding=(0, 2), dilation=(2, 1))
    program.set(model.depthwise, padding="same")


@row()
def track_running_stats(program):
    """As torch's `update_bn` and users of `torchvision` do: the statistics are those of the batch."""
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        program.set(norm, track_running_stats=False)


@row()
def no_running_statistics(program):
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None


@row()
def running_statistics_written(program):
    program.model.batch_norm.reset_running_stats()
    program.model.mlp[1].running_mean.fill_(0.3)
    program.model.mlp[1].running_var = torch.full((32,), 2.0)


@row()
def p_of_dropouts(program):
    program.set(program.model.dropout, p=0.6)
    program.set(program.model.mlp[3], p=1.0)
    program.set(program.model.gru, dropout=0.6)
    program.set(program.model.attention, dropout=0.6)


@row(is_seen=False)
def inplace(program):
    for module in (program.model.relu, program.model.silu, program.model.dropout, program.model.mlp[2]):
        program.set(module, inplace=True)


@row()
def num_layers_of_a_gru(program):
    """Its other weights stay on the module: the accelerated loop must raise torch's error, or compute its values."""
    program.set(program.model.gru, num_layers=1)


@row()
def padding_idx_of_an_embedding(program):
    program.set(program.model.embedding, padding_idx=int(program.loader.dataset.words[0, 0]))


@row()
def sparse_of_an_embedding(program):
    """AdamW rejects sparse gradients, which ends the loop."""
    program.set(program.model.embedding, sparse=True)


@row()
def layers_exchanged(program):
    norm = program.model.batch_norm
    program.model.batch_norm = nn.InstanceNorm2d(16, affine=True)
    program.model.batch_norm.weight, program.model.batch_norm.bias = norm.weight, norm.bias
    program.model.relu, program.model.mlp[8] = nn.Softplus(), nn.Sigmoid()


@row()
def a_layer_taken_out(program):
    norm = program.model.mlp[5]
    program.model.mlp[5] = nn.Identity()
    program.undo.callback(program.model.mlp.__setitem__, 5, norm)


@row()
def a_layer_put_in(program):
    torch.manual_seed(3)
    program.model.mlp.insert(4, nn.Linear(32, 32))
    program.adagrad.add_param_group({"params": [*program.model.mlp[4].parameters()]})
