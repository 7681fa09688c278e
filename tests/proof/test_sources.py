"""Each source finds faults planted in the accelerated code paths that it covers."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from nano_loop.kernels import bernoulli
from nano_loop.kernels.override import Override
from nano_loop.optimizers import direct_steps, torch_fused_steps
from nano_loop.runtime.run import Run
from proof.own_kernels import take_own_kernels
from proof.worker import cases, compared

pytestmark = pytest.mark.filterwarnings("ignore")


def planted(owner, name, fault, put):
    """Replace a function or method with a fault, which gets the original and its arguments."""
    original = getattr(owner, name)
    put(owner, name, lambda *args: fault(original, *args))


def scaled(operator, factor):
    """Scale the results of the kernels that replace an operator."""

    def fault(original, self, call):
        result = original(self, call)
        if result is not None and self.operator.startswith(operator):
            tree_leaves(result)[0].data.mul_(factor)
        return result

    return partial(planted, Override, "computed", fault)


def raising(operator):
    """Make the kernels that replace an operator raise."""

    def fault(original, self, call):
        if self.operator.startswith(operator):
            raise RuntimeError("planted")
        return original(self, call)

    return partial(planted, Override, "computed", fault)


def at_setup(act):
    """Make a set-up do something additional."""

    def fault(original, self, model, *others):
        act(model, *others)
        return original(self, model, *others)

    return partial(planted, Run, "setup", fault)


def layouts_not_asked(put):
    for module in (direct_steps, torch_fused_steps):
        put(module, "lie_alike", lambda lists: True)


def wrapped(change):
    """Make a set-up wrap the model's outputs in a function."""
    return at_setup(lambda model, *others: model.register_forward_hook(lambda module, given, out: change(out)))


DRAWS = at_setup(lambda *parts: torch.rand(1))
MASKS = partial(planted, bernoulli, "fill", lambda original, tensor, p, source: original(tensor, 0.9 * p, source))
NO_COUNTERS = partial(planted, direct_steps, "foreach_increment", lambda original, counters: None)
PLANTED = [
    ("modules/nn.LayerNorm/3", "fp32", scaled("native_layer_norm", 1 + 1e-5), "outputs"),
    ("modules/nn.Linear/0", "exact", DRAWS, "random"),
    ("modules/nn.Linear/0", "fp32", at_setup(lambda model, *others: setattr(model, "kept", 1)), "left"),
    ("optimizers/AdamW.loaded/0", "fp32", layouts_not_asked, "parameters"),
    (
        "optimizers/AdamW.groups/0",
        "exact",
        at_setup(lambda _, made: made[0].param_groups[0].update(fused=True)),
        "left",
    ),
    ("optimizers/Adam.plain/0", "fp32", NO_COUNTERS, "states"),
    ("operators/mul/0", "fp32", wrapped(lambda out: out * (1 + 1e-5)), "outputs"),
    ("operators/add/0", "bf16", wrapped(lambda out: out.missing), "raises"),
    ("operators/nn.functional.relu/0", "exact", DRAWS, "random"),
    ("architectures/bert/0", "fp32", scaled("native_layer_norm", 1 + 1e-3), "outputs"),
    ("architectures/bert/0", "exact", MASKS, "outputs"),
    ("architectures/gpt2/0", "fp32", raising("native_layer_norm"), "raises"),
]


@pytest.mark.parametrize(("name", "way", "plant", "kind"), PLANTED)
def test_planted_fault_is_found(name, way, plant, kind, monkeypatch):
    take_own_kernels(monkeypatch.setattr)
    [case] = cases(name.partition("/")[0], name)
    [(_, raises, found)] = compared(case, [way])
    assert (raises, found) == (None, [])
    plant(monkeypatch.setattr)
    [(_, _, found)] = compared(case, [way])
    assert kind in {each for each, _ in found}


@pytest.mark.parametrize(("kind", "trained"), [("recurrent_gemma", ["fp32"]), ("voxtral_realtime_text", [])])
def test_model_that_keeps_results_is_trained_and_a_class_that_is_not_exported_is_not(kind, trained):
    [case] = cases("architectures", f"architectures/{kind}/0")
    found = [*compared(case, ["fp32"])]
    assert ([way for way, *_ in found], [each for *_, off in found for each in off]) == (trained, [])


def test_worker_gives_a_sign_of_life_before_each_accelerated_run():
    """Sixteen runs of one case may take longer than a process may be silent."""
    [case], signs = [*cases("modules", "modules/nn.Linear/0")], []
    assert [way for way, *_ in compared(case, ["fp32", "bf16"], lambda: signs.append(None))] == ["fp32", "bf16"]
    assert len(signs) >= 2
