"""The operators whose algorithms are timed. A row for each is in `OPERATORS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nano_loop.autotune.algorithms import gradient_of_shape, leaf_of, with_gradients, without_gradients
from nano_loop.autotune.fp32_operators import FP32_OPERATORS, IN_FP32, some_rows
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, joined, layout, most_elements, rough
from nano_loop.autotune.tuned_operator import TunedOperator
from nano_loop.autotune.tuner import Algorithm, Race
from nano_loop.kernels import fp32
from nano_loop.kernels.attention import attention
from nano_loop.kernels.convolution import convolution, gradient_plans
from nano_loop.kernels.convolution.gradient_plans import Plan
from nano_loop.kernels.linear import linear
from nano_loop.kernels.replacement import Arguments
from nano_loop.kernels.rnn import rnn
from nano_loop.kernels.rnn.recurrent_layer import GATES, LSTM
from nano_loop.patching.torch_private import below_autocast
from nano_loop.policy import policy, products

#: Number of steps of an LSTM that are measured, or of multiplications if that is more steps: what a call takes besides
#: should not decide.
_STEPS, _MULTIPLICATIONS = 16, 1 << 26
#: How far results of rounded inputs may be from those in fp32. Sums of few numbers, or of such as cancel, differ most.
_ROUNDED = 2.0**-5
#: How many times as fast as in fp32 a product has to be to round. In a step, where inputs and results come from memory,
#: it gains less than when it is repeated.
_ROUNDING_PAYS = 1.2
_MATRIX = 2


# --- attention ---


def _attention_key(call: attention.Arguments) -> str:
    query, key, value = call[:3]
    sizes = [bucket(query.shape[:-3].numel()), *query.shape[-3:], "by", *key.shape[-3:], value.size(-1)]
    flags = ["causal"] * call.is_causal + ["dropout"] * (call.dropout_p > 0)
    mask = [] if call.mask is None else [str(call.mask.dtype).removeprefix("torch."), "mask"]
    return joined("attention", *sizes, *map(layout, call[:3]), *flags, *mask)


def _attention_race(call: attention.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    """Return the race without the dropout, which draws from the generator."""
    scores = call.query.numel() // max(call.query.size(-1), 1) * call.key.size(-2)
    if not 0 < max(most_elements(call[:3]), scores) <= MOST_ELEMENTS:
        return None
    gradient = gradient_of_shape(*call.query.shape[:-1], call.value.size(-1))

    def of(name: str, dtype: torch.dtype = torch.bfloat16) -> Algorithm:
        def algorithm() -> Sequence[Tensor]:
            leaves = [leaf_of(tensor, dtype) for tensor in call[:3]]
            mask = call.mask if call.mask is None or call.mask.dtype is torch.bool else call.mask.to(dtype)
            numbers = 0.0, call.is_causal, call.scale
            return with_gradients(lambda: algorithms[name](*leaves, mask, *numbers), leaves, gradient)

        return algorithm

    reference = of(attention.TORCH, torch.float32)
    return Race({name: of(name) for name in algorithms}, attention.TORCH, reference)


# --- gradients of convolutions ---


def _convolution_key(call: gradient_plans.Arguments) -> str:
    inputs, weight = call.inputs, call.weight
    geometry = [*call.stride, *call.padding, *call.dilation, *call.output_padding, call.groups]
    name = "transposed convolution" if call.transposed else "convolution"
    mask = "".join("x" if is_needed else "-" for is_needed in call.output_mask)
    sizes = [bucket(inputs.size(0)), *inputs.shape[1:], "to", *weight.shape]
    rounded = ["rounded"] * (weight.dtype is torch.float32)
    return joined("gradients of", name, *sizes, "by", *geometry, *map(layout, call[:3]), mask, *rounded)


def _convolution_race(call: gradient_plans.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    if not 0 < most_elements(call[:3]) <= MOST_ELEMENTS:
        return None
    needs_inputs, needs_weight, needs_bias = call.output_mask
    # What all algorithms compute alike is not timed.
    differ = len({name.partition("/")[0] for name in algorithms}) > 1
    timed = call._replace(output_mask=[needs_inputs and differ, needs_weight, needs_bias])

    def of(name: str) -> Algorithm:
        return lambda: [gradient for gradient in algorithms[name](*timed) if gradient is not None]

    def in_fp32() -> Sequence[Tensor]:
        wide = timed._replace(gradient=call.gradient.float(), inputs=call.inputs.float(), weight=call.weight.float())
        return [gradient for gradient in algorithms[Plan().name](*wide) if gradient is not None]

    race = {name: of(name) for name in algorithms}
    all_in_fp32 = Plan("fp32" if timed.output_mask[0] else "torch", "fp32" if needs_weight else "torch").name
    has_fp32 = any("fp32" in name for name in algorithms)
    # What rounds tensors in fp32 does that to those of the reference, too.
    reference = race.get(all_in_fp32, None if call.weight.dtype is torch.float32 else in_fp32)
    return Race(race, Plan().name, reference if has_fp32 else None)


# --- LSTMs that are oneDNN's ---


def _lstm_key(call: rnn.Arguments) -> str:
    first, second, size = call.inputs.shape
    sizes = bucket(first), bucket(second), size, call.num_layers, call.states[-1].size(-1)
    flags = ["batch first"] * call.batch_first + ["biases"] * call.has_biases + ["both directions"] * call.bidirectional
    return joined(call.products, "lstm", *sizes, *flags, "trained" * call.is_trained)


def _lstm_race(call: rnn.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    """Return the race without the dropout, which draws from the generator."""
    time = 1 if call.batch_first else 0
    steps = max(_STEPS, _MULTIPLICATIONS * call.inputs.size(time) // call.multiplications)
    inputs = call.inputs.narrow(time, 0, min(steps, call.inputs.size(time)))
    tensors, states = (inputs, *call.states, *call.weights), len(call.states)
    if most_elements(tensors) * GATES[LSTM] > MOST_ELEMENTS:
        return None
    gradient = gradient_of_shape(*inputs.shape[:2], call.states[0].size(-1) * (1 + call.bidirectional))

    def of(name: str, in_fp32: bool = False) -> Algorithm:
        def algorithm() -> Sequence[Tensor]:
            leaves = [leaf_of(tensor, torch.float32 if in_fp32 else tensor.dtype) for tensor in tensors]
            some = call._replace(inputs=leaves[0], states=(*leaves[1 : 1 + states],), weights=(*leaves[1 + states :],))

            def outputs() -> Tensor:
                computed: Tensor = algorithms[name](some._replace(dropout=0.0))[0]
                return computed

            with below_autocast() if in_fp32 else nullcontext(), torch.set_grad_enabled(call.is_trained):
                return with_gradients(outputs, leaves, gradient) if call.is_trained else [outputs()]

        return algorithm

    race = {name: of(name) for name in algorithms}
    if call.products == "fp32":
        return Race(race, fp32.TORCH, None, bound=IN_FP32, torchs_is_beaten=True)
    if call.products == "rounded":
        return Race(race, fp32.TORCH, None, bound=_ROUNDED)
    return Race(race, fp32.TORCH, of(fp32.TORCH, in_fp32=True))


# --- products of linear layers and of their gradients ---


def _product_key(call: Arguments) -> str:
    """Return the key, in which the number of rows of a batch, which is the depth of a gradient, is rough."""
    a, b, bias = call.arguments
    is_transposed = a.stride(1) != 1
    rows, depth = (a.size(0), bucket(a.size(1))) if is_transposed else (bucket(a.size(0)), a.size(1))
    order = f"{'T' if is_transposed else 'N'}{'N' if b.stride(1) == 1 else 'T'}"
    return joined("product", rows, "by", depth, "by", b.size(1), order, "" if bias is None else "plus a row")


def _product_race(call: Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race:
    a, b, bias = call.arguments
    return Race(without_gradients((some_rows(a, b), b, bias), algorithms), linear.TORCH, None)


# --- products that round the inputs of fp32, and those that do not ---


def _rounding_key(call: Arguments) -> str:
    if _is_of_matrices(call):
        return joined("rounded", _product_key(call), *call.numbers)
    tensors = [tensor for tensor in call.arguments if tensor is not None]
    sizes = [word for tensor in tensors for word in (rough(tensor.shape), layout(tensor))]
    return joined("rounded", call.operator, *sizes, *call.numbers)


def _is_of_matrices(call: Arguments) -> bool:
    """Whether a product is one of two matrices, to each row of which the same is added if anything is."""
    dimensions = [0 if tensor is None else tensor.dim() for tensor in call.arguments]
    return call.operator == policy.PRODUCT and dimensions[:2] == [_MATRIX] * 2 and dimensions[2] <= 1


def _rounding_race(call: Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    tensors = [*call.arguments]
    if _is_of_matrices(call):
        tensors[0] = some_rows(*tensors[:2])
    if not 0 < most_elements(tensor for tensor in tensors if tensor is not None) <= MOST_ELEMENTS:
        return None
    race = without_gradients(tensors, algorithms)
    return Race(race, products.FP32, None, bound=_ROUNDED, pays=_ROUNDING_PAYS, torchs_is_beaten=True)


OPERATORS = (
    TunedOperator(attention.ALGORITHM, _attention_key, _attention_race),
    TunedOperator(convolution.OPERATOR, _convolution_key, _convolution_race, has_gradients=True),
    TunedOperator(linear.ALGORITHM, _product_key, _product_race, has_gradients=True),
    TunedOperator(rnn.ALGORITHM, _lstm_key, _lstm_race),
    TunedOperator(products.ALGORITHM, _rounding_key, _rounding_race, has_gradients=True),
    *FP32_OPERATORS,
)
