"""Kernel steps apply if a model calls the operators and the functions are available, or else report the reason."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import NanoConfigError, accelerated, nano
from nano_loop.patching.operators import gives_kernels
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernel_table import KERNEL_STEPS
from nano_loop.steps.step import ABSENT, SMALL
from nano_loop.steps.tune_operators import TuneOperators
from steps.kernels.cases import BY_NAME


def renamed(kind):
    """Return a subclass with a name that says nothing, as programs define for their own layers."""
    return type("Layer", (kind,), {})


CALLING = {
    BY_NAME["fast_activation"]: [nn.Tanh(), nn.GELU("tanh"), renamed(nn.Tanh)()],
    BY_NAME["fast_attention"]: [nn.MultiheadAttention(4, 2), renamed(nn.MultiheadAttention)(4, 2)],
    BY_NAME["fast_convolution"]: [
        nn.Conv1d(2, 2, 1),
        nn.Conv3d(2, 2, 1),
        nn.ConvTranspose2d(2, 2, 1),
        nn.LazyConv2d(2, 1),
    ],
    BY_NAME["fast_cross_entropy"]: [nn.Linear(2, 1000)],
    BY_NAME["fast_dropout"]: [
        *(nn.Dropout(0.1), nn.AlphaDropout(), nn.LSTM(2, 2, 2, dropout=0.1), nn.MultiheadAttention(4, 2, dropout=0.1)),
        nn.TransformerEncoderLayer(4, 2),
        renamed(nn.Dropout)(0.1),
        type("DropPath", (nn.Module,), {})(),
        type("Net", (nn.Module,), {"forward": lambda self, x: F.dropout(x, 0.1, self.training)})(),
        type("Net", (nn.Module,), {"forward": lambda self, x: x * torch.empty_like(x).bernoulli_(0.5)})(),
    ],
    BY_NAME["fast_embedding"]: [nn.Embedding(512, 512), nn.EmbeddingBag(512, 512)],
    BY_NAME["fast_linear"]: [nn.Linear(512, 256)],
    BY_NAME["fast_norm"]: [
        *(nn.BatchNorm1d(2), nn.LazyBatchNorm2d(), nn.InstanceNorm2d(2)),
        *(nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.RMSNorm(2)),
    ],
    BY_NAME["fast_rnn"]: [nn.RNN(2, 2), nn.GRU(2, 2), nn.LSTM(2, 2)],
}
#: Models without the operators, and the reported reason.
OTHERS = {
    BY_NAME["fast_activation"]: ([nn.ReLU(), nn.GELU()], "no_tanh"),
    BY_NAME["fast_attention"]: ([nn.Linear(2, 2)], "no_attention"),
    BY_NAME["fast_convolution"]: ([nn.Linear(2, 2)], "no_convolution"),
    BY_NAME["fast_cross_entropy"]: ([nn.Linear(4, 999)], "few_classes"),
    BY_NAME["fast_dropout"]: ([nn.Linear(2, 2), nn.LSTM(2, 2), nn.MultiheadAttention(4, 2)], "no_dropout"),
    BY_NAME["fast_embedding"]: ([nn.Linear(512, 512), nn.Embedding(512, 511)], "small_tables"),
    BY_NAME["fast_linear"]: (
        [nn.Linear(512, 255), nn.Embedding(512, 256), nn.Conv2d(256, 256, 3)],
        "small_weights",
    ),
    BY_NAME["fast_norm"]: ([nn.Linear(2, 2)], "no_norm"),
    BY_NAME["fast_rnn"]: ([nn.Linear(2, 2), nn.GRUCell(2, 2)], "no_rnn"),
}
OF_SIZE = ("few_classes", "small_tables", "small_weights")
OF_PRECISIONS = [kind for kind in KERNEL_STEPS if not kind.row.is_for_all_code]
MISSING = "no C compiler was found (cc, gcc, clang)"


@pytest.fixture(autouse=True)
def everything_available(monkeypatch):
    monkeypatch.setattr(torch.library, "get_kernel", None, raising=False)
    for kind in KERNEL_STEPS:
        monkeypatch.setattr(kind.row.kernels.kernel, "unavailable", None)
        monkeypatch.setattr((kind.row.in_fp32 or kind.row.kernels).kernel, "unavailable", None)


def parts_of(kind):
    return TrainingObjects(CALLING.get(kind, [nn.Linear(2, 2)])[:1])


@pytest.mark.parametrize("kind", KERNEL_STEPS)
def test_models_that_call_the_operators_are_recognised(step, kind):
    for model in CALLING[kind]:
        made = step(kind, precision="bf16")
        assert made.enabled
        assert made.is_relevant(TrainingObjects([model]))
        assert made.skip_reason(TrainingObjects([model])) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_are_skipped_unless_asked(step, kind):
    models, code = OTHERS[kind]
    for model in models:
        made, asked = step(kind, precision="bf16"), step(kind, precision="bf16", **{kind.name: True})
        reason = made.skip_reason(TrainingObjects([model]))
        assert (reason.code, reason.idle) == (code, SMALL if code in OF_SIZE else ABSENT)
        assert asked.skip_reason(TrainingObjects([model])) is None


@pytest.mark.parametrize("kind", KERNEL_STEPS)
def test_it_can_be_turned_off(step, kind):
    assert not step(kind, precision="bf16", **{kind.name: False}).enabled


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, 64) for kind in (*OF_PRECISIONS, TuneOperators)),
        *((kind, 32) for kind in OF_PRECISIONS if kind.row.in_fp32 is None),
        *((kind, "bf16-products") for kind in OF_PRECISIONS if kind.row.in_fp32 is None),
    ],
)
def test_in_another_precision_it_is_skipped(step, kind, precision):
    for choice in ("auto", True):
        made = step(kind, precision=precision, **{kind.name: choice})
        assert made.enabled
        assert made.required == (choice is True)
        reason = made.skip_reason(parts_of(kind))
        assert (reason.code, reason.idle[:8]) == ("not_bf16", "for bf16")


@pytest.mark.parametrize("precision", [32, "bf16-products"])
@pytest.mark.parametrize("kind", [kind for kind in OF_PRECISIONS if kind.row.in_fp32 is not None])
def test_fp32_is_taken_unless_the_run_is_exact(step, kind, precision):
    for options in ({}, {kind.name: True}):
        made = step(kind, precision=precision, **options)
        assert made.enabled
        assert made.is_relevant(parts_of(kind))
        assert made.skip_reason(parts_of(kind)) is None
    assert not step(kind, exact=True).enabled


@pytest.mark.parametrize("kind", OTHERS)
def test_true_is_an_error_at_the_first_step_where_no_model_and_no_call_has_use_for_it(kind, monkeypatch):
    monkeypatch.undo()
    if kind.row.kernels.kernel.unavailable or (kind.row.kernels.calls_torchs_kernels and not gives_kernels()):
        pytest.skip("the CPU has no instructions for these kernels, or torch is too old")

    def train(model, optimizer, uses):
        loss = model(torch.randn(4, 4)).square().mean()
        (loss + (0 if uses is None else uses(loss))).backward()
        optimizer.step()

    def fit(uses=None):
        model = nn.Linear(4, 4)
        loop = nano(precision="bf16", fast_images=False, verbose=False, **{kind.name: True})(train)
        loop(model, torch.optim.SGD(model.parameters(), 0.1), uses)
        return loop.report

    with pytest.raises(NanoConfigError, match=f"^{kind.name}=True: .*Remove {kind.name}"):
        fit()
    if kind.name == "fast_dropout":  # calls outside of models cannot be foreseen
        assert kind.name in fit(lambda loss: F.dropout(loss.expand(1 << 13), 0.5).mean()).applied


def test_smaller_products_are_for_runs_in_fp32(step):
    small, large = (TrainingObjects([nn.Linear(64, width)]) for width in (127, 128))
    in_fp32, in_bf16 = (step(BY_NAME["fast_linear"], precision=precision) for precision in (32, "bf16"))
    assert [in_fp32.skip_reason(parts) is None for parts in (small, large)] == [False, True]
    assert in_bf16.skip_reason(large).code == "small_weights"


def test_refusal_is_an_error_that_says_why_and_what_to_do():
    with (
        pytest.raises(NanoConfigError, match=r"fast_convolution=True: it is for bf16\. Remove fast_convolution=True"),
        accelerated(nn.Conv1d(2, 2, 1), fast_convolution=True, fast_dropout=False, verbose=False),
    ):
        raise AssertionError


@pytest.mark.parametrize("kind", [kind for kind in KERNEL_STEPS if kind.row.kernels.calls_torchs_kernels])
def test_torch_without_kernels_to_hand_out_is_left_alone(step, kind, monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    reason = step(kind, precision="bf16").skip_reason(parts_of(kind))
    assert reason.code == "old_torch"
    assert torch.__version__ in reason.detail


@pytest.mark.parametrize("kind", KERNEL_STEPS)
def test_without_functions_plain_operators_compute_or_it_is_skipped(step, kind, monkeypatch):
    monkeypatch.setattr(kind.row.kernels.kernel, "unavailable", MISSING)
    reason = step(kind, precision="bf16").skip_reason(parts_of(kind))
    if kind.row.kernels.without_kernel is None:
        assert reason[:2] == ("no_kernel", MISSING)
    else:
        assert reason is None


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="it needs torch 2.9")
def test_the_report_says_how_and_why(step, monkeypatch):
    monkeypatch.undo()  # use torch's real kernels
    for missing, words in ((None, "in blocks, by"), (MISSING, f"others are torch's, since {MISSING[:10]}")):
        monkeypatch.setattr(BY_NAME["fast_convolution"].row.kernels.kernel, "unavailable", missing)
        result = step(BY_NAME["fast_convolution"], precision="bf16").apply(parts_of(BY_NAME["fast_convolution"]))
        assert re.search(words, result)
