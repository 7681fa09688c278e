"""Any problem with a cache results in a plain read or a rebuilt entry, never in a wrong picture."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from nano_loop.data.images import lifetime
from nano_loop.data.images.store import ImageEntry, Store, entry_of
from nano_loop.errors import NanoError

KEYS = [f"{number:02x}" + "0" * 38 for number in range(6)]


def entry(number, size=2000):
    return ImageEntry(np.full((1, size, 1), number, np.uint8), "{}")


def fill(store):
    for number, key in enumerate(KEYS):
        store.put(key, entry(number))


def assert_right(store, count=None):
    found = [(number, store.get(key)) for number, key in enumerate(KEYS)]
    assert all(each is None or np.array_equal(each.pixels, entry(number).pixels) for number, each in found)
    if count is not None:
        assert sum(each is not None for _, each in found) == count


@contextmanager
def files_of_at_most(size):
    """Make the system refuse further writes to a file, as on a full disk: the last write is partial."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignoring = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignoring)


@pytest.mark.parametrize(("limit", "most"), [(None, len(KEYS)), (3 * 4096, 3)])
def test_entries_come_back_as_they_were_within_the_limit_of_all_processes(tmp_path, limit, most):
    first, second = (Store(tmp_path, limit, sums=True) for _ in range(2))
    fill(first)
    fill(second)
    assert_right(second, most)
    assert first.usage() == (most * 4096, most)
    assert first.get("ff" + KEYS[0]) is None


def test_disk_that_is_full_ends_the_writing_and_leaves_no_parts(tmp_path):
    store = Store(tmp_path, None, sums=True)
    store.put(KEYS[0], entry(0))
    with files_of_at_most(1000):
        fill(store)
    assert_right(store, 1)
    assert not [*tmp_path.rglob("unfinished*")]
    assert any("cannot be written" in note for note in store.notes())
    assert store.notes() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"1"),
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"1" + path.read_bytes()[-8:]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(path.read_bytes().replace(b"image 2", b"image 3")),
        lambda path: os.truncate(path, 1 << 40),
        lambda path: path.unlink() or os.mkfifo(path),
        lambda path: path.rename(path.with_name("other")) and path.symlink_to("other"),
    ],
)
def test_damaged_entry_is_made_anew(tmp_path, damage):
    store = Store(tmp_path, None, sums=True)
    fill(store)
    damage(tmp_path / KEYS[2][:2] / KEYS[2][2:])
    assert_right(store, len(KEYS) - 1)
    assert "damaged" in store.notes()[0]
    store.put(KEYS[2], entry(2))
    assert_right(store, len(KEYS))


@pytest.mark.parametrize(
    "info",
    ["", "{", "(" * 5000, "[1, 2]", "[(1, 2)]", "__import__('os')", "{[]: 1}", "{'a': 1e999}.x", "{**{}}", "\ud800"],
)
def test_entry_whose_metadata_cannot_be_read_is_made_anew(tmp_path, info):
    """Its checksum is correct: another version or another program may have written it."""
    store = Store(tmp_path, None, sums=True)
    hostile = Mock(encode=lambda: info.encode(errors="surrogatepass"))
    store.put(KEYS[0], ImageEntry(entry(0).pixels, hostile))
    assert store.get(KEYS[0]) is None
    assert "damaged" in store.notes()[0]
    store.put(KEYS[0], entry(0))
    assert_right(store, 1)


@pytest.mark.parametrize("place", [40, 44])
def test_entry_of_a_size_that_no_image_has_is_made_anew(tmp_path, place):
    """It has no pixels, and a correct checksum."""
    store = Store(tmp_path, None, sums=True)
    store.put(KEYS[0], ImageEntry(np.zeros((0, 0, 1), np.uint8), "{}"))
    path = tmp_path / KEYS[0][:2] / KEYS[0][2:]
    data = bytearray(path.read_bytes())
    start = data.index(KEYS[0].encode())
    data[start + place : start + place + 4] = b"\xff" * 4
    data[start - 4 : start] = zlib.crc32(data[start:]).to_bytes(4, "little")
    path.write_bytes(data)
    assert store.get(KEYS[0]) is None


@pytest.mark.parametrize("content", [b"", b"1", b"\xff" * 16, b"\xff" * 17, bytes(15), bytes(1 << 20)])
def test_damaged_count_of_a_cache_begins_anew(tmp_path, content):
    (tmp_path / "used").write_bytes(content)
    store = Store(tmp_path, None, sums=True)
    assert store.usage() == (0, 0)
    fill(store)
    assert_right(store, len(KEYS))
    assert store.usage() in [(4096 * len(KEYS), len(KEYS)), (4096, 1)]


