"""The accelerations, one a file, and the order in which they are applied."""

from __future__ import annotations

from nano_loop.steps.allocator import Allocator
from nano_loop.steps.broadcast import Broadcast
from nano_loop.steps.channels_last import ChannelsLast
from nano_loop.steps.compile import Compile
from nano_loop.steps.fast_attention import FastAttention
from nano_loop.steps.fast_convolution import FastConvolution
from nano_loop.steps.fast_dropout import FastDropout
from nano_loop.steps.fast_fetch import FastFetch
from nano_loop.steps.fused_optimizer import FusedOptimizer
from nano_loop.steps.gradient_averaging import GradientAveraging
from nano_loop.steps.ipex import Ipex
from nano_loop.steps.learning_rate import LearningRate
from nano_loop.steps.precision import Precision
from nano_loop.steps.sharding import Sharding
from nano_loop.steps.step import Step
from nano_loop.steps.threads import Threads

#: Applied from the first to the last, undone from the last to the first.
STEPS: tuple[type[Step], ...] = (
    Allocator,  # before anything allocates: what is allocated later stays with the process
    Threads,  # before anything is computed
    Broadcast,  # before anything re-lays what all ranks are to have
    ChannelsLast,  # parameters get their layout before optimizer state is laid out after them
    Ipex,  # its kernels, before anything is computed that a run compares with
    FusedOptimizer,  # once parameters lie still: its kernels need state and gradients of the same strides
    Precision,  # around the converted inputs, so that a conversion is done once, in fp32
    GradientAveraging,  # meets gradients, whatever computes them
    LearningRate,  # inside the fused step's hooks: what is multiplied is put back before they look
    FastDropout,  # anywhere: it meets the models' operators, not the models
    FastAttention,  # likewise
    FastConvolution,  # likewise
    Compile,  # what is compiled is called inside the entries that the steps above have made
    FastFetch,  # touches loaders alone
    Sharding,  # likewise: whose batches, where the one before is about how they are fetched
)

__all__ = ["STEPS", "GradientAveraging", "Step"]
