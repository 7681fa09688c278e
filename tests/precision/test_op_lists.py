"""Operators run in the dtypes of the user's lists: by name, forward and backward, and only in models after setup."""

import re
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nano_loop
from nano_loop import NanoConfigError, disable_casts, nano
from nano_loop.config.op_names import SAFE, operators_of, overloads_of
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.torch_private import is_operator
from nano_loop.patching.walk import find
from nano_loop.precision.autocast.default_ops import TORCHS, overload_of
from precision import op_samples
from precision.op_samples import HABANAS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(is deprecated|An output with one or more|return_complex|A window was not provided)"
)
QUIET = {"precision": "bf16", "verbose": False}
# The FFT of torch 2.8 fails with some numbers of threads. torch 2.15 has no `cholesky` and no `qr` beside linalg's.
SAMPLES = {
    name: make
    for name, make in op_samples.SAMPLES.items()
    if is_operator(name) and (gives_kernels() or not name.startswith("fft"))
}
LOW, FP32 = torch.bfloat16, torch.float32
ALL = [f"aten::{name}" for name in SAMPLES]
# torch has no derivative of these, or one that raises.
INFERENCE_ONLY = {"_native_multi_head_attention", "_addmm_activation", "geqrf", "linalg_cond.p_str"}
NORMS = {"batch_norm", "instance_norm", "layer_norm", "group_norm"}
# "for the LSTM" covers bf16 on CPUs without AVX-512.
REFUSED = re.compile(
    "derivative for|doesn't handle|not implemented|types|float|low precision|half|for the LSTM", re.IGNORECASE
)


