"""Files and folders are opened once, and rejected if another user can change or replace them."""

import grp
import os
import pwd
import stat
from types import SimpleNamespace

import pytest

from nano_loop.errors import NanoError
from nano_loop.storage import trusted_files
from nano_loop.storage.cache_folder import JsonFile, cache_folder
from nano_loop.storage.trusted_files import (
    make_folder,
    open_file,
    opened_folder,
    read_file,
    resolved,
    trusted_parent,
    write_file,
)

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what is another user's")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "folder/file").write_bytes(b"own")
    return tmp_path / "folder"


def test_no_path_is_opened_twice(folder, monkeypatch):
    opened, original = [], os.open

    def noting(path, flags, mode=0o777, *, dir_fd=None):
        opened.append((path, dir_fd is None))
        return original(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", noting)
    with opened_folder(folder) as descriptor:
        read_file("file", descriptor, 9)
    assert opened == [("/", True), *((part, False) for part in (*folder.parts[1:], "file"))]


def test_folder_that_is_replaced_once_it_is_open_is_not_read_from(folder, tmp_path):
    with opened_folder(folder) as descriptor:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (folder / "file").write_bytes(b"another's")
        assert read_file("file", descriptor, 9) == b"own"
        write_file("file", descriptor, b"new")
    assert (tmp_path / "moved/file").read_bytes() == b"new"
    assert (folder / "file").read_bytes() == b"another's"


PLANTED = {
    "a pipe": lambda path: os.mkfifo(path, 0o600),
    "a folder": lambda path: path.mkdir(mode=0o700),
    "a link": lambda path: path.symlink_to("/proc/self/environ"),
    "a device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
    "another user's file": lambda path: path.touch(0o600) or os.chown(path, OTHER, -1),
    "a file for all": lambda path: path.touch() or path.chmod(0o602),
    "a file for a group": lambda path: path.touch() or os.chown(path, -1, OTHER) or path.chmod(0o620),
}


@as_root
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_is_no_file_of_this_user_alone_is_not_read_and_is_replaced(folder, plant):
    plant(folder / "planted")
    file = JsonFile(folder / "planted", 1)
    with opened_folder(folder) as descriptor:
        with pytest.raises((NanoError, OSError)):
            open_file("planted", descriptor)
        assert file.read() == {}
    file.write({"key": 1})
    assert file.read() == ({} if (folder / "planted").is_dir() else {"format": 1, "key": 1})
    assert {path.name for path in folder.iterdir()} == {"file", "planted"}


def test_file_of_more_than_the_limit_is_not_read(folder):
    os.truncate(folder / "file", 1 << 40)
    with opened_folder(folder) as descriptor, pytest.raises(OSError, match="has more than 100 bytes"):
        read_file("file", descriptor, 100)


def refused(folder):
    try:
        with opened_folder(folder):
            return False
    except NanoError:
        return True


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "expected"),
    [
        (0o755, 0, 0, False),
        (0o1777, 0, 0, False),  # like /tmp
        (0o775, 0, 0, False),  # the group is root's own
        (0o777, 0, 0, True),
        (0o775, 0, OTHER, True),
        (0o755, OTHER, 0, True),
        (0o1777, OTHER, 0, True),
    ],
)
@pytest.mark.parametrize("below", ["folder", "deep/folder"])
def test_folder_is_refused_where_another_user_can_replace_it(tmp_path, mode, owner, group, expected, below):
    parent = tmp_path / "parent"
    (parent / below).mkdir(parents=True)
    os.chown(parent, owner, group)
    parent.chmod(mode)
    assert refused(parent / below) == expected
    if expected:
        assert trusted_parent((parent, tmp_path)) == tmp_path
        with pytest.raises(NanoError):
            make_folder("made-", [parent / below])


@as_root
@pytest.mark.parametrize(
    ("mode", "owner", "expected"), [(0o755, 0, False), (0o1777, 0, False), (0o1777, OTHER, True), (0o777, 0, True)]
)
@pytest.mark.parametrize("target", ["own", "../own", "{}/own", "again"])
def test_link_is_followed_where_nobody_else_can_have_put_it(tmp_path, mode, owner, expected, target):
    """A colleague's link to a folder of this user would make it write and delete the wrong files."""
    team, own = tmp_path / "team", tmp_path / "team/own"
    (own / "folder").mkdir(parents=True)
    (team / "again").symlink_to("own")
    (tmp_path / "own").symlink_to("team/own")
    (team / "link").symlink_to(target.format(team))
    os.chown(team / "link", owner, owner, follow_symlinks=False)
    team.chmod(mode)
    assert refused(team / "link/folder") == expected
    if expected:
        with pytest.raises(NanoError):
            resolved(team / "link")
    else:
        assert resolved(team / "link") == own


def test_links_that_lead_to_themselves_are_an_error(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="links"):
        resolved(tmp_path / "link")


@pytest.mark.parametrize(
    ("name", "members", "is_own"),
    [("anna", [], True), ("anna", ["anna"], True), ("anna", ["ben"], False), ("staff", [], False)],
)
def test_home_may_be_open_to_the_private_group_of_its_user(folder, monkeypatch, name, members, is_own):
    group = folder.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="anna", pw_gid=group))
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=name, gr_mem=members))
    folder.chmod(0o775)
    assert refused(folder) != is_own


def test_cache_may_be_a_link_to_another_disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / ".cache").symlink_to("disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    for link in (False, True):
        path = cache_folder()
        assert path == tmp_path / "disk" / ("other" if link else "nano_loop")
        JsonFile(path / "file", 1).write({"link": link})
        assert JsonFile(path / "file", 1).read() == {"format": 1, "link": link}
        (tmp_path / "disk/other").mkdir(exist_ok=True)
        if not link:
            path.rename(tmp_path / "disk/kept")
            path.symlink_to("other")


def test_cache_that_is_made_under_an_open_umask_is_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        path = cache_folder()
    finally:
        os.umask(before)
    assert not refused(path)


def test_root_of_a_user_namespace_is_trusted(monkeypatch):
    stats, users = os.stat, trusted_files._administrators()
    monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_uid=OTHER) if path == "/proc/sys" else stats(path))
    assert trusted_files._administrators() == users | {OTHER}
