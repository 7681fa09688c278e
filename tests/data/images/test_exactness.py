"""Batches and random draws match the plain loader's, for many pipelines, over several epochs."""

import random
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from nano_loop.data.images.folders import CachedImages, datasets_in, plans_in, refusal
from nano_loop.data.images.lifetime import store_for
from nano_loop.patching.loaders import changed

datasets = pytest.importorskip("torchvision.datasets")
from torchvision import transforms as v1  # noqa: E402
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOAT = v2.ToDtype(torch.float32, scale=True)
END = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
END2 = [v2.ToImage(), FLOAT, v2.Normalize(MEAN, STD)]


def compose(*transforms):
    return v1.Compose([*transforms])


def compose2(*transforms):
    return v2.Compose([*transforms])


def noisy(image):
    return Image.fromarray(np.asarray(image) // 2 + np.random.randint(0, 100, dtype=np.uint8))


class OwnResize(v1.Resize):
    def forward(self, image):
        return super().forward(image).rotate(random.randint(0, 90))


def quietly(deprecated):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deprecated()


def with_a_hook(transform):
    transform.register_forward_hook(lambda module, given, image: image.rotate(random.randint(0, 90)))
    return transform


PIPELINES = {
    "resize": lambda: compose(v1.Resize((20, 24)), *END),
    "resize, shorter edge, crop": lambda: compose(v1.Resize(24), v1.CenterCrop(20), *END),
    "resize, longest edge": lambda: compose(v1.Resize(20, max_size=31), v1.CenterCrop(20), *END),
    "resize, nearest": lambda: compose(v1.Resize((20, 20), v1.InterpolationMode.NEAREST), *END),
    "resize, bicubic": lambda: compose(v1.Resize((20, 20), v1.InterpolationMode.BICUBIC), *END),
    "resize, box": lambda: compose(v1.Resize((20, 20), v1.InterpolationMode.BOX), *END),
    "random crop": lambda: compose(v1.Resize(24), v1.RandomCrop(20), *END),
    "random resized crop": lambda: compose(v1.RandomResizedCrop(20), v1.RandomHorizontalFlip(), *END),
    "five crops": lambda: compose(
        v1.Resize(24), v1.FiveCrop(20), v1.Lambda(lambda crops: torch.stack([END[0](each) for each in crops]))
    ),
    "flips": lambda: compose(v1.Resize((20, 20)), v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(), *END),
    "jitter": lambda: compose(v1.Resize((20, 20)), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), *END),
    "rotation": lambda: compose(v1.Resize((20, 20)), v1.RandomRotation(30), *END),
    "affine": lambda: compose(v1.Resize((20, 20)), v1.RandomAffine(10, (0.1, 0.1), (0.9, 1.1), 5), *END),
    "perspective": lambda: compose(v1.Resize((20, 20)), v1.RandomPerspective(), *END),
    "RandAugment": lambda: compose(v1.Resize((20, 20)), v1.RandAugment(), *END),
    "TrivialAugmentWide": lambda: compose(v1.Resize((20, 20)), v1.TrivialAugmentWide(), *END),
    "AutoAugment": lambda: compose(v1.Resize((20, 20)), v1.AutoAugment(), *END),
    "AugMix": lambda: compose(v1.Resize((20, 20)), v1.AugMix(), *END),
    "random erasing": lambda: compose(v1.Resize((20, 20)), *END, v1.RandomErasing(0.5)),
    "random grey": lambda: compose(v1.Resize((20, 20)), v1.RandomGrayscale(0.5), *END),
    "random order": lambda: compose(
        v1.Resize((20, 20)), v1.RandomOrder([v1.RandomHorizontalFlip(), v1.RandomInvert()]), *END
    ),
    "random choice": lambda: compose(v1.RandomChoice([v1.Resize((20, 20)), v1.RandomResizedCrop(20)]), *END),
    "random apply": lambda: compose(v1.RandomApply([v1.GaussianBlur(3)]), v1.Resize((20, 20)), *END),
    "padding": lambda: compose(v1.Resize((16, 18)), v1.Pad(2, 7, "constant"), v1.RandomCrop(16, 4), *END),
    "padding, reflected": lambda: compose(v1.Resize((16, 18)), v1.Pad(2, padding_mode="reflect"), *END),
    "grey": lambda: compose(v1.Resize((20, 20)), v1.Grayscale(), v1.ToTensor(), v1.Normalize([0.5], [0.5])),
    "grey in three channels": lambda: compose(v1.Grayscale(3), v1.Resize((20, 20)), *END),
    "one mean for all": lambda: compose(v1.Resize((20, 20)), v1.ToTensor(), v1.Normalize([0.5], [0.5])),
    "in place, twice": lambda: compose(v1.Resize((20, 20)), *END, v1.Normalize([0.1] * 3, [3] * 3, inplace=True)),
    "bytes": lambda: compose(v1.Resize((20, 20)), v1.PILToTensor()),
    "bytes to floats": lambda: compose(v1.Resize((20, 20)), v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)),
    "bytes to halves": lambda: compose(v1.Resize((20, 20)), v1.PILToTensor(), v1.ConvertImageDtype(torch.half)),
    "resized as a tensor": lambda: compose(v1.PILToTensor(), v1.Resize((20, 20), antialias=True)),
    "resized as floats": lambda: compose(v1.ToTensor(), v1.Resize((20, 20), antialias=True), END[1]),
    "lambda": lambda: compose(v1.Lambda(lambda image: image.rotate(90)), v1.Resize((20, 20)), *END),
    "random lambda": lambda: compose(v1.Lambda(noisy), v1.Resize((20, 20)), *END),
    "random lambda behind": lambda: compose(v1.Resize((20, 20)), v1.Lambda(noisy), *END),
    "metadata": lambda: compose(v1.Resize((20, 20)), v1.Lambda(lambda image: len(repr(image.info)))),
    "own class": lambda: compose(OwnResize((20, 20)), *END),
    "hook": lambda: compose(with_a_hook(v1.Resize((20, 24))), v1.CenterCrop(20), *END),
    "nested": lambda: compose(compose(v1.Resize(24), v1.RandomCrop(20)), compose(*END)),
    "weights": lambda: torch_presets().ImageClassification(crop_size=20, resize_size=24),
    "v2": lambda: compose2(v2.Resize((20, 20)), v2.RandomHorizontalFlip(), *END2),
    "v2, on tensors": lambda: compose2(v2.ToImage(), v2.Resize((20, 20)), v2.RandomHorizontalFlip(), *END2[1:]),
    "v2, deterministic": lambda: compose2(v2.Resize(24), v2.CenterCrop(20), *END2),
    "v2, deterministic on tensors": lambda: compose2(v2.ToImage(), v2.Resize(24), v2.CenterCrop(20), *END2[1:]),
    "v2, PILToTensor": lambda: compose2(v2.PILToTensor(), v2.Resize((20, 20)), FLOAT, v2.ToPureTensor()),
    "v2, RGB, pad": lambda: compose2(v2.RGB(), v2.Pad(3, {tv_tensors.Image: 1}), v2.Resize((20, 20)), *END2),
    "v2, scaled in the end": lambda: compose2(v2.Resize((20, 20)), v2.ToImage(), v2.ConvertImageDtype(torch.float32)),
    "v2, unscaled": lambda: compose2(v2.Resize((20, 20)), v2.ToImage(), v2.ToDtype(torch.float32)),
    "v2, RandAugment": lambda: compose2(v2.Resize((20, 20)), v2.RandAugment(), *END2),
    "v2, jitter on tensors": lambda: compose2(v2.ToImage(), v2.Resize((20, 20)), v2.ColorJitter(0.4, 0.4), *END2[1:]),
    "v2, erasing": lambda: compose2(v2.Resize((20, 20)), *END2, v2.RandomErasing(0.5)),
    "v2 in v1": lambda: compose(v2.Resize((20, 20)), v1.RandomHorizontalFlip(), *END2),
    "v2, ToTensor": lambda: compose2(v2.Resize((20, 20)), quietly(v2.ToTensor), v2.Normalize(MEAN, STD)),
    "v1 in v2": lambda: compose2(v1.Resize((20, 20)), v2.RandomHorizontalFlip(), *END),
}


