"""The steps that only swap kernels, over one base class."""

from nano_loop.steps.kernels.fast_activation import FastActivation
from nano_loop.steps.kernels.fast_attention import FastAttention
from nano_loop.steps.kernels.fast_convolution import FastConvolution
from nano_loop.steps.kernels.fast_cross_entropy import FastCrossEntropy
from nano_loop.steps.kernels.fast_dropout import FastDropout
from nano_loop.steps.kernels.fast_embedding import FastEmbedding
from nano_loop.steps.kernels.fast_linear import FastLinear
from nano_loop.steps.kernels.fast_norm import FastNorm
from nano_loop.steps.kernels.fast_rnn import FastRnn

#: In any order.
KERNEL_STEPS = (
    *(FastDropout, FastAttention, FastActivation, FastConvolution, FastCrossEntropy, FastLinear, FastNorm),
    FastRnn,
    FastEmbedding,
)
