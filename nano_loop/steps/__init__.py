"""The steps, one per module, and the order in which they are applied."""

from __future__ import annotations

from nano_loop.integrations.ipex import Ipex
from nano_loop.steps.allocator import Allocator
from nano_loop.steps.broadcast import Broadcast
from nano_loop.steps.channels_last import ChannelsLast
from nano_loop.steps.compile import Compile
from nano_loop.steps.fast_fetch import FastFetch
from nano_loop.steps.fast_images import FastImages
from nano_loop.steps.frozen_dtype import FrozenDtype
from nano_loop.steps.fused_optimizer import FusedOptimizer
from nano_loop.steps.gradient_averaging import GradientAveraging
from nano_loop.steps.kernel_table import KERNEL_STEPS
from nano_loop.steps.learning_rate import LearningRate
from nano_loop.steps.log_casts import LogCasts
from nano_loop.steps.op_lists import OperatorLists
from nano_loop.steps.optimizer_state import OptimizerState
from nano_loop.steps.parameter_dtype import ParameterDtype
from nano_loop.steps.precision import Precision
from nano_loop.steps.products import Products
from nano_loop.steps.sharding import Sharding
from nano_loop.steps.step import Step
from nano_loop.steps.step_time import StepTime
from nano_loop.steps.threads import Threads
from nano_loop.steps.tune_operators import TuneOperators
from nano_loop.steps.verify import Verify

#: Applied in this order and undone in reverse order.
STEPS: tuple[type[Step], ...] = (
    Verify,  # first, so that its wrapper is outermost and sees the inputs and outputs that the loop sees
    Allocator,  # before any allocation, since it affects later ones only
    Threads,  # before any computation
    Broadcast,  # before a step changes the layout of tensors that all ranks share
    ParameterDtype,  # before steps that inspect the parameters
    ChannelsLast,  # before FusedOptimizer, which gives optimizer state the layout of the parameters
    FrozenDtype,  # after ChannelsLast, and before Precision, which does not round bf16 weights
    Ipex,  # before any computation, since it replaces kernels
    OptimizerState,  # before FusedOptimizer, which skips optimizers that this step handles
    FusedOptimizer,  # after the layouts are final: its kernels need state and gradients with the parameters' strides
    Precision,  # after ChannelsLast, so that each input is converted once, in fp32
    Products,  # anywhere: it replaces kernels, and does not change models
    OperatorLists,  # anywhere: it affects computations under autocast
    GradientAveraging,  # anywhere: it hooks gradients, and does not change models
    LearningRate,  # after FusedOptimizer: it restores the learning rate before that step's hooks run
    *KERNEL_STEPS,  # before TuneOperators, which chooses their algorithms
    TuneOperators,  # after the kernels, whose default choices it replaces
    Compile,  # after the steps above, whose wrappers surround the compiled call
    FastFetch,  # anywhere: it affects loaders only
    FastImages,  # anywhere: it affects loaders only
    Sharding,  # anywhere: it affects loaders only
    LogCasts,  # after the steps with hooks at the end of an optimizer's step, so that it sees their casts
    StepTime,  # after all others: its result is the last line of the report
)

#: The steps that only affect loaders.
LOADER_STEPS = tuple(step for step in STEPS if step.needs == "loaders")

#: The steps of the witness, a process that computes whole batches as the plain loop does, in the run's precision.
WITNESS_STEPS: tuple[type[Step], ...] = (ParameterDtype, FrozenDtype, Precision, OperatorLists, GradientAveraging)
