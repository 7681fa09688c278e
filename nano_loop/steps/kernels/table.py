"""The steps that only swap kernels: a row for each."""

from __future__ import annotations

from nano_loop.kernels.activation import activations
from nano_loop.kernels.attention import attention, blocked_attention, flash_attention, fp32_attention
from nano_loop.kernels.convolution import convolution, weight_gradient
from nano_loop.kernels.dropout import bernoulli
from nano_loop.kernels.embedding import lookup, row_gradient
from nano_loop.kernels.head import cross_entropy, head, layers
from nano_loop.kernels.linear import fp32_product, linear, product
from nano_loop.kernels.norm import norms, rms_norm
from nano_loop.kernels.rnn import recurrence, rnn
from nano_loop.steps.kernels import models
from nano_loop.steps.kernels.kernel_step import Kernels, Row
from nano_loop.steps.step import SkipReason

# torch's generator draws one number of a dropout's mask at a time. All masks and later random numbers stay what they
# are, so the kernel is replaced for all code: also that of functions, attention, and what was not set up.
DROPOUT = Row(
    "fast_dropout",
    Kernels(
        bernoulli.KERNEL,
        is_for=lambda model: True,
        says="torch's own masks, drawn as vectors",
        contexts=(bernoulli.vectorized_draws,),
    ),
    is_for_all_code=True,
)

# Under autocast, `scaled_dot_product_attention` is replaced, in fp32 torch's flash kernel and its backward.
ATTENTION = Row(
    "fast_attention",
    Kernels(
        blocked_attention.KERNEL,
        attention.OVERRIDES,
        is_for=models.has_attention,
        says="in blocks, by a kernel in C",
        absent=SkipReason("no_attention", "no attention was found in the model"),
    ),
    Kernels(
        fp32_attention.KERNEL,
        flash_attention.OVERRIDES,
        is_for=models.has_attention,
        says="in C where that is measured to be faster",
    ),
    finds_all=True,
)

# torch's hyperbolic tangent of bf16 is bound by its arithmetic, and takes three times as long and more.
ACTIVATION = Row(
    "fast_activation",
    Kernels(
        activations.KERNEL,
        activations.OVERRIDES,
        is_for=models.has_tanh,
        says="tanh, and GELU by tanh, in C",
    ),
)

# The backward of convolutions calls torch's kernel where that one is faster.
CONVOLUTION = Row(
    "fast_convolution",
    Kernels(
        weight_gradient.KERNEL,
        convolution.OVERRIDES,
        is_for=models.has_convolutions,
        says="weights' gradients in blocks, by bf16 instructions",
        says_without_kernel="weights' gradients by plain bf16 products where oneDNN is slow, since ",
        absent=SkipReason("no_convolution", "the model calls none of torch's convolutions"),
    ),
    finds_all=True,
)

# torch needs tensors of several times the size of the logits. Those of a large head are not computed but in chunks of
# rows. Logits that are there, of other shapes or with class weights, are torch's.
_CROSS_ENTROPY = Kernels(
    cross_entropy.KERNEL,
    (*cross_entropy.OVERRIDES, *layers.OVERRIDES),
    is_for=models.has_many_classes,
    says="one pass over the logits for the loss and its gradient, and of a large head in chunks of rows",
    absent=SkipReason("few_classes", f"no layer has {models.MANY_CLASSES:,} outputs or more"),
    contexts=(head.logits_kept,),
    remark=head.remark,
)
CROSS_ENTROPY = Row("fast_cross_entropy", _CROSS_ENTROPY, _CROSS_ENTROPY)

# Large products of bf16, and in fp32 those that were measured to be faster in C.
LINEAR = Row(
    "fast_linear",
    Kernels(
        product.KERNEL,
        linear.MATRICES,
        is_for=models.has_large_matrix,
        says="large products in blocks, by bf16 instructions",
    ),
    Kernels(
        fp32_product.KERNEL,
        linear.MATRICES,
        is_for=models.has_large_matrix_in_fp32,
        says="products in C where that is measured to be faster",
    ),
)

# Gains most where images are in NHWC: torch's backward of a group norm takes ten times as long there, and its batch
# norms reach a third of the memory's rate. Norms that are small or in another layout are torch's.
_NORM = Kernels(
    norms.KERNEL,
    (*norms.OVERRIDES, *rms_norm.OVERRIDES),
    is_for=models.has_norms,
    says="two passes over the tensors, forward and backward",
    absent=SkipReason("no_norm", "the model calls none of torch's norms"),
)
NORM = Row("fast_norm", _NORM, _NORM, finds_all=True)

# torch composes a GRU, an RNN, and an LSTM of packed sequences or with a projection, of about ten operators a step.
# Other LSTMs are oneDNN's, which is faster for some shapes.
_RNN = Kernels(
    recurrence.KERNEL,
    rnn.OVERRIDES,
    is_for=models.has_recurrent_layers,
    says="recurrences in C, products over all steps",
    contexts=(rnn.denormals_flushed,),
)
RNN = Row("fast_rnn", _RNN, _RNN, finds_all=True)

# A step looks up few rows of a large table, and torch fills and adds tensors of the table's size. Fused steps of
# optimizers then update the rows that change (see `nano_loop.optimizers.row_steps`).
_EMBEDDING = Kernels(
    row_gradient.KERNEL,
    lookup.OVERRIDES,
    is_for=models.has_large_tables,
    says="gradients of rows, in a tensor that stays",
    contexts=(row_gradient.row_gradients_kept,),
)
EMBEDDING = Row("fast_embedding", _EMBEDDING, _EMBEDDING)

#: In any order.
ROWS = (DROPOUT, ATTENTION, ACTIVATION, CONVOLUTION, CROSS_ENTROPY, LINEAR, NORM, RNN, EMBEDDING)
