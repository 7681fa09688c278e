"""A model with dropout in attention, whose masks come from torch's generator."""

from dataclasses import replace

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from .pairs import BF16, EXACT, FP64, SHIPPED, pair
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


#: With the kernel in C, if the CPU has one: its values are close, and it draws as often as torch.
IN_BLOCKS = replace(SHIPPED, options={**SHIPPED.options, "tune_operators": False})
test_attention_with_dropout = pair(job(model=Attending), configs=[EXACT, BF16, FP64, IN_BLOCKS])(fit)
