"""A model with dropout in attention, whose masks come from torch's generator."""

from dataclasses import replace

import pytest
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from nano_loop.kernels.attention import attention, blocked_attention

from .nested import differences
from .pairs import BF16, EXACT, FP64, SHIPPED, pair, run_accelerated, run_plain
from .tasks import fit, job


class Attending(nn.Module):
    """A classifier of 6 features, which are spread over 24 tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Linear(6, 24 * 48), nn.Linear(24 * 16, 3)

    def forward(self, x):
        query, key, value = self.tokens(x).view(len(x), 1, 24, 48).chunk(3, dim=-1)
        found = scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.training else 0.0)
        return self.head(found.flatten(1))


test_attention_with_dropout = pair(job(model=Attending), configs=[EXACT, BF16, FP64])(fit)


@pytest.mark.skipif(blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable))
def test_kernel_for_attention_draws_as_often_as_torch(monkeypatch):
    """So the next shuffle of the loader is the plain loop's; tests/kernels checks the values."""
    build = job(model=Attending)
    taken, original = [], blocked_attention.blocked_attention
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    monkeypatch.setattr(blocked_attention, "blocked_attention", lambda *args: taken.append(1) or original(*args))
    actual, _ = run_accelerated(build, fit, replace(SHIPPED, options={**SHIPPED.options, "tune_operators": False}))
    found = [*differences(actual["random"], run_plain(build, fit)["random"])]
    assert not found, "\n".join(found)
    assert taken
