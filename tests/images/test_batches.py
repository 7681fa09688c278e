"""Pending images are collated as their results would be, also by functions that the program has registered."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from nano_loop.images.batches import Pending, collate
from nano_loop.images.pipelines import Conversion, Plan


def scaled(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


PLAN = Plan((scaled,), 0, "", False, Conversion(0, True, True, (), False))
DOUBLED = {
    "none": {},
    "Tensor": {torch.Tensor: lambda values, *, collate_fn_map: torch.stack([*values]) * 2},
    "tuple": {tuple: lambda values, *, collate_fn_map: [value[0] * 2 for value in values]},
}


@pytest.mark.parametrize("registered", DOUBLED)
@pytest.mark.parametrize("in_tuples", [False, True])
def test_registered_functions_get_finished_images(monkeypatch, in_tuples, registered):
    draws = np.random.default_rng(0)
    samples = [Pending(draws.integers(0, 255, (4, 5, 3), dtype=np.uint8), True, None, PLAN) for _ in range(3)]
    finished = [image.finished() for image in samples]
    if in_tuples:
        samples, finished = [[(image, 1) for image in each] for each in (samples, finished)]
    for key, function in DOUBLED[registered].items():
        monkeypatch.setitem(default_collate_fn_map, key, function)
    torch.testing.assert_close(collate(samples), default_collate(finished))
