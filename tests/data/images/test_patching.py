"""`patch_torch` has the step's effect on any loop, and can be undone."""

import pytest
import torch
from torch.utils.data import DataLoader

from nano_loop import NanoConfigError
from nano_loop.vision import patch_torch, unpatch_torch

datasets = pytest.importorskip("torchvision.datasets")
from torchvision import transforms  # noqa: E402


@pytest.fixture(autouse=True)
def undone():
    yield
    unpatch_torch()


def loader_of(folder, workers=0):
    pipeline = transforms.Compose([transforms.Resize(24), transforms.RandomCrop(20), transforms.ToTensor()])
    return DataLoader(datasets.ImageFolder(folder, pipeline), 4, shuffle=True, num_workers=workers)


def epochs(loader):
    torch.manual_seed(3)
    return [images for _ in range(2) for images, _ in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_get_the_same_batches_without_decoding_again(pictures, workers, decodings):
    expected = epochs(loader_of(pictures, workers))
    patch_torch()
    loader = loader_of(pictures, workers)
    first = epochs(loader)
    decodings.clear()
    second = epochs(loader)
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))
    assert len(decodings) <= 2 * 2  # for WebP
    unpatch_torch()
    epochs(loader)
    assert workers or len(decodings) >= 2 * 20


def test_cuda_too():
    patch_torch(cuda_to_cpu=True)
    patch_torch(True)
    assert torch.cuda.is_available()
    unpatch_torch()
    assert not torch.cuda.is_available()


def test_argument_with_a_typing_error_is_refused():
    with pytest.raises(NanoConfigError, match="image_cache='8 GBs'"):
        patch_torch(image_cache="8 GBs")
    with pytest.raises(NanoConfigError, match="exact_images='yes'"):
        patch_torch(exact_images="yes")