def torch_presets():
    from torchvision.transforms import _presets

    return _presets


def epochs(loader, count=3):
    """Return the batches of some epochs, and the states of all random generators after them."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    batches = [batch for _ in range(count) for batch in loader]
    return batches, (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))


@contextmanager
def cached(loader):
    store = store_for(datasets_in(loader.dataset), None)
    assert refusal(loader) is None
    with changed(loader, CachedImages(store, True)):
        yield store


def assert_as_plain(make, count=3):
    """Check that the epochs of a loader with a cache equal those of a plain one, and return the cached data."""
    expected, loader = epochs(make(), count), make()
    with cached(loader) as store:
        assert_same(epochs(loader, count), expected)
        return store.usage()


def assert_same(one, other):
    (left, left_states), (right, right_states) = one, other
    assert len(left) == len(right) > 1
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            assert type(x) is type(y)
            assert x.dtype == y.dtype
            assert x.stride() == y.stride()
            assert torch.equal(x, y)
    assert torch.equal(left_states[0], right_states[0])
    assert left_states[1:] == right_states[1:]


# Pipelines of which only the first transform's input is cached.
NOT_RESIZED = {"random resized crop", "random choice", "random apply", "resized as floats", "lambda", "random lambda"}
NOT_RESIZED |= {"own class", "hook", "nested", "resized as a tensor", "v2, on tensors", "v2, deterministic on tensors"}
NOT_RESIZED |= {"v2, PILToTensor", "v2, jitter on tensors"}
FILES = 20


@pytest.mark.parametrize("name", PIPELINES)
def test_batches_and_draws_are_the_plain_loaders(pictures, name, decodings):
    def loader():
        return DataLoader(datasets.ImageFolder(pictures, PIPELINES[name]()), 4, shuffle=True)

    expected = epochs(loader())
    in_plain_epochs = len(decodings)
    changed_loader = loader()
    with cached(changed_loader) as store:
        first = epochs(changed_loader, 1)
        decodings.clear()
        assert_same(epochs(changed_loader), expected)
    assert len(first[0]) * 3 == len(expected[0])
    assert in_plain_epochs >= 3 * FILES
    assert not decodings, "files were decoded again"
    assert store.usage().entries >= FILES
    (plan,) = plans_in(changed_loader.dataset)
    assert bool(plan.first) is (name not in NOT_RESIZED)


DATASETS = {
    "subset": lambda data: Subset(data, [9, 3, 3, 19, 1, 17]),
    "two": lambda data: ConcatDataset([data, Subset(data, range(5))]),
    "subset of a subset": lambda data: Subset(Subset(data, range(2, 14)), [-1, 3, 5, 4]),
    "two transforms": lambda data: ConcatDataset(
        [data, datasets.ImageFolder(data.root, compose(v1.Resize((20, 20)), v1.ToTensor()))]
    ),
    "transform of the target": lambda data: datasets.ImageFolder(
        data.root, data.transform, lambda y: y + random.random()
    ),
    "other labels": lambda data: Relabelled(data.root, data.transform),
    "folder of files": lambda data: datasets.DatasetFolder(data.root, data.loader, (".jpg",), data.transform),
}


class Relabelled(datasets.ImageFolder):
    """Has its own classes and samples, but the usual reading."""

    def find_classes(self, directory):
        return ["no", "yes"], {"no": 0, "yes": 1}

    def make_dataset(self, directory, *args, **kwargs):
        return [(f"{directory}/{name}.jpg", len(name) % 2) for name in ("cats/0", "dogs/1", "cats/exif", "dogs/grey")]


class WithPaths(datasets.ImageFolder):
    """Has its own reading."""

    def __getitem__(self, index):
        return *super().__getitem__(index), self.samples[index][0]


class Files(Dataset):
    """A dataset as users write it."""

    def __init__(self, samples, transform):
        self.samples, self.transform = samples, transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), label


LEFT_ALONE = {
    "items of its own": lambda data: WithPaths(data.root, data.transform),
    "no folder": lambda data: Files(data.samples, data.transform),
    "one of two": lambda data: ConcatDataset([data, Files(data.samples, data.transform)]),
    "loader of its own": lambda data: datasets.ImageFolder(data.root, data.transform, loader=Image.open),
    "transform of its own": lambda data: datasets.ImageFolder(data.root, lambda image: END[0](image)),
    "no transform": lambda data: datasets.ImageFolder(data.root),
    "hook of the pipeline": lambda data: datasets.ImageFolder(data.root, with_a_hook(compose2(v2.Resize((20, 20))))),
}


@pytest.mark.parametrize("make", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_datasets_with_code_of_their_own_are_left_alone(pictures, make):
    loader = DataLoader(make(datasets.ImageFolder(pictures, PIPELINES["resize"]())), 3)
    assert refusal(loader)
    assert CachedImages(None, True).attributes(loader) == {}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_of_all_kinds_give_what_they_gave(pictures, make, workers):
    transform = compose(v1.Resize(24), v1.RandomCrop(20), *END)

    def batches(change):
        loader = DataLoader(make(datasets.ImageFolder(pictures, transform)), 3, shuffle=True, num_workers=workers)
        with cached(loader) if change else nullcontext():
            return epochs(loader)

    assert_same(batches(True), batches(False))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["random crop", "v2, on tensors", "RandAugment", "weights", "random lambda behind"])
def test_workers_draw_as_the_plain_loaders_do(pictures, name, workers, decodings):
    def loader():
        data = datasets.ImageFolder(pictures, PIPELINES[name]())
        return DataLoader(data, 4, shuffle=True, num_workers=workers, worker_init_fn=seeded)

    assert assert_as_plain(loader, 2).entries >= FILES


def seeded(worker):
    """Seed NumPy, as in torch's notes on reproducibility, and use the dataset's attributes."""
    np.random.seed(torch.initial_seed() % 2**32)
    data = torch.utils.data.get_worker_info().dataset
    assert isinstance(data, datasets.ImageFolder)
    data.samples = [*data.samples]


def summed(samples):
    assert all(type(image) is torch.Tensor for image, _ in samples)
    return [torch.stack([image for image, _ in samples]).sum(0)]


SETTINGS = {
    "workers that are kept": {"num_workers": 2, "persistent_workers": True},
    "a collate function": {"collate_fn": summed},
    **{f"workers by {kind}": {"num_workers": 1, "multiprocessing_context": kind} for kind in ("spawn", "forkserver")},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (" by " in name)) for name in SETTINGS])
def test_loaders_of_all_kinds_give_what_they_gave(pictures, name):
    def loader():
        data = datasets.ImageFolder(pictures, PIPELINES["random crop"]())
        return DataLoader(data, 4, shuffle=True, **SETTINGS[name])

    assert_as_plain(loader, 1 if " by " in name else 3)


def transformed_anew(data):
    for size in (16, 24, 16, 24):
        data.transform = compose(v1.Resize((size, size)), v1.ToTensor())
        yield


def other_files(data):
    samples = data.samples
    for first in (0, 5, 2, 0):
        data.samples = samples[first:] + samples[:first]
        yield


def decoded_differently(data):
    load = data.loader
    for turned in (False, True, False, True):
        data.loader = (lambda path: load(path).rotate(90)) if turned else load
        yield


def without_a_pipeline(data):
    pipeline = compose(v1.Resize((16, 16)), v1.ToTensor())
    for transform in (pipeline, END[0], pipeline, lambda image: END[0](image.rotate(90))):
        data.transform = transform
        yield


class Doubled(v1.Normalize):
    """Is unknown, like any subclass."""

    def forward(self, image):
        return 2 * super().forward(image)


#: Changes of the transforms in a pipeline; the first one leaves them as they are, so that later ones meet its entries.
CHANGES = [
    lambda steps: None,
    lambda steps: setattr(steps[0], "size", [10, 10]),
    lambda steps: steps[0].size.__setitem__(0, 10),
    lambda steps: steps[0].register_forward_hook(lambda module, given, image: image.rotate(90)),
    lambda steps: setattr(steps[0], "forward", lambda image: image.rotate(90)),
    lambda steps: setattr(steps[2], "__class__", Doubled),
    lambda steps: setattr(steps[2], "mean", [0.1]),
    lambda steps: steps.__setitem__(0, v1.Resize([9, 9])),
    lambda steps: steps.__setitem__(0, v2.Resize([8, 8])),
    lambda steps: steps.insert(0, v1.Grayscale(3)),
    lambda steps: steps.pop(),
]


def changed_in_place(data):
    for change in CHANGES:
        data.transform = compose(v1.Resize([8, 8]), v1.ToTensor(), v1.Normalize([0.1, 0.2, 0.3], [1.0] * 3))
        change(data.transform.transforms)
        yield


@pytest.mark.parametrize(
    "changes", [transformed_anew, other_files, decoded_differently, without_a_pipeline, changed_in_place]
)
@pytest.mark.parametrize("size", [22, 5])
def test_dataset_that_the_loop_changes_between_epochs_or_batches(pictures, changes, size):
    """As for progressive resizing: entries of one size are not used for another."""

    def run(change):
        data = datasets.ImageFolder(pictures, compose(v1.Resize((16, 16)), *END))
        data.samples = [data.samples[0]] * 20  # all of the same size
        loader = DataLoader(data, size)
        with cached(loader) if change else nullcontext():
            batches = [batch for _ in range(2) for _, batch in zip(changes(data), loader, strict=False)]
            for _ in changes(data):
                batches += loader
        return batches

    for (one, _), (other, _) in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


def test_images_without_a_batch(pictures):
    data = datasets.ImageFolder(pictures, PIPELINES["resize"]())
    expected = epochs(DataLoader(data, batch_size=None))
    loader = DataLoader(data, batch_size=None)
    with cached(loader):
        one, states = epochs(loader)
    assert_same(([[x] for x, _ in one], states), ([[x] for x, _ in expected[0]], expected[1]))


@pytest.mark.parametrize(
    "transform", [compose(*END), compose(v1.Resize((20, 20)), v1.ToTensor(), v1.Normalize(MEAN, [0, 1, 1]))]
)
def test_error_is_the_plain_loaders(pictures, transform):
    """Images of different sizes cannot be batched, and a deviation of 0 is rejected."""

    def error(change):
        loader = DataLoader(datasets.ImageFolder(pictures, transform), 8)
        with cached(loader) if change else nullcontext(), pytest.raises((RuntimeError, ValueError)) as raised:
            list(loader)
        return type(raised.value), str(raised.value)

    assert error(True) == error(False)


def test_dataset_itself_is_not_changed(pictures):
    data = datasets.ImageFolder(pictures, PIPELINES["resize"]())
    before, loader = dict(vars(data)), DataLoader(data, 8)
    with cached(loader):
        list(loader)
        assert vars(data) == before
    assert loader.dataset is data
