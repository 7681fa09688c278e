"""The operators whose algorithms are timed, and the choice of an algorithm for a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.autotune.decisions import Decision, Decisions, measure_or_guess
from nano_loop.autotune.hooks import none_for_saved_tensors
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, layout, most_elements
from nano_loop.autotune.tuner import Algorithm, Race, Tuner
from nano_loop.kernels import fp32, rounding
from nano_loop.kernels.activation import activations
from nano_loop.kernels.attention import attention
from nano_loop.kernels.convolution import convolution
from nano_loop.kernels.convolution.convolution import Plan
from nano_loop.kernels.linear import linear
from nano_loop.kernels.loss import cross_entropy
from nano_loop.kernels.memory import UnsupportedTensorError
from nano_loop.kernels.norm import norms
from nano_loop.kernels.replacement import Algorithms, Choose
from nano_loop.kernels.rnn import lstm, lstm_layer, rnn
from nano_loop.patching.walk import find

#: Minimum number of rows of a product that are measured.
_MIN_ROWS = 64
#: Number of steps of an LSTM that are measured, or of multiplications if that is more steps: what a call takes besides
#: should not decide.
_STEPS, _MULTIPLICATIONS = 16, 1 << 26
#: How far results of rounded inputs may be from those in fp32. Sums of few numbers, or of such as cancel, differ most.
_ROUNDED = 2.0**-5
#: How many times as fast as in fp32 a product has to be to round. In a step, where inputs and results come from memory,
#: it gains less than when it is repeated.
_ROUNDING_PAYS = 1.2
#: How far results of functions for fp32 may be from those of torch, for both round sums of many numbers.
_IN_FP32 = 2.0**-12
#: Seconds that Python takes to ask for the algorithm of a call in fp32, which torch's kernel alone would not take.
_OVERHEAD = 8e-6
_MATRIX = 2
#: What `_kind` looks into.
_COMPOSED = (Tensor, tuple, list, float)
#: Plain products, the first guess for attention where there are no blocks, have up to 1.5 times the error of torch's.
_AS_EXACT = 1.6


class TunedOperator(NamedTuple):
    """An operator with several algorithms.

    Attributes
    ----------
    rule : str
        The name of the rule by which its kernel asks for the algorithm of a call.
    key : callable
        Takes a call. Returns what the fastest algorithm depends on, in words.
    race : callable
        Takes a call and its algorithms by name. Returns the race between them, or None for a call that is not measured.
    has_gradients : bool
        Whether calls in a backward may be those of gradients, and not only of layers that a checkpoint calls again.
    """

    rule: str
    key: Callable[[Any], str]
    race: Callable[[Any, Mapping[str, Callable[..., Any]]], Race | None]
    has_gradients: bool = False

    def chooser(self, tuner: Tuner) -> Choose:
        """Return the rule of a model, which remembers what was decided about the model's calls."""
        decisions = Decisions(tuner, self.has_gradients)

        def choose(call: Any, algorithms: Algorithms, guess: str) -> str:
            return decisions.algorithm(
                _kind(call),
                lambda: guess,
                lambda: self._decision(tuner, call, algorithms(), guess),
                lambda: self._stored(tuner, call, algorithms()),
            )

        return choose

    def _stored(self, tuner: Tuner, call: Any, algorithms: Mapping[str, Callable[..., Any]]) -> str | None:
        choice = tuner.choices.get(self.key(call)) if self.race(call, algorithms) is not None else None
        return choice.algorithm if choice is not None and choice.algorithm in algorithms else None

    def _decision(self, tuner: Tuner, call: Any, algorithms: Mapping[str, Callable[..., Any]], guess: str) -> Decision:
        race = self.race(call, algorithms) if len(algorithms) > 1 else None
        if race is None:
            return Decision(guess)
        decision = measure_or_guess(guess, lambda: tuner.choose(self.key(call), guess, lambda: race))
        # A choice of another version may be none here.
        return decision if decision.algorithm in algorithms else Decision(guess)


