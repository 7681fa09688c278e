"""Batches and random draws are those of the plain loader, for many pipelines, over several epochs."""

import random
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from nano_loop.images.lifetime import store_for
from nano_loop.images.loaders import CachedImages, datasets_in, plans_in, refusal
from nano_loop.patching.objects.loaders import changed

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


def hooked():
    resize = v1.Resize((20, 24))
    resize.register_forward_hook(lambda module, given, image: image.rotate(random.randint(0, 90)))
    return resize


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
    "hook": lambda: compose(hooked(), v1.CenterCrop(20), *END),
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
    "v1 in v2": lambda: compose2(v1.Resize((20, 20)), v2.RandomHorizontalFlip(), *END),
}


def torch_presets():
    from torchvision.transforms import _presets

    return _presets


def epochs(loader, count=3):
    """Return the batches of some epochs, and the states of all generators after them."""
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
    """Hold the epochs of a loader that fetches through the cache to those of a plain one, and return what it holds."""
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


# Those of which nothing is kept, or only what the first transform gets.
NOT_RESIZED = {"random resized crop", "random choice", "random apply", "resized as floats", "lambda", "random lambda"}
NOT_RESIZED |= {"own class", "hook", "nested"}
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
    not_understood = 2  # WebP
    assert in_plain_epochs >= 3 * (FILES - not_understood)
    assert len(decodings) <= 3 * not_understood, "files were decoded again"
    assert store.usage().entries >= FILES - not_understood
    modes = [plan.names for plan in plans_in(changed_loader.dataset)]
    assert bool(modes[0]) is (name not in NOT_RESIZED)


DATASETS = {
    "subset": lambda data: Subset(data, [9, 3, 3, 19, 1, 17]),
    "two": lambda data: ConcatDataset([data, Subset(data, range(5))]),
    "own": lambda data: Files(data.samples, data.transform),
    "own transform of a subset": lambda data: Transformed(
        Subset(datasets.ImageFolder(data.root), range(9)), data.transform
    ),
    "two views": lambda data: datasets.ImageFolder(data.root, TwoViews(data.transform)),
    "transform of the target": lambda data: datasets.ImageFolder(
        data.root, data.transform, lambda y: y + random.random()
    ),
}


class Files(Dataset):
    """What programs write by hand."""

    def __init__(self, samples, transform):
        self.samples, self.pipeline, self.reads = samples, transform, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        path, label = self.samples[index]
        with Image.open(path) as image:
            width, height = image.size
            pixels = image.convert("RGB")
        return {"image": self.pipeline(pixels) * 2, "label": label, "shape": (width, height), "n": random.random()}


class Transformed(Dataset):
    def __init__(self, dataset, transform):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return self.transform(image), label


class TwoViews:
    def __init__(self, pipeline):
        self.pipeline = pipeline

    def __call__(self, image):
        return torch.stack([self.pipeline(image), self.pipeline(image)])


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_of_all_kinds_give_what_they_gave(pictures, make, workers):
    transform = compose(v1.Resize(24), v1.RandomCrop(20), *END)

    def batches(change):
        loader = DataLoader(make(datasets.ImageFolder(pictures, transform)), 3, shuffle=True, num_workers=workers)
        with cached(loader) if change else nullcontext():
            found, states = epochs(loader)
        return [torch.utils._pytree.tree_leaves(each) for each in found], states, getattr(loader.dataset, "reads", None)

    (*plain, reads), (*ours, our_reads) = batches(False), batches(True)
    assert_same(ours, plain)
    assert reads == our_reads


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["random crop", "v2, on tensors", "RandAugment", "weights", "random lambda behind"])
def test_workers_draw_as_the_plain_loaders_do(pictures, name, workers, decodings):
    def loader():
        data = datasets.ImageFolder(pictures, PIPELINES[name]())
        return DataLoader(data, 4, shuffle=True, num_workers=workers, worker_init_fn=seeded)

    assert assert_as_plain(loader, 2).entries >= FILES - 2


def seeded(worker):
    """Seed NumPy, as torch's notes on reproducibility do, and use the dataset's attributes."""
    np.random.seed(torch.initial_seed() % 2**32)
    data = torch.utils.data.get_worker_info().dataset
    assert isinstance(data, datasets.ImageFolder)
    data.samples = [*data.samples]


def test_workers_that_are_kept_between_epochs(pictures):
    def loader():
        data = datasets.ImageFolder(pictures, PIPELINES["random crop"]())
        return DataLoader(data, 4, shuffle=True, num_workers=2, persistent_workers=True)

    assert_as_plain(loader)


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
@pytest.mark.slow
def test_workers_that_are_not_forked(pictures, kind):
    def loader():
        data = datasets.ImageFolder(pictures, PIPELINES["random crop"]())
        return DataLoader(data, 8, num_workers=1, multiprocessing_context=kind)

    assert_as_plain(loader, 1)


def write_pets(root, pictures):
    """Lay pictures out as the archive of the Oxford-IIIT Pet data set is unpacked."""
    images, annotations = root / "oxford-iiit-pet/images", root / "oxford-iiit-pet/annotations"
    images.mkdir(parents=True)
    annotations.mkdir()
    files = sorted(Path(pictures).glob("cats/*.jpg"))
    for number, path in enumerate(files):
        (images / f"Great_Cat_{number}.jpg").write_bytes(path.read_bytes())
    lines = [f"Great_Cat_{number} {1 + number % 3} 1 1" for number in range(len(files))]
    (annotations / "trainval.txt").write_text("\n".join(lines))
    return len(files)


