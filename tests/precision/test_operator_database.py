"""Every operator of torch's database: no error that fp32 does not have, and no unexplained large difference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.kernels.linear import product
from nano_loop.patching.operators import gives_kernels

POLE, STEP = "a pole is near the sample", "a step is near the sample"
STEEP = "the function is steep at the sample: the rounding of the input alone changes the result in fp32 as much"
CANCELS = "the gradient is zero but for rounding: a norm of one number, a correlation of two"
#: Why even fp32 is far off once its input is rounded to bf16.
ILL_CONDITIONED = {
    **dict.fromkeys(("asin", "atanh", "digamma", "erfinv", "lgamma", "log1p", "polygamma", "special.polygamma"), POLE),
    **dict.fromkeys(("frac", "histogram", "tan", "topk"), STEP),
    **dict.fromkeys(("linalg.ldl_factor", "linalg.ldl_factor_ex"), f"{STEP}: of pivots"),
    **dict.fromkeys(("nn.functional.scaled_dot_product_attention", "sinc", "special.bessel_j0", "special.ndtr"), STEEP),
}
#: Why a result is far off, by precision.
FAR = {
    "bf16": {
        "linalg.pinv": "a singular product has full rank once it is rounded",
        **dict.fromkeys(("nn.functional.layer_norm", "nn.functional.normalize"), CANCELS),
    },
    "bf16-products": {
        "corrcoef": CANCELS,
        "linalg.lstsq": "the system multiplies the rounding by its condition",
        "nn.functional.scaled_dot_product_attention": STEEP,
    },
}
RAISED = {"native_layer_norm": "torch's backward of a norm with a bias and no weight takes no mixed dtypes"}
CAST_OUTPUTS = {"bfloat16", "half"}


def swept(precision):
    program = Path(__file__).with_name("operator_database.py")
    done = subprocess.run([sys.executable, program, precision], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # 15 s each on a quiet machine


def test_operator_after_a_layer_in_bf16_computes_what_fp32_does():
    found = swept("bf16")
    assert found["cases"] > 2000
    assert found["raised"].keys() <= RAISED.keys()
    assert set(found["dtype"]) <= CAST_OUTPUTS
    assert set(found["far"]) <= FAR["bf16"].keys()
    assert set(found["ill-conditioned"]) <= ILL_CONDITIONED.keys()


@pytest.mark.skipif(
    product.KERNEL.unavailable is not None or not gives_kernels(), reason=f"{product.KERNEL.unavailable}, or torch 2.8"
)
def test_operator_computes_what_fp32_does_but_for_the_rounding_of_products():
    found = swept("bf16-products")
    assert found["cases"] > 2000
    assert (found["raised"], found["dtype"]) == ({}, [])
    assert set(found["far"]) <= FAR["bf16-products"].keys()
