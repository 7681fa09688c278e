"""The step from a loop's view: the report, the cache between runs, and several ranks."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn
from torch.utils.data import DataLoader

import nano_loop
from nano_loop import NanoConfigError, nano
from nano_loop.data.images import reading

datasets = pytest.importorskip("torchvision.datasets")
from torchvision import transforms  # noqa: E402


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "SETTLED", -1e9)
    draws = np.random.default_rng(0)
    for number in range(12):
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(draws.integers(0, 255, (6, 8, 3), dtype=np.uint8))
        small.resize((320, 240), Image.Resampling.BICUBIC).save(place / f"{number}.jpg")
    return tmp_path / "images"


def pipeline(size=24):
    return transforms.Compose(
        [transforms.Resize(size), transforms.RandomCrop(20), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )


def loader_of(folder, transform=None, workers=0):
    return DataLoader(datasets.ImageFolder(folder, transform or pipeline()), 4, shuffle=True, num_workers=workers)


def train(model, loader):
    random.seed(3)
    torch.manual_seed(3)
    return [images for _ in range(2) for images, _ in loader]


def run(loader, **options):
    decorated = nano(verbose=False, **options)(train)
    return decorated(nn.Conv2d(3, 2, 1), loader), decorated.report


def test_report_says_what_is_kept_and_where(folder):
    batches, report = run(loader_of(folder), image_cache="1 MB")
    assert report["fast_images"].detail == "1 of 1 loaders, cached after Resize; up to 1.0 MB of memory"
    assert report["image_cache"].detail == "12 images in the cache, 0 MB"
    assert all(map(torch.equal, batches, run(loader_of(folder), fast_images=False)[0]))


def test_report_names_what_was_left_alone(folder):
    odd = PngInfo()
    odd.add_itxt("Title", "a text with a language", "en")
    Image.open(folder / "a/0.jpg").save(folder / "a/0.png", pnginfo=odd)
    os.unlink(folder / "a/0.jpg")
    _, report = run(loader_of(folder))
    assert report["image_cache"].detail.startswith("11 images")
    assert "left alone: images of mode RGB, or with other metadata" in report["image_cache"].detail


def test_loader_that_is_left_alone_is_named(folder):
    loader = DataLoader(datasets.ImageFolder(folder, transforms.CenterCrop.forward), 4)
    with pytest.raises(NanoConfigError, match="fast_images=True"):
        nano(verbose=False, fast_images=True)(lambda model, loader: None)(nn.Conv2d(3, 2, 1), loader)
    decorated = nano(verbose=False)(lambda model, loader: None)
    decorated(nn.Conv2d(3, 2, 1), loader)
    assert (decorated.report["fast_images"].status, decorated.report["fast_images"].code) == ("skipped", "no_images")


@pytest.mark.parametrize("is_folder", [False, True])
def test_images_are_kept_for_the_next_call_and_in_a_folder_for_the_next_process(
    folder, tmp_path, monkeypatch, is_folder
):
    loader, place = loader_of(folder), tmp_path / "cache" if is_folder else None
    first, report = run(loader, image_cache=place)
    assert report["fast_images"].detail.endswith("in the folder of image_cache") is is_folder
    assert not is_folder or place.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(transforms.functional, "resize", None)
    again, _ = run(loader_of(folder) if is_folder else loader, image_cache=place)
    assert all(map(torch.equal, again, first))


@pytest.mark.parametrize(
    ("cache", "name", "detail"),
    [
        ("/proc/self/images", "fast_images", "left alone: the folder of the cache cannot be created"),
        ("/sys/kernel", "image_cache", "the cache cannot be written any further"),
    ],
)
def test_folder_that_cannot_be_made_or_written_is_reported(folder, cache, name, detail):
    batches, report = run(loader_of(folder), image_cache=cache)
    assert detail in report[name].detail
    assert all(map(torch.equal, batches, run(loader_of(folder), fast_images=False)[0]))


def test_scaled_decoding_differs_little_and_keeps_the_size(folder):
    sizes = transforms.Compose([transforms.Resize(33), transforms.ToTensor()])
    exact = run(DataLoader(datasets.ImageFolder(folder, sizes), 4))[0]
    loader = DataLoader(datasets.ImageFolder(folder, sizes), 4)
    scaled, report = run(loader, exact_images=False)
    again = run(loader, exact_images=False)[0]
    assert report["image_cache"].detail.startswith("12 images")
    assert [each.shape for each in scaled] == [each.shape for each in exact]
    assert all(map(torch.equal, scaled, again))
    difference = (torch.cat(scaled) - torch.cat(exact)).abs().mean() / torch.cat(exact).std()
    assert 0 < difference < 0.05
    assert all(map(torch.equal, run(loader)[0], exact)), "an exact run takes no approximation"


def seen_by_all_ranks(model, loader):
    reading.SETTLED = -1e9  # on rank 1 too, which is another process
    random.seed(3)
    torch.manual_seed(3)
    batches = [images for _ in range(3) for images, _ in loader]
    own = len([*Path("/dev/shm").glob(f"nano_loop-images-{os.getpid()}-*")])
    return nano_loop.all_gather(torch.stack(batches)), nano_loop.all_gather(torch.tensor(own)).tolist()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*worker")
def test_ranks_share_a_cache(folder, workers):
    options = {"num_processes": 2, "verbose": False}
    torch.manual_seed(0)  # the other ranks derive their random numbers from the caller's state
    plain, _ = nano(fast_images=False, **options)(seen_by_all_ranks)(
        nn.Conv2d(3, 2, 1), loader_of(folder, None, workers)
    )
    decorated = nano(**options)(seen_by_all_ranks)
    torch.manual_seed(0)
    ours, caches = decorated(nn.Conv2d(3, 2, 1), loader_of(folder, None, workers))
    assert torch.equal(ours, plain)
    assert caches == [1, 0]
    assert decorated.report["fast_images"].status == "applied"
    assert decorated.report["image_cache"].detail.startswith("12 images")
