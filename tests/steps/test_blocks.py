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


def sizes(model):
    return [len(group) for group in repeated_blocks(model)]


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_layers_of_a_transformer_are_one_group(kind):
    model = of(Block(), Block(), Block(), kind=kind)
    assert repeated_blocks(model) == [list(model.layers)]
    assert described(repeated_blocks(model)) == "3 blocks of Block"


def test_a_model_that_is_a_sequence_of_blocks_has_them_too():
    model = nn.Sequential(Block(), Block())
    assert repeated_blocks(model) == [list(model)]


def test_blocks_that_differ_are_groups_of_their_own():
    first, others = Block(outputs=8), [Block() for _ in range(3)]
    frozen = [Block() for _ in range(2)]
    for each in frozen:
        each.requires_grad_(False)
    assert repeated_blocks(of(first, *others, *frozen)) == [[first], others, frozen]


def test_stages_are_looked_into():
    model = nn.Sequential(Stage(4, 2), Stage(8, 3))
    assert sizes(model) == [2, 3]
    assert described(repeated_blocks(model)) == "5 blocks of Block"


def test_a_block_that_is_called_twice_counts_once():
    block = Block()
    assert sizes(of(block, block, Block())) == [2]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        of(Block()),
        of(Block(4), Block(8), Block(16)),  # like a U-Net
        of(Block(4), Block(4), Block(8), Block(16)),  # three compilations for four blocks
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()),
        of(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh())),
    ],
    ids=["one layer", "one block", "all differ", "most differ", "layers", "no parameters"],
)
def test_without_repeated_blocks_there_are_none(model):
    assert repeated_blocks(model) == []


def test_blocks_in_other_dtypes_and_layouts_differ():
    low, laid_out = Block().bfloat16(), Block()
    laid_out.one.weight = nn.Parameter(torch.randn(4, 4).t())
    assert sizes(of(Block(), Block(), Block(), Block(), low, low.to(torch.bfloat16), laid_out)) == [4, 1, 1]
