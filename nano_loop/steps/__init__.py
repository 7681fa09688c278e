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
from nano_loop.steps.kernels import KERNEL_STEPS
from nano_loop.steps.learning_rate import LearningRate
from nano_loop.steps.log_casts import LogCasts
from nano_loop.steps.num_threads import NumThreads
from nano_loop.steps.op_lists import OperatorLists
from nano_loop.steps.optimizer_state import OptimizerState
from nano_loop.steps.parameter_dtype import ParameterDtype
from nano_loop.steps.precision import Precision
from nano_loop.steps.products import Products
from nano_loop.steps.sharding import Sharding
from nano_loop.steps.step import Step, StepContext
from nano_loop.steps.step_time import StepTime
from nano_loop.steps.threads import Threads
from nano_loop.steps.tune_operators import TuneOperators
from nano_loop.steps.verify import Verify

#: Applied in this order and undone in reverse order.
STEPS: tuple[type[Step], ...] = (
    Verify,  # first, so that its layer surrounds all others, and sees inputs and outputs as the loop does
    Allocator,  # before any allocation, since it affects later ones only
    Threads,  # before any computation
    Broadcast,  # before a step changes the layout of tensors that all ranks share
    ParameterDtype,  # before a step looks at the parameters
    ChannelsLast,  # before FusedOptimizer, which lays out optimizer state like the parameters
    FrozenDtype,  # after ChannelsLast, and before Precision, which rounds no weight that is bf16
    Ipex,  # before any computation, since it replaces kernels
    OptimizerState,  # before FusedOptimizer, which leaves alone what this steps
    FusedOptimizer,  # after the layouts are final: its kernels need state and gradients with the parameters' strides
    Precision,  # after ChannelsLast, so that each input is converted once, in fp32
    Products,  # in any place: it swaps kernels, not models
    OperatorLists,  # in any place: it affects what is computed under autocast
    GradientAveraging,  # in any place: it hooks gradients, not models
    LearningRate,  # after FusedOptimizer: it restores the learning rate before that step's hooks run
    *KERNEL_STEPS,  # before TuneOperators, which chooses their algorithms
    TuneOperators,  # after the kernels, whose choices by rules it replaces
    Compile,  # after the steps above, whose layers surround the compiled call
    FastFetch,  # in any place: it affects loaders only
    FastImages,  # in any place: it affects loaders only
    Sharding,  # likewise
    NumThreads,  # after Threads, whose number it begins with
    LogCasts,  # after the steps with hooks at the end of an optimizer's step, so that it sees what they do
    StepTime,  # after all others: its result is the last line of the report
)

#: Those that only affect loaders.
LOADER_STEPS = tuple(step for step in STEPS if step.needs == "loaders")

#: Those of the witness of ranks that share batches: it computes as the plain loop does, in the precision asked for.
WITNESS_STEPS: tuple[type[Step], ...] = (ParameterDtype, FrozenDtype, Precision, OperatorLists, GradientAveraging)

__all__ = [
    "LOADER_STEPS",
    "STEPS",
    "WITNESS_STEPS",
    "GradientAveraging",
    "OptimizerState",
    "ParameterDtype",
    "Precision",
    "Step",
    "StepContext",
    "Verify",
]