@pytest.mark.parametrize("shuffle", [False, True])
def test_pets_are_decoded_once(tmp_path, pictures, shuffle, decodings):
    count = write_pets(tmp_path, pictures)

    def loader():
        transform = compose(v1.Resize((24, 28)), v1.RandomCrop(20), v1.RandomHorizontalFlip(), *END)
        return DataLoader(datasets.OxfordIIITPet(tmp_path, transform=transform), 2, shuffle=shuffle)

    assert assert_as_plain(loader).entries == count
    assert len(decodings) == (3 + 1) * count  # in each plain epoch, and in the first of the others


def test_small_images_in_memory_are_resized_once(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    monkeypatch.setattr(datasets.CIFAR10, "__init__", lambda self, transform: None)

    def loader():
        data = datasets.CIFAR10(None)
        data.data, data.targets, data.target_transform = pixels, [*range(12)], None
        data.transform = compose(v1.Resize(48), v1.RandomCrop(40), *END)
        return DataLoader(data, 5, shuffle=True)

    expected = epochs(loader())
    changed_loader = loader()
    with cached(changed_loader) as store:
        found = epochs(changed_loader, 1)
        assert store.usage().entries == len(pixels)
        resizes = []
        monkeypatch.setattr(v1.Resize, "forward", lambda self, image: resizes.append(image))
        assert_same(epochs(changed_loader), expected)
        assert not resizes
    assert len(found[0]) == 3


def test_transform_that_the_loop_changes(pictures):
    """Progressive resizing: what was kept for one size is not used for another."""

    def run(change):
        data = datasets.ImageFolder(pictures, compose(v1.Resize((16, 16)), *END))
        loader = DataLoader(data, 22)
        batches = []
        with cached(loader) if change else nullcontext():
            for size in (16, 24, 16):
                data.transform.transforms[0].size = (size, size)
                batches += loader
        return batches

    for (one, _), (other, _) in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


class Marked(Files):
    """Changes some of the images that it has opened, at random."""

    def __getitem__(self, index):
        image = Image.open(self.samples[index][0]).convert("RGB")
        if random.random() < 0.5:
            image.paste((255, 0, 0), (0, 0, 40, 40))
        return self.pipeline(image)


class Drafted(Files):
    """Has some files decoded at half their size."""

    def __getitem__(self, index):
        image = Image.open(self.samples[index][0])
        if random.random() < 0.5:
            image.draft("RGB", (40, 30))
        return self.pipeline(image.convert("RGB"))


class Peeking(Files):
    """Looks at the pixels, at metadata and at copies, before it transforms the image."""

    def __getitem__(self, index):
        image = Image.open(self.samples[index][0]).convert("RGB")
        seen = [np.asarray(image).mean(), image.getpixel((3, 3)), sorted(image.info), image.copy().size]
        assert type(image) is Image.Image
        return self.pipeline(image) + float(seen[0])


class Closing(Files):
    """Closes the image before it looks at the pixels of the converted one, and reads the file again itself."""

    def __getitem__(self, index):
        path, _ = self.samples[index]
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        mean = np.asarray(pixels).mean()
        with open(path, "rb") as file:
            pixels = self.pipeline(Image.open(file).convert("RGB"))
            file.seek(0)
            return pixels + float(mean) + len(file.read())


class Frames(Files):
    """Converts a part of the images, and passes others on as they were opened."""

    def __getitem__(self, index):
        image = Image.open(self.samples[index % 3][0])
        return self.pipeline(image.convert("L").convert("RGB") if random.random() < 0.5 else image)


@pytest.mark.parametrize("kind", [Marked, Drafted, Peeking, Closing, Frames])
def test_image_that_the_dataset_has_touched_is_not_taken_for_the_file(pictures, kind):
    def run(change):
        samples = datasets.ImageFolder(pictures).samples
        loader = DataLoader(kind(samples, compose(v1.Resize((20, 24)), *END)), 11)
        with cached(loader) if change else nullcontext():
            found, states = epochs(loader, 4)
        return [[each] for each in found], states

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the plain loader leaves files open
        assert_same(run(True), run(False))


def test_own_collate_function_gets_images(pictures):
    data = datasets.ImageFolder(pictures, PIPELINES["resize"]())

    def collate(samples):
        assert all(type(image) is torch.Tensor for image, _ in samples)
        return [torch.stack([image for image, _ in samples]).sum(0)]

    def loader():
        return DataLoader(data, 5, collate_fn=collate)

    assert_as_plain(loader)


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
    """Images of several sizes do not make a batch, and a deviation of 0 is refused."""

    def error(change):
        loader = DataLoader(datasets.ImageFolder(pictures, transform), 8)
        with cached(loader) if change else nullcontext(), pytest.raises((RuntimeError, ValueError)) as raised:
            list(loader)
        return type(raised.value), str(raised.value)

    assert error(True) == error(False)


def test_what_was_replaced_is_put_back(pictures):
    before = Image.open, Image.Image.convert, v1.Compose.__call__, v2.Compose.forward
    loader = DataLoader(datasets.ImageFolder(pictures, PIPELINES["resize"]()), 8)
    with cached(loader):
        list(loader)
        assert (Image.open, Image.Image.convert, v1.Compose.__call__, v2.Compose.forward) == before
    assert type(loader.dataset) is datasets.ImageFolder
