"""What can go wrong with a cache ends in a plain read or a rebuilt entry, never in another picture."""

import gc
import hashlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nano_loop.distributed.launch import abandoned
from nano_loop.errors import NanoError
from nano_loop.images import entries, lifetime
from nano_loop.images.store import Store

KEYS = [f"{number:02x}" + "0" * 38 for number in range(6)]


def entry(number, size=2000):
    header = {"kind": "tensor", "shape": [1, 1, size], "strides": [size, size, 1]}
    return header, bytes([number]) * size


def fill(store):
    for number, key in enumerate(KEYS):
        store.put(key, *entry(number))


def assert_right(store, count=None):
    found = [(number, store.get(key)) for number, key in enumerate(KEYS)]
    assert all(each is None or bytes(each[1]) == entry(number)[1] for number, each in found)
    if count is not None:
        assert sum(each is not None for _, each in found) == count


@contextmanager
def files_of_at_most(size):
    """Let the system refuse to write more to a file, as on a full disk: a part of the last write goes through."""
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
    store.put(KEYS[0], *entry(0))
    with files_of_at_most(1000):
        fill(store)
    assert_right(store, 1)
    assert not [*tmp_path.rglob("unfinished*")]
    assert any("cannot be written" in note for note in store.notes())
    assert store.notes() == []


def test_folder_without_rights_is_noted():
    store = Store(Path("/sys/kernel"), None, sums=True)  # where root may not write either
    fill(store)
    assert_right(store, 0)
    assert "cannot be written" in store.notes()[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"1"),
        lambda path: path.write_bytes(path.read_bytes()[:-9] + b"1" + path.read_bytes()[-8:]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(path.read_bytes().replace(b"tensor", b"kensor")),
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
    store.put(KEYS[2], *entry(2))
    assert_right(store, len(KEYS))


FOREIGN = [
    {"kind": "pil", "mode": "RGB", "size": [90_000, 90_000], "info": ""},
    {"kind": "pil", "mode": "L", "size": [-40, -50], "info": ""},
    {"kind": "pil", "mode": "RGB", "size": [2000], "info": ""},
    {"kind": "pil", "mode": "L", "size": [40, 50]},
    {"kind": "tensor", "shape": [1, 1, 9 << 30], "strides": [1, 1, 1]},
    {"kind": "tensor", "shape": [1, 2, 2000], "strides": [1, -1, 1]},
    {"kind": "tensor", "shape": [2000], "strides": [1]},
    {"kind": "image"},
    {},
]


@pytest.mark.parametrize("header", FOREIGN)
def test_entry_whose_header_is_of_another_image_is_made_anew(tmp_path, header):
    store = Store(tmp_path, None, sums=True)
    store.put(KEYS[0], header, bytes(2000))
    assert store.get(KEYS[0]) is None
    assert not (tmp_path / KEYS[0][:2] / KEYS[0][2:]).exists()
    store.put(KEYS[0], *entry(0))
    assert_right(store, 1)


@pytest.mark.parametrize("content", [b"", b"1", b"\xff" * 16, b"\xff" * 17, bytes(15), bytes(1 << 20)])
def test_damaged_count_of_a_cache_begins_anew(tmp_path, content):
    (tmp_path / "used").write_bytes(content)
    store = Store(tmp_path, None, sums=True)
    assert store.usage() == (0, 0)
    fill(store)
    assert_right(store, len(KEYS))
    assert store.usage() in [(4096 * len(KEYS), len(KEYS)), (4096, 1)]


@pytest.mark.parametrize("name", ["used", "note-" + hashlib.blake2b(b"a note", digest_size=8).hexdigest()])
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
        from nano_loop.images.store import Store
        os.link = lambda *paths: os.kill(os.getpid(), 9)
        Store(Path(sys.argv[1]), None, sums=True).put(sys.argv[2], {}, bytes(100))
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


def fill_many_times(folder, errors):
    store = Store(folder, None, sums=True)
    for _ in range(40):
        fill(store)
        assert_right(store)
        for key in KEYS[::2]:
            (folder / key[:2] / key[2:]).unlink(missing_ok=True)
    errors.put(store.notes())


def test_processes_that_write_the_same_entries_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    writers = [context.Process(target=fill_many_times, args=(tmp_path, errors)) for _ in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0, 0, 0]
    assert all(errors.get() == [] for _ in writers)
    assert not [*tmp_path.rglob("unfinished*")]


class Data(torch.utils.data.Dataset):
    pass


def folders():
    return [each for parent in ("/dev/shm", "/tmp") for each in Path(parent).glob(f"nano_loop-images-{os.getpid()}-*")]


def test_cache_in_memory_lives_as_long_as_its_datasets():
    one, other = Data(), Data()
    store = lifetime.store_for([one], 10_000_000)
    assert lifetime.store_for([other, one], None) is store
    assert store.folder in folders()
    assert oct(store.folder.stat().st_mode)[-3:] == "700"
    fill(store)
    del one
    gc.collect()
    assert_right(store, len(KEYS))
    del other
    gc.collect()
    assert not store.folder.exists()
    assert folders() == []


def test_forked_process_does_not_delete_the_cache():
    data = Data()
    store = lifetime.store_for([data], 10_000_000)
    fill(store)

    def child():
        nonlocal data
        del data
        gc.collect()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert_right(store, len(KEYS))


def test_cache_of_a_process_that_was_killed_is_deleted_by_the_next():
    program = """if True:
        import os
        from nano_loop.images.lifetime import store_for
        class Data: pass
        data = Data()
        print(store_for([data], 1 << 20).folder, flush=True)
        os.kill(os.getpid(), 9)
    """
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    folder = Path(killed.stdout.strip())
    assert folder.exists()
    abandoned.delete_abandoned(folder.parent, "nano_loop-images-")
    assert not folder.exists()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "CMYK", "YCbCr"])
