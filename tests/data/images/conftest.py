"""Pictures of many kinds, created once, and old enough that a change would be visible in their times."""

import time

import numpy as np
import pytest
from PIL import Image

from nano_loop.data.images import reading


def picture(seed, size=(96, 72), mode="RGB"):
    """Return a smooth picture with some noise."""
    draws = np.random.default_rng(seed)
    small = Image.fromarray(draws.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = np.clip(pixels + draws.integers(-9, 9, pixels.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert(mode)


def write_pictures(folder):
    """Write files of two classes: JPEG (colours, grey, CMYK, rotated by EXIF), PNG (palette, alpha) and WebP."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for label in ("cats", "dogs"):
        place = folder / label
        place.mkdir(parents=True)
        for number in range(3):
            seed = number + 10 * len(label) + (label == "dogs")
            picture(seed, (96 + 8 * number, 72 + number)).save(place / f"{number}.jpg", quality=90)
        picture(5).save(place / "exif.jpg", exif=turned, dpi=(300, 300))
        picture(6, mode="L").save(place / "grey.jpg")
        picture(7, mode="CMYK").save(place / "cmyk.jpg")
        picture(8).quantize(64).save(place / "palette.png", transparency=3)
        picture(9, mode="RGBA").save(place / "alpha.png")
        picture(10, mode="LA").save(place / "grey_alpha.png")
        picture(11).save(place / "plain.webp")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Return a folder of pictures for `ImageFolder`."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    return folder


@pytest.fixture(autouse=True)
def files_are_settled(monkeypatch):
    """Treat all files as old enough not to change."""
    monkeypatch.setattr(reading, "SETTLED", -1e9)


@pytest.fixture
def decodings(monkeypatch):
    """Count the conversions of opened files, each of which decodes one."""
    from PIL import ImageFile

    counts = []
    original = ImageFile.ImageFile.load

    def load(self):
        if self.tile:
            counts.append(time.monotonic())
        return original(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    return counts
