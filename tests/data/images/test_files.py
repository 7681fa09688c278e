"""With modified files and files that are not pictures, the loop gets the plain loader's results."""

import io
import os
import shutil
from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from nano_loop.data.images import reading
from nano_loop.data.images.folders import CachedImages, datasets_in
from nano_loop.data.images.lifetime import store_for
from nano_loop.patching.loaders import changed

datasets = pytest.importorskip("torchvision.datasets")
from torchvision import transforms  # noqa: E402


def pipeline():
    return transforms.Compose([transforms.Resize((20, 20)), transforms.ToTensor()])


@pytest.fixture
def folder(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "pictures")
    return tmp_path / "pictures"


@contextmanager
def cached(loader):
    store = store_for(datasets_in(loader.dataset), None)
    with changed(loader, CachedImages(store, True)):
        yield store


@pytest.fixture
def loader(folder):
    made = DataLoader(datasets.ImageFolder(folder, pipeline()), 40)
    with cached(made) as made.store:
        yield made


def plain(folder):
    return next(iter(DataLoader(datasets.ImageFolder(folder, pipeline()), 40)))[0]


def assert_plain(loader, folder):
    assert torch.equal(next(iter(loader))[0], plain(folder))


def written_anew(path, number):
    path.write_bytes(path.with_name(f"{number}.jpg").read_bytes())


def exchanged(path):
    other = path.with_name("other")
    shutil.copy(path.with_name("1.jpg"), other)
    os.replace(other, path)


def with_the_old_time(path):
    found = path.stat()
    data = bytearray(path.read_bytes())
    image = Image.open(io.BytesIO(data))
    assert image.size
    data[-200:-100] = bytes(100)  # in the pixel data
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_size == found.st_size


@pytest.mark.parametrize("change", [lambda path: written_anew(path, 2), exchanged, with_the_old_time])
def test_file_that_changes_between_epochs_is_read_again(loader, folder, change):
    assert_plain(loader, folder)
    before = next(iter(loader))[0]
    change(folder / "cats/0.jpg")
    assert_plain(loader, folder)
    assert_plain(loader, folder)
    assert not torch.equal(next(iter(loader))[0], before)


def test_file_that_was_just_written_is_not_kept(loader, folder, monkeypatch):
    monkeypatch.setattr(reading, "SETTLED", 1000.0)
    before = loader.store.usage().entries  # includes another loader that is not collected yet
    for _ in range(2):
        assert_plain(loader, folder)
    assert loader.store.usage().entries == before


SPOILED = {
    "truncated": lambda path: os.truncate(path, 900),
    "empty": lambda path: os.truncate(path, 0),
    "gone": os.unlink,
    "no picture": lambda path: path.write_text("no"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_spoiled_file_raises_the_plain_error_in_every_epoch(loader, folder, spoil):
    next(iter(loader))
    spoil(folder / "cats/0.jpg")
    errors = []
    for each in (loader, loader, DataLoader(loader.dataset, 40)):
        with pytest.raises(OSError, match=r".") as raised:
            next(iter(each))
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1] == errors[2]


def test_truncated_files_that_the_program_accepts(loader, folder, monkeypatch):
    """The setting is part of the cache key."""
    from PIL import ImageFile

    os.truncate(folder / "cats/0.jpg", 900)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for _ in range(2):
        assert_plain(loader, folder)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    with pytest.raises(OSError, match="truncated"):
        next(iter(loader))