class Calling(nn.Module):
    """Calls one operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, name, args, in_fp32=False):
        if in_fp32:
            with disable_casts():
                return [dtype_of(overload_of(name)(*args))]
        found = overload_of(name)(*args)
        result = first(found)
        if result.requires_grad:
            (result.abs() if result.is_complex() else result).float().sum().backward()
        return [dtype_of(found)]


def first(found):
    return next(each for each in find(torch.Tensor, found) if each.is_floating_point() or each.is_complex())


def dtype_of(found):
    dtype = first(found).dtype
    return {torch.complex64: FP32}.get(dtype, dtype)


def arguments(name, dtype):
    torch.manual_seed(0)
    given, *others = SAMPLES[name]()

    def as_asked(each):
        return each.to(dtype) if each.is_floating_point() else each

    # Weights and statistics of norms stay in fp32, as in models.
    args = map_tensors(as_asked, (given,)) + (tuple(others) if name in NORMS else map_tensors(as_asked, tuple(others)))
    if name not in INFERENCE_ONLY:
        first(args).requires_grad_()
    return args


def dtypes(call, dtype, **named):
    """Return the dtype in which each operator runs on inputs of one dtype, or "refused"."""
    found = {}
    for name in SAMPLES:
        args = arguments(name, dtype)
        try:
            found[name] = call(name, args, **named)[0]
        except (RuntimeError, ValueError) as error:
            found[name] = "refused" if REFUSED.search(str(error)) else error
        else:
            gradients = [each.grad for each in find(torch.Tensor, args) if each.grad is not None]
            assert all(each.dtype is dtype and torch.isfinite(each).all() for each in gradients), name
    return found


def by_itself(name, args):
    return [dtype_of(overload_of(name)(*args))]


def in_run(dtype, in_fp32=False, **options):
    def train(model, optimizer):
        return dtypes(model, dtype, in_fp32=in_fp32)

    model = Calling()
    return nano(**QUIET, **options)(train)(model, torch.optim.SGD(model.parameters(), 0.1))


def by_hand(dtype):
    with torch.autocast("cpu", LOW):
        return dtypes(Calling(), dtype)


def differing(found, expected):
    return {name: (found[name], expected[name]) for name in found if found[name] != expected[name]}


def test_operators_run_by_torchs_lists_without_ours():
    for dtype in (FP32, LOW):
        assert differing(in_run(dtype), by_hand(dtype)) == {}
    kinds = {"low": (FP32, LOW), "fp32": (LOW, FP32)}  # given and computed dtype
    for kind, (given, computed) in kinds.items():
        found = by_hand(given)
        wrong = {name for name in SAMPLES if TORCHS.get(name) == kind and found[name] not in (computed, "refused")}
        assert wrong == set()
    # Unlisted operators follow their input; `nll_loss_nd` calls `nll_loss`, which is in torch's list.
    found = by_hand(LOW)
    assert {name for name in SAMPLES if name not in TORCHS and found[name] is not LOW} == {"nll_loss_nd"}


def test_each_operator_runs_in_the_dtype_of_its_list_forward_and_backward():
    by_torch = dtypes(by_itself, FP32)
    expected = {name: FP32 if dtype is FP32 else "refused" for name, dtype in by_torch.items()}
    assert differing(in_run(LOW, fp32_ops=ALL), expected) == {}
    found = in_run(FP32, bf16_ops=ALL)
    assert found.pop("view_as_complex") is FP32  # a view has the dtype of its input
    assert set(found.values()) == {LOW, "refused"}
    by_torch = dtypes(by_itself, LOW)  # torch lacks some bf16 kernels
    assert {name for name, dtype in found.items() if dtype == "refused" and by_torch[name] is LOW} == set()
    assert differing(in_run(LOW, in_fp32=True, bf16_ops=ALL), expected) == {}
    for dtype in (FP32, LOW):  # nothing stays installed
        assert differing(in_run(dtype), by_hand(dtype)) == {}


def test_lists_are_those_of_their_run_and_thread():
    other = Calling()

    def softmax(model):
        return model("softmax.int", arguments("softmax.int", LOW))[0]

    def inner(model, optimizer):
        return softmax(model), "softmax.int" in nano_loop.default_ops().fp32

    def outer(model, optimizer):
        with torch.autocast("cpu", LOW):
            assert softmax(other) is LOW  # without setup
        mine = Calling()
        within = nano(**QUIET)(inner)(mine, torch.optim.SGD(mine.parameters(), 0.1))
        thread = threading.Thread(target=lambda: found.append(nano(**QUIET)(inner)(*trained())))
        thread.start()
        thread.join()
        return within, inner(model, optimizer)

    def trained():
        model = Calling()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    found = []
    for _ in range(2):
        assert nano(**QUIET, fp32_ops=["softmax"])(outer)(*trained()) == ((LOW, False), (FP32, True))
    assert found == [(LOW, False)] * 2
    assert "softmax.int" not in nano_loop.default_ops().fp32


class Net(nn.Module):
    """Has an in-place operator, a mixed one, operands that are numbers, and running statistics."""

    def __init__(self, again=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 2)
        self.norm = nn.BatchNorm1d(64)
        self.again, self.seen = again, {}

    def forward(self, x):
        def segment(x):
            hidden = torch.softmax(self.norm(self.first(x)), -1) * 2 + 1
            self.seen["softmax"] = hidden.dtype
            return hidden

        hidden = segment(x) if self.again is None else checkpoint(segment, x, use_reentrant=self.again)
        written = hidden.clone()
        written += x.sum()
        self.seen["in place"] = written.dtype
        self.seen["mixed"] = (hidden.to(LOW) + x[:, :1]).dtype
        return self.last(written)


def trained(model, **options):
    def train(model, optimizer):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()

    nano(**{**QUIET, **options})(train)(model, torch.optim.SGD(model.parameters(), 0.1))
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_all_else_follows_habanas_three_rules():
    model = Net()
    trained(model)
    assert model.seen == {"softmax": LOW, "in place": LOW, "mixed": FP32}
    trained(model, fp32_ops=["softmax"])
    assert model.seen == {"softmax": FP32, "in place": FP32, "mixed": FP32}


def test_fp32_for_all_of_the_models_operators_is_fp32():
    lists = {"fp32_ops": ["linear", "batch_norm", "softmax", "cross_entropy"]}
    torch.testing.assert_close(trained(Net(), **lists), trained(Net(), precision=32), rtol=0, atol=1e-6)
    assert not torch.equal(trained(Net()), trained(Net(), precision=32))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_by_the_lists(reentrant):
    lists = {"fp32_ops": ["softmax", "Tensor.mul"], "bf16_ops": ["batch_norm", "add"]}
    torch.testing.assert_close(trained(Net(reentrant), **lists), trained(Net(), **lists), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bf16", "fp32"), [("ops_bf16.txt", "ops_fp32.txt"), ("ops_bf16_Resnet.txt", "ops_fp32_Resnet.txt")]
)
def test_habanas_files_load_and_train(tmp_path, bf16, fp32):
    for name in (bf16, fp32):
        (tmp_path / name).write_text("# of Habana\n" + "\n".join(HABANAS[name].split()) + "\n\n")
    model = Net()
    found = trained(model, bf16_ops=str(tmp_path / bf16), fp32_ops=tmp_path / fp32)
    assert torch.isfinite(found).all()
    assert model.seen["softmax"] is FP32


def test_safe_lists_are_known_to_torch_and_not_in_its_fp32_list():
    names = {overload for name in SAFE for each in operators_of(name) for overload, _ in overloads_of(each)}
    assert len(names) > len(SAFE)
    assert not names & {name for name, kind in TORCHS.items() if kind == "fp32"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fp32_ops": ["soft_max"]}, "no such operator"),
        ({"fp32_ops": "nowhere/ops.txt"}, "No such file"),
        ({"bf16_ops": "safe"}, "is for fp32_ops"),
        ({"bf16_ops": ["aten::mul.Tensor"], "fp32_ops": ["mul"]}, "in both"),
        ({"bf16_ops": ["exp"], "fp32_ops": "safe"}, "exp in both"),
        ({"fp32_ops": ["exp"], "compile": True}, "fp32_ops with compile"),
    ],
)
def test_lists_that_cannot_be_are_refused(options, told):
    with pytest.raises(NanoConfigError, match=told):
        nano(**{**QUIET, **options})


def test_what_an_operator_writes_to_is_never_a_cast():
    mean, variance = torch.zeros(3), torch.ones(3)

    class Normalizing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            norm = torch.ops.aten._native_batch_norm_legit
            torch._foreach_add_([x], 1.0)
            return norm(x, self.weight, None, mean, variance, True, 0.1, 1e-5)[0]

    def train(model, optimizer):
        return model(torch.randn(8, 3)).shape

    model = Normalizing()
    run = nano(**QUIET, bf16_ops=["_native_batch_norm_legit", "_foreach_add_", "view"])(train)
    assert run(model, torch.optim.SGD(model.parameters(), 0.1)) == (8, 3)
    assert mean.abs().sum() > 0
    assert run.report["op_lists"].detail.endswith("no effect on _foreach_add_, view")


def test_compiled_models_are_refused():
    model = Net()
    model.compile(backend="eager")
    with pytest.raises(NanoConfigError, match="Net is compiled, and there are bf16_ops or fp32_ops"):
        trained(model, fp32_ops=["exp"])


def test_lists_of_the_environment_are_skipped_where_there_is_no_autocast(monkeypatch):
    monkeypatch.setenv("NANO_LOOP_FP32_OPS", "safe")  # an error if set in the program
    run = nano(precision=32, verbose=False)(lambda model, optimizer: None)
    model = Net()
    run(model, torch.optim.SGD(model.parameters(), 0.1))
    assert run.report["op_lists"].code == "no_autocast"


def test_report_names_what_is_listed():
    model = Net()
    run = nano(precision="bf16", fp32_ops="safe", bf16_ops=["gelu"], verbose=False)(lambda model, optimizer: None)
    run(model, torch.optim.SGD(model.parameters(), 0.1))
    assert (
        run.report["op_lists"].detail
        == "gelu in bf16; softmax, log_softmax, layer_norm, group_norm and 17 more in fp32"
    )
