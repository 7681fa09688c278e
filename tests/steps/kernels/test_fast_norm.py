"""Norms by the kernels of `nano_loop.kernels.norm.norms`, in runs; see `test_training`, too."""

import pytest

from nano_loop import accelerated
from nano_loop.kernels.norm import norm_arguments
from steps.kernels.cases import BY_NAME, NORMS, assert_near, images, trained, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_norm"])


def test_evaluation_is_torch_s_for_batch_norms_and_small_norms_are(called, monkeypatch):
    model = NORMS["batch norm"].built().eval()
    with accelerated(model, precision="bf16", verbose=False):
        model(images()[0])
        monkeypatch.setattr(norm_arguments, "MIN_ELEMENTS", 1 << 18)
        model.train()(images()[0])
    assert not called


@pytest.mark.slow
def test_compiled_model_trains_as_by_torch():
    case = NORMS["batch norm"]
    found, report = trained(case, compile={"backend": "aot_eager"})
    assert {"fast_norm", "compile"} <= set(report.applied)
    assert_near(found, trained(case, fast_norm=False)[0], case.bounds)
