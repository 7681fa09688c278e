"""Pending images are collated like their results, also by functions that the program has registered."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from nano_loop.data.images.batches import Pending, collate


def scaled(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


DOUBLED = {
    "none": {},
    "Tensor": {torch.Tensor: lambda values, *, collate_fn_map: torch.stack([*values]) * 2},
    "tuple": {tuple: lambda values, *, collate_fn_map: [value[0] * 2 for value in values]},
}


@pytest.mark.parametrize("registered", DOUBLED)
def test_registered_functions_get_finished_images(monkeypatch, registered):
    draws = np.random.default_rng(0)
    images = [Pending(draws.integers(0, 255, (4, 5, 3), dtype=np.uint8), (scaled,)) for _ in range(3)]
    for key, function in DOUBLED[registered].items():
        monkeypatch.setitem(default_collate_fn_map, key, function)
    found, expected = collate([(image, 1) for image in images]), default_collate([(i.finished(), 1) for i in images])
    torch.testing.assert_close(found, expected)
