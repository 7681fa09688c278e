"""Chooses how the gradients of convolutions are computed: by torch's kernel, by a product, or in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nano_loop.autotune.remembered import Remembered
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, layout, most_elements
from nano_loop.autotune.tuner import Tuner, Way, Ways
from nano_loop.kernels.convolution.convolution import Arguments, ByPlan, Plan, plans

_TORCHS = "/".join(Plan())


def chooser(tuner: Tuner) -> Callable[[ByPlan, Arguments, Plan], Plan]:
    """Return what `nano_loop.kernels.convolution.convolution.faster_backward` asks for a plan."""
    remembered: Remembered[Plan] = Remembered(tuner)

    def choose(by_plan: ByPlan, given: Arguments, guess: Plan) -> Plan:
        shapes = tuple((each.shape, each.stride()) for each in given[:3])
        key = (shapes, tuple(given.stride), tuple(given.padding), tuple(given.dilation), given.groups)
        whole = (key, given.transposed, tuple(given.output_mask))
        return remembered.way(whole, guess, lambda: _chosen(tuner, by_plan, given, guess))

    return choose


def _chosen(tuner: Tuner, by_plan: ByPlan, given: Arguments, guess: Plan) -> Plan | None:
    possible = plans(given)
    if len(possible) == 1 or not 0 < most_elements(given[:3]) <= MOST_ELEMENTS:
        return guess
    if guess not in possible:
        possible.append(guess)
    by_name = {"/".join(each): each for each in possible}
    found = tuner.choose(_key(given), "/".join(guess), lambda: _ways(by_plan, by_name, given))
    return None if found is None else by_name.get(found, guess)


def _ways(by_plan: ByPlan, by_name: dict[str, Plan], given: Arguments) -> Ways:
    of_inputs, of_weight, of_bias = given.output_mask
    # What each plan computes in the same way is not timed.
    mask = (of_inputs and len({plan.inputs for plan in by_name.values()}) > 1, of_weight, of_bias)
    ways = {name: _way(by_plan, plan, mask) for name, plan in by_name.items()}
    if not any("fp32" in plan for plan in by_name.values()):
        return Ways(ways, _TORCHS, None)
    in_fp32 = Plan("fp32" if mask[0] else "torch", "fp32" if of_weight else "torch")
    return Ways(ways, _TORCHS, _way(by_plan, in_fp32, mask))


def _way(by_plan: ByPlan, plan: Plan, mask: Sequence[bool]) -> Way:
    def way() -> Sequence[Tensor]:
        return [each for each in by_plan(plan, mask) if each is not None]

    return way


def _key(given: Arguments) -> str:
    gradient, inputs, weight = given[:3]
    sizes = [bucket(inputs.size(0)), *inputs.shape[1:], "to", *weight.shape]
    geometry = [*given.stride, *given.padding, *given.dilation, *given.output_padding, given.groups]
    layouts = [layout(tensor) for tensor in (gradient, inputs, weight)]
    name = "transposed convolution" if given.transposed else "convolution"
    wanted = "".join("x" if each else "-" for each in given.output_mask)
    return f"gradients of {name} {_joined(sizes)} by {_joined(geometry)} {_joined(layouts)} {wanted}"


def _joined(values: Sequence[object]) -> str:
    return " ".join(map(str, values))
