"""The examples of forecasting, tables and reinforcement learning learn, plain and accelerated."""

import pytest

from .running import results

SMALL = {
    "load_forecast.py": ("--epochs", 1, "--width", 16),
    "tabular_transformer.py": ("--epochs", 3, "--width", 32),
    "cartpole_ppo.py": ("--updates", 6, "--carts", 16, "--width", 32),
}


def has_learned(script, result):
    if script == "load_forecast.py":
        return result["error"] < 0.98 * result["week before"]  # the starting point
    if script == "tabular_transformer.py":
        return result["accuracy"] > 0.85
    return result["moves"] > 30  # random actions reach 22


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_it_learns_plain_in_fp32_and_in_auto(script, tmp_path):
    plain = results(script, "--plain", *SMALL[script], folder=tmp_path, nano_loop=False)
    assert has_learned(script, plain)
    for precision in (32, "auto"):
        accelerated = results(script, "--precision", precision, *SMALL[script], folder=tmp_path)
        assert has_learned(script, accelerated)
        assert "fused_optimizer" in accelerated["stderr"]