def test_images_come_back_with_their_metadata(mode):
    pixels = np.random.default_rng(0).integers(0, 255, (7, 9, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    image.info = {"dpi": (72.5, 72.5), "exif": b"\x00abc", "jfif": 257, "comment": "ä'\""}
    header, data = entries.written(image)
    found = entries.read(header, memoryview(bytearray(data)))
    assert found == image
    assert found.info == image.info
    assert type(found) is Image.Image
    found.putpixel((0, 0), 3 if mode == "L" else (3,) * len(found.getbands()))


def other_images():
    image = Image.new("RGB", (4, 4))
    image.info["icc"] = object()
    wide = Image.new("RGB", (4, 4))
    wide.info["exif"] = bytes(100_000)
    return {
        "palette": Image.new("P", (4, 4)),
        "metadata of another kind": image,
        "large metadata": wide,
        "floats": Image.new("F", (4, 4)),
        "tensor of floats": torch.zeros(3, 4, 4),
        "number": 3,
        "images": (image, image),
        "spread out": torch.zeros(3, 40, 40, dtype=torch.uint8)[:, ::9, ::9],
    }


@pytest.mark.parametrize("value", other_images().values(), ids=other_images())
def test_what_would_not_come_back_is_not_kept(value):
    assert entries.written(value) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60, dtype=torch.uint8).view(3, 4, 5),
        torch.arange(60, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1),
        torch.arange(60, dtype=torch.uint8).view(3, 4, 5)[:, 1:, 1:4],
        torch.arange(20, dtype=torch.uint8).view(1, 4, 5).expand(3, 4, 5),
    ],
    ids=["contiguous", "channels last", "crop", "expanded"],
)
def test_tensors_come_back_with_their_strides(tensor):
    header, data = entries.written(tensor)
    found = entries.read(header, memoryview(bytearray(data)))
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("links", [True, False])
def test_entry_that_two_processes_make_at_once_counts_once(tmp_path, monkeypatch, links):
    first, second = (Store(tmp_path, None, sums=True) for _ in range(2))
    opened = os.open

    def meanwhile(path, *args, **kwargs):
        if "unfinished-" in str(path) and not second.usage().entries > 1:
            monkeypatch.setattr(os, "open", opened)
            second.put(KEYS[0], *entry(0))
        return opened(path, *args, **kwargs)

    def refuse(*paths):
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "open", meanwhile)
    first.put(KEYS[0], *entry(0))
    assert first.usage() == ((4096, 1) if links else (2 * 4096, 2))
    assert_right(first, 1)
    assert not [*tmp_path.glob("??/unfinished-*")]