def _kind(value: Any) -> Hashable:
    """Return what calls have in common that are computed alike."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_kind(part) if isinstance(part, _COMPOSED) else part for part in value])
    return value != 0 if isinstance(value, float) else value


def _with_gradients(compute: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """Return an output and the gradients of leaves."""
    with torch.enable_grad(), none_for_saved_tensors():
        out = compute()
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


def _gradient(*shape: int) -> Tensor:
    """Return a gradient of an output, with different numbers in each row."""
    row = torch.linspace(-1, 1, shape[-1], dtype=torch.bfloat16, device="cpu").sin_()
    return row.expand(shape).contiguous()


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_()


def _joined(*values: object) -> str:
    return " ".join(map(str, values)).rstrip()


# --- attention ---


def _attention_key(call: attention.Arguments) -> str:
    query, key, value = call[:3]
    sizes = [bucket(query.shape[:-3].numel()), *query.shape[-3:], "by", *key.shape[-3:], value.size(-1)]
    flags = ["causal"] * call.is_causal + ["dropout"] * (call.dropout_p > 0)
    mask = [] if call.mask is None else [str(call.mask.dtype).removeprefix("torch."), "mask"]
    return _joined("attention", *sizes, *map(layout, call[:3]), *flags, *mask)


def _attention_race(call: attention.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    """Return the race without the dropout, which draws from the generator."""
    scores = call.query.numel() // max(call.query.size(-1), 1) * call.key.size(-2)
    if not 0 < max(most_elements(call[:3]), scores) <= MOST_ELEMENTS:
        return None
    gradient = _gradient(*call.query.shape[:-1], call.value.size(-1))

    def of(name: str, dtype: torch.dtype = torch.bfloat16) -> Algorithm:
        def algorithm() -> Sequence[Tensor]:
            leaves = [_leaf(tensor, dtype) for tensor in call[:3]]
            mask = call.mask if call.mask is None or call.mask.dtype is torch.bool else call.mask.to(dtype)
            numbers = 0.0, call.is_causal, call.scale
            return _with_gradients(lambda: algorithms[name](*leaves, mask, *numbers), leaves, gradient)

        return algorithm

    reference = of(attention.TORCH, torch.float32)
    return Race({name: of(name) for name in algorithms}, attention.TORCH, reference, _AS_EXACT)


# --- gradients of convolutions ---


def _convolution_key(call: convolution.Arguments) -> str:
    inputs, weight = call.inputs, call.weight
    geometry = [*call.stride, *call.padding, *call.dilation, *call.output_padding, call.groups]
    name = "transposed convolution" if call.transposed else "convolution"
    mask = "".join("x" if is_needed else "-" for is_needed in call.output_mask)
    sizes = [bucket(inputs.size(0)), *inputs.shape[1:], "to", *weight.shape]
    return _joined("gradients of", name, *sizes, "by", *geometry, *map(layout, call[:3]), mask)


def _convolution_race(call: convolution.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
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
    return Race(race, Plan().name, race.get(all_in_fp32, in_fp32) if has_fp32 else None)


# --- layers of LSTMs ---


def _lstm_key(call: lstm_layer.Arguments) -> str:
    steps, batch, size = call.inputs.shape
    flags = ["biases"] * bool(call.biases) + ["reversed"] * call.is_reversed + ["fp32"] * _rounds(call.inputs)
    return _joined("lstm", bucket(steps), bucket(batch), size, call.output.size(1), *flags)


def _lstm_race(call: lstm_layer.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    weights = call.input_weight.numel() + call.hidden_weight.numel()
    steps = max(_STEPS, _MULTIPLICATIONS // (call.inputs.size(1) * weights))
    some = call._replace(inputs=call.inputs[:steps])
    if most_elements(some.tensors) * lstm_layer.GATES > MOST_ELEMENTS:
        return None
    gradient = _gradient(*some.inputs.shape[:2], some.output.size(1))

    def of(name: str, dtype: torch.dtype = call.inputs.dtype) -> Algorithm:
        def algorithm() -> Sequence[Tensor]:
            inputs, input_weight, hidden_weight, *biases, output, cells = (_leaf(one, dtype) for one in some.tensors)
            biases = biases if some.biases else []
            leaves = [inputs, input_weight, hidden_weight, *biases, output, cells]
            tensors = inputs, input_weight, hidden_weight, tuple(biases), output, cells
            return _with_gradients(lambda: algorithms[name](*tensors, some.is_reversed)[0], leaves, gradient)

        return algorithm

    race = {name: of(name) for name in algorithms}
    if _rounds(call.inputs):
        return Race(race, lstm.TORCH, None, bound=_ROUNDED)
    return Race(race, lstm.TORCH, of(lstm.TORCH, torch.float32))


def _rounds(inputs: Tensor) -> bool:
    """Whether what blocks compute rounds its inputs."""
    return inputs.dtype is torch.float32


# --- products of linear layers and of their gradients ---


def _product_key(call: linear.Arguments) -> str:
    """Return the key, in which the number of rows of a batch, which is the depth of a gradient, is rough."""
    a, b, bias = call
    is_transposed = a.stride(1) != 1
    rows, depth = (a.size(0), bucket(a.size(1))) if is_transposed else (bucket(a.size(0)), a.size(1))
    order = f"{'T' if is_transposed else 'N'}{'N' if b.stride(1) == 1 else 'T'}"
    return _joined("product", rows, "by", depth, "by", b.size(1), order, "" if bias is None else "plus a row")


def _product_race(call: linear.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race:
    some = call._replace(a=_some_rows(call.a, call.b))
    return Race(_on(some, algorithms), linear.TORCH, None)


def _some_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return some rows of a matrix, for a product of a vocabulary's layer, whose result takes memory."""
    return a[: max(MOST_ELEMENTS // b.size(-1), _MIN_ROWS)]


def _on(tensors: Iterable[Tensor | None], algorithms: Mapping[str, Callable[..., Any]]) -> dict[str, Algorithm]:
    """Return algorithms that compute from these tensors, without gradients."""

    def of(name: str) -> Algorithm:
        @torch.no_grad()
        def algorithm() -> Sequence[Tensor]:
            results = algorithms[name](*tensors)
            return [*find(Tensor, results)]

        return algorithm

    return {name: of(name) for name in algorithms}


# --- products that round the inputs of fp32, and those that do not ---


def _rounding_key(call: rounding.Arguments) -> str:
    tensors = [tensor for tensor in call.tensors if tensor is not None]
    if _is_of_matrices(call):
        return _joined("rounded", _product_key(linear.Arguments(*call.tensors)), *call.numbers)  # type: ignore[arg-type]
    sizes = [word for tensor in tensors for word in (_rough(tensor.shape), layout(tensor))]
    return _joined("rounded", call.kind, *sizes, *call.numbers)


def _is_of_matrices(call: rounding.Arguments) -> bool:
    """Whether a product is one of two matrices, to each row of which the same is added if anything is."""
    dimensions = [0 if tensor is None else tensor.dim() for tensor in call.tensors]
    return call.kind == rounding.PRODUCT and dimensions[:2] == [_MATRIX] * 2 and dimensions[2] <= 1


def _rough(shape: torch.Size) -> str:
    """Return sizes of which the first one, which may be that of a batch, is rough."""
    return "x".join([*(bucket(size) for size in shape[:1]), *map(str, shape[1:])])


def _rounding_race(call: rounding.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    tensors = [*call.tensors]
    if _is_of_matrices(call):
        tensors[0] = _some_rows(*tensors[:2])  # type: ignore[arg-type]
    if not 0 < most_elements(tensor for tensor in tensors if tensor is not None) <= MOST_ELEMENTS:
        return None
    race = _on(tensors, algorithms)
    return Race(race, rounding.FP32, None, bound=_ROUNDED, pays=_ROUNDING_PAYS, torchs_is_beaten=True)


# --- operators of fp32 tensors, by torch and by C functions ---


def _fp32_key(call: fp32.Arguments) -> str:
    words = [word for argument in call.arguments for word in _in_words(argument)]
    return _joined("fp32", call.operator, *words)


def _in_words(argument: Any) -> Iterator[object]:
    """Yield what the time of a call depends on: of a tensor its sizes and its layout, and no factor."""
    if isinstance(argument, Tensor):
        yield from (_rough(argument.shape), layout(argument))
    elif not isinstance(argument, float):
        yield "-" if argument is None else str(argument).replace(" ", "")


def _fp32_race(call: fp32.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    arguments = [*call.arguments]
    if call.is_differentiated:  # the loss of a vocabulary's logits, of which some rows are measured
        rows = max(MOST_ELEMENTS // max(arguments[0][0].numel(), 1), 1)
        arguments[:2] = [tensor[:rows] for tensor in arguments[:2]]
    if not 0 < most_elements(tensor for tensor in arguments if isinstance(tensor, Tensor)) <= MOST_ELEMENTS:
        return None

    def of(name: str) -> Algorithm:
        def computed(*values: Any) -> Any:
            results = algorithms[name](*values)
            if results is None:
                raise UnsupportedTensorError(f"{call.operator} is left to torch")
            return results

        def with_gradient() -> Sequence[Tensor]:
            leaf = _leaf(arguments[0], torch.float32)
            return _with_gradients(lambda: computed(leaf, *arguments[1:]).sum(), [leaf], torch.ones((), device="cpu"))

        return with_gradient if call.is_differentiated else _on(arguments, {name: computed})[name]

    race = {name: of(name) for name in algorithms}
    return Race(race, fp32.TORCH, None, bound=_IN_FP32, torchs_is_beaten=True, overhead=_OVERHEAD)


# --- LSTMs of fp32 tensors ---


def _layers_key(call: rnn.Arguments) -> str:
    first, second, size = call.inputs.shape
    sizes = bucket(first), bucket(second), size, call.num_layers, call.states[-1].size(-1)
    flags = ["batch first"] * call.batch_first + ["biases"] * call.has_biases + ["both directions"] * call.bidirectional
    return _joined("fp32 layers of an lstm", *sizes, *flags, "trained" * call.is_trained)


def _layers_race(call: rnn.Arguments, algorithms: Mapping[str, Callable[..., Any]]) -> Race | None:
    """Return the race without the dropout, which draws from the generator."""
    tensors = (call.inputs, *call.states, *call.weights)
    if most_elements(tensors) * lstm_layer.GATES > MOST_ELEMENTS:
        return None
    states = len(call.states)

    def of(name: str) -> Algorithm:
        def algorithm() -> Sequence[Tensor]:
            leaves = [_leaf(tensor, torch.float32) for tensor in tensors]
            some = call._replace(inputs=leaves[0], states=(*leaves[1 : 1 + states],), weights=(*leaves[1 + states :],))

            def outputs() -> Tensor:
                computed: Tensor = algorithms[name](some._replace(dropout=0.0))[0]
                return computed

            if not call.is_trained:
                with torch.no_grad():
                    return [outputs()]
            width = call.states[0].size(-1) * (1 + call.bidirectional)
            return _with_gradients(outputs, leaves, _gradient(*call.inputs.shape[:2], width))

        return algorithm

    race = {name: of(name) for name in algorithms}
    return Race(race, fp32.TORCH, None, bound=_IN_FP32, torchs_is_beaten=True)


FP32_OPERATORS = (
    *(
        TunedOperator(fp32.rule_of(kernel), _fp32_key, _fp32_race, has_gradients=True)
        for kernel in (activations.KERNEL, cross_entropy.KERNEL, norms.KERNEL)
    ),
    TunedOperator(rnn.ALGORITHM, _layers_key, _layers_race),
)
OPERATORS = (
    TunedOperator(attention.ALGORITHM, _attention_key, _attention_race),
    TunedOperator(convolution.OPERATOR, _convolution_key, _convolution_race, has_gradients=True),
    TunedOperator(linear.ALGORITHM, _product_key, _product_race, has_gradients=True),
    TunedOperator(lstm.ALGORITHM, _lstm_key, _lstm_race),
    TunedOperator(rounding.ALGORITHM, _rounding_key, _rounding_race, has_gradients=True),
    *FP32_OPERATORS,
)