@pytest.mark.parametrize("name", ["used", "notes"])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("secret"), lambda path: path.mkdir()])
def test_what_is_no_file_is_neither_written_to_nor_read_nor_waited_for(tmp_path, name, plant):
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret, with many characters")
    plant(tmp_path / name)
    store = Store(tmp_path, None, sums=True)
    fill(store)
    store.note("a note")
    store.usage()
    assert not any("secret," in note for note in store.notes())
    assert secret.read_bytes() == b"a secret, with many characters"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_folder_of_another_user_is_not_used(tmp_path):
    folder, data = tmp_path / "cache", Data()
    folder.mkdir()
    assert lifetime.store_for([data], str(folder)).folder == folder
    (tmp_path / "link").symlink_to(folder)
    assert lifetime.store_for([data], str(tmp_path / "link")).folder == folder
    for owner, mode in ((65534, 0o755), (0, 0o777)):
        os.chown(folder, owner, owner)
        folder.chmod(mode)
        with pytest.raises(NanoError, match="belongs to user"):
            lifetime.store_for([data], str(folder))
        assert [*folder.iterdir()] == []


def test_entry_in_the_place_of_another_is_not_taken_for_it(tmp_path):
    store = Store(tmp_path, None, sums=True)
    fill(store)
    one, other = (tmp_path / key[:2] / key[2:] for key in KEYS[:2])
    other.write_bytes(one.read_bytes())
    assert_right(store, len(KEYS) - 1)


def test_process_that_is_killed_while_it_writes_leaves_no_entry(tmp_path):
    program = """if True:
        import os, sys
        from pathlib import Path
        import numpy as np
        from nano_loop.data.images.store import ImageEntry, Store
        os.rename = lambda *paths: os.kill(os.getpid(), 9)
        Store(Path(sys.argv[1]), None, sums=True).put(sys.argv[2], ImageEntry(np.zeros((9, 9, 3), np.uint8), "{}"))
    """
    killed = subprocess.run([sys.executable, "-c", program, tmp_path, KEYS[0]], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.rglob("unfinished*")
    store = Store(tmp_path, None, sums=True)
    assert store.get(KEYS[0]) is None
    store.tidy()
    assert left.exists()  # another process may be writing it
    os.utime(left, (time.time() - 1e4,) * 2)
    store.tidy()
    assert not left.exists()
    fill(store)
    assert_right(store, len(KEYS))


class Data(torch.utils.data.Dataset):
    pass


def folders(process):
    return [each for parent in ("/dev/shm", "/tmp") for each in Path(parent).glob(f"nano_loop-images-{process}-*")]


def test_cache_in_memory_lives_as_long_as_its_datasets():
    one, other = Data(), Data()
    store = lifetime.store_for([one], 10_000_000)
    assert lifetime.store_for([other, one], None) is store
    assert store.folder in folders(os.getpid())
    assert oct(store.folder.stat().st_mode)[-3:] == "700"
    fill(store)
    del one
    gc.collect()
    assert_right(store, len(KEYS))
    del other
    gc.collect()
    assert not store.folder.exists()
    assert folders(os.getpid()) == []


def test_forked_process_has_a_cache_of_its_own_and_does_not_delete_the_other():
    data, other = Data(), Data()
    store = lifetime.store_for([data], 10_000_000)
    fill(store)

    def child():
        nonlocal data
        assert lifetime.store_for([other], 10_000_000).folder != store.folder
        del data
        gc.collect()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert folders(process.pid) == []
    assert_right(store, len(KEYS))


@pytest.mark.parametrize("size", [(9, 7), (1, 1), (0, 3)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_images_come_back_with_their_metadata(tmp_path, mode, size):
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    image = Image.frombytes("RGB", size, pixels.tobytes()).convert(mode)
    image.info = {"dpi": (72.5, 72.5), "exif": b"\x00abc", "jfif": 257, "comment": "ä'\""}
    store = Store(tmp_path, None, sums=True)
    store.put(KEYS[0], entry_of(image))
    found = store.get(KEYS[0]).image()
    assert found == image
    assert found.info == image.info
    assert type(found) is Image.Image
    if width:
        found.putpixel((0, 0), 3 if mode == "L" else (3, 3, 3))


def other_images():
    image = Image.new("RGB", (4, 4))
    image.info["icc"] = object()
    wide = Image.new("RGB", (4, 4))
    wide.info["exif"] = bytes(100_000)
    return {
        **{mode: Image.new(mode, (4, 4)) for mode in ("P", "F", "RGBA", "CMYK", "I;16")},
        "metadata of another kind": image,
        "large metadata": wide,
        "tensor": torch.zeros(3, 4, 4, dtype=torch.uint8),
        "number": 3,
        "images": (image, image),
    }


@pytest.mark.parametrize("value", other_images().values(), ids=other_images())
def test_what_would_not_come_back_is_not_kept(value):
    assert entry_of(value) is None


def test_entry_that_two_processes_make_at_once_is_whole(tmp_path, monkeypatch):
    first, second = (Store(tmp_path, None, sums=True) for _ in range(2))
    rename = os.rename

    def rename_after_the_other(*paths):
        monkeypatch.setattr(os, "rename", rename)
        second.put(KEYS[0], entry(0))
        rename(*paths)

    monkeypatch.setattr(os, "rename", rename_after_the_other)
    first.put(KEYS[0], entry(0))
    assert_right(first, 1)
    first.put(KEYS[0], entry(0))
    assert first.usage() == (2 * 4096, 2), "what is there is not counted again"
    assert not [*tmp_path.glob("??/unfinished-*")]
