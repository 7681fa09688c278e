"""Attributes of each kind of layer, and layers that come and go."""

import torch
from torch import nn

from .table import row


def norms_of(model):
    """All norms of the model."""
    return model.batch_norm, model.group_norm, model.rms_norm, model.layer_norm, model.mlp[1], model.mlp[5]


@row()
def eps_of_norms(program):
    for norm in norms_of(program.model):
        program.set(norm, eps=0.5)


@row()
def momentum_and_groups_of_norms(program):
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        program.set(norm, momentum=0.5)
    program.set(program.model.group_norm, num_groups=2)


@row(repeats=True)
def no_momentum_of_batch_norms(program):
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        program.set(norm, momentum=None)


@row()
def track_running_stats(program):
    """As torch's own `update_bn` and `torchvision` users do: the statistics are those of the batch."""
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        program.set(norm, track_running_stats=False)


@row()
def no_running_statistics(program):
    for norm in (program.model.batch_norm, program.model.mlp[1]):
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None


@row(repeats=True)
def running_statistics_reset(program):
    program.model.batch_norm.reset_running_stats()
    program.model.mlp[1].running_var = torch.full((32,), 2.0)


@row()
def numbers_of_activations(program):
    program.set(program.model.mlp[2], negative_slope=0.5)
    program.set(program.model.mlp[6], alpha=0.3)
    program.set(program.model.gelu, approximate="tanh")


@row()
def p_of_dropouts(program):
    program.set(program.model.dropout, p=0.6)
    program.set(program.model.mlp[3], p=0.0)
    program.set(program.model.gru, dropout=0.6)
    program.set(program.model.attention, dropout=0.6)


@row(repeats=True)
def p_of_dropouts_is_1(program):
    program.set(program.model.mlp[3], p=1.0)


@row(is_seen=False)
def inplace(program):
    for module in (program.model.relu, program.model.silu, program.model.dropout, program.model.mlp[2]):
        program.set(module, inplace=True)


@row()
def stride_and_padding_of_convolutions(program):
    program.set(program.model.convolution, stride=(2, 1), padding=(0, 2))
    program.set(program.model.depthwise, padding="same")


@row(repeats=True)
def padding_mode_of_a_convolution(program):
    program.set(program.model.convolution, padding_mode="circular", _reversed_padding_repeated_twice=[1, 1, 1, 1])


@row(repeats=True)
def dilation_of_a_convolution(program):
    program.set(program.model.convolution, dilation=(2, 1))


@row()
def num_layers_of_a_gru(program):
    """Its other weights stay where they are: torch's error, or numbers, are those of the accelerated loop."""
    program.set(program.model.gru, num_layers=1)


@row(repeats=True)
def batch_first_of_an_lstm(program):
    program.set(program.model.lstm, batch_first=False)


@row()
def padding_idx_of_an_embedding(program):
    program.set(program.model.embedding, padding_idx=int(program.loader.dataset.words[0, 0]))


@row(repeats=True)
def max_norm_of_an_embedding(program):
    program.set(program.model.embedding, max_norm=1.0)


@row(repeats=True)
def scale_grad_by_freq_of_an_embedding(program):
    program.loader.dataset.words[:, 1] = program.loader.dataset.words[:, 0]
    program.set(program.model.embedding, scale_grad_by_freq=True)


@row()
def sparse_of_an_embedding(program):
    """AdamW refuses sparse gradients, and so ends the loop."""
    program.set(program.model.embedding, sparse=True)


@row(repeats=True)
def num_heads_of_an_attention(program):
    program.set(program.model.attention, num_heads=4, head_dim=8)


@row()
def a_layer_exchanged(program):
    program.model.relu, program.model.mlp[8] = nn.Softplus(), nn.Sigmoid()


@row()
def a_layer_taken_out(program):
    """A norm between two layers goes, and later comes back."""
    norm = program.model.mlp[5]
    program.model.mlp[5] = nn.Identity()
    program.undo.callback(program.model.mlp.__setitem__, 5, norm)


@row()
def a_layer_put_in(program):
    torch.manual_seed(3)
    program.model.mlp.insert(4, nn.Linear(32, 32))
    program.adagrad.add_param_group({"params": [*program.model.mlp[4].parameters()]})


@row(repeats=True)
def a_norm_of_another_kind(program):
    norm = program.model.batch_norm
    program.model.batch_norm = nn.InstanceNorm2d(16, affine=True)
    program.model.batch_norm.weight, program.model.batch_norm.bias = norm.weight, norm.bias
