"""Blocks of equal structure are found in the outermost lists of a model."""

import pytest
import torch
from torch import nn

from nano_loop.steps.compile import described, repeated_blocks

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Block(nn.Module):
    def __init__(self, width=4, outputs=None):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, outputs or width)


class Stage(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(count)))


def of(*blocks, kind=nn.ModuleList):
    model = nn.Module()
    model.embedding, model.layers, model.head = nn.Embedding(3, 4), kind(blocks), nn.Linear(4, 3)
    return model


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_layers_of_a_transformer_are_one_group(kind):
    model = of(Block(), Block(), Block(), kind=kind)
    assert repeated_blocks(model) == [list(model.layers)]
    assert described(repeated_blocks(model)) == "3 blocks of Block"


def in_other_dtypes_and_layouts():
    low, laid_out = Block().bfloat16(), Block()
    laid_out.one.weight = nn.Parameter(torch.randn(4, 4).t())
    return of(Block(), Block(), Block(), Block(), low, low.to(torch.bfloat16), laid_out)


def frozen(count):
    return [Block().requires_grad_(False) for _ in range(count)]


#: Models, and the numbers of blocks in their groups.
MODELS = {
    "a sequence": (nn.Sequential(Block(), Block()), [2]),
    "some differ": (of(Block(outputs=8), Block(), Block(), Block(), *frozen(2)), [1, 3, 2]),
    "stages": (nn.Sequential(Stage(4, 2), Stage(8, 3)), [2, 3]),
    "a block that is called twice": (of(*[Block()] * 2, Block()), [2]),
    "other dtypes and layouts": (in_other_dtypes_and_layouts(), [4, 1, 1]),
    "one layer": (nn.Linear(3, 3), []),
    "one block": (of(Block()), []),
    "all differ": (of(Block(4), Block(8), Block(16)), []),  # like a U-Net
    "most differ": (of(Block(4), Block(4), Block(8), Block(16)), []),  # three compilations for four blocks
    "layers": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), []),
    "no parameters": (of(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh())), []),
}


@pytest.mark.parametrize(("model", "sizes"), MODELS.values(), ids=MODELS)
def test_blocks_of_equal_structure_are_one_group(model, sizes):
    groups = repeated_blocks(model)
    assert [len(group) for group in groups] == sizes
    assert described(groups) == (f"{sum(sizes)} blocks of Block" if sizes else "")
