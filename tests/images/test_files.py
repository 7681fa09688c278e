"""Files that change, and files that are no pictures: the loop gets what the plain loader gives it."""

import io
import os
import shutil
import tarfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from nano_loop.images import session, sources
from nano_loop.images.lifetime import store_for
from nano_loop.images.loaders import CachedImages, datasets_in
from nano_loop.patching.objects.loaders import changed

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
    data[-200:-100] = bytes(100)  # in the data of the pixels
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
    monkeypatch.setattr(sources, "SETTLED", 1000.0)
    monkeypatch.setattr(session, "_SMALL", 0)
    before = loader.store.usage().entries  # of another loader that is not collected yet
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


class Skipping(torch.utils.data.Dataset):
    """Takes the next image instead of one that cannot be read."""

    def __init__(self, folder):
        self.samples, self.transform = datasets.ImageFolder(folder).samples, pipeline()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        try:
            with Image.open(self.samples[index][0]) as opened:
                image = opened.convert("RGB")
        except OSError:
            return self[index + 1]
        return self.transform(image)


class InArchive(Skipping):
    """Reads images out of one file."""

    def __init__(self, folder):
        super().__init__(folder)
        self.archive = folder.parent / "all.tar"
        with tarfile.open(self.archive, "w") as file:
            for path, _ in self.samples:
                file.add(path)
        self.data = self.archive.with_name("all.bin")
        self.data.write_bytes(b"".join(Path(path).read_bytes() for path, _ in self.samples[:3]))
        self.offsets = np.cumsum([0, *(os.stat(path).st_size for path, _ in self.samples[:2])])

    def __getitem__(self, index):
        with tarfile.open(self.archive) as file:
            inside = file.extractfile(self.samples[index][0].lstrip("/"))
            first = self.transform(Image.open(inside).convert("RGB"))
        with open(self.data, "rb") as file:
            file.seek(self.offsets[index % 3])
            return torch.stack([first, self.transform(Image.open(file).convert("RGB"))])


@pytest.mark.parametrize("kind", [Skipping, InArchive])
def test_errors_are_raised_at_the_conversion_and_images_in_other_files_are_told_apart(folder, kind):
    if kind is Skipping:
        os.truncate(folder / "cats/0.jpg", 900)
    loader = DataLoader(kind(folder), 4)
    expected = [*loader]
    with cached(loader):
        for _ in range(2):
            assert all(map(torch.equal, loader, expected))


def test_truncated_files_that_the_program_accepts(loader, folder, monkeypatch):
    """The switch is a part of what was kept."""
    from PIL import ImageFile

    os.truncate(folder / "cats/0.jpg", 900)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for _ in range(2):
        assert_plain(loader, folder)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    with pytest.raises(OSError, match="truncated"):
        next(iter(loader))
