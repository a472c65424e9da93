"""POSIX cases on names that come, move and go: mkdir, rename, unlink with open handles, streams."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.mount.posix_support import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    case,
    in_child,
    opened,
    read_at,
    refused,
    renameat2,
)

STREAM_ENTRIES = 800
CHANGING = 200


@case()
def case_mkdir_errnos(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "file").write_bytes(b"")
    for name in ("dir", "file"):
        with refused(errno.EEXIST):
            os.mkdir(root / name)
    with refused(errno.ENOENT):
        os.mkdir(root / "missing" / "dir")
    with refused(errno.ENOTDIR):
        os.mkdir(root / "file" / "dir")
    os.mkdir(f"{root}/slash/")
    assert sorted(os.listdir(root)) == ["dir", "file", "slash"]


@case()
def case_rmdir_errnos(root: Path) -> None:
    (root / "full").mkdir()
    (root / "full" / "f").write_bytes(b"x")
    (root / "full" / "empty").mkdir()
    with refused(errno.ENOTEMPTY):
        os.rmdir(root / "full")
    with refused(errno.ENOTDIR):
        os.rmdir(root / "full" / "f")
    with refused(errno.ENOENT):
        os.rmdir(root / "missing")
    with refused(errno.EINVAL):
        os.rmdir(f"{root}/full/.")
    os.rmdir(root / "full" / "empty")
    with refused(errno.ENOENT):
        os.stat(root / "full" / "empty")
    assert read_at(root / "full" / "f") == b"x"


@case()
def case_unlink_errnos(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "file").write_bytes(b"")
    with refused(errno.EISDIR):
        os.unlink(root / "dir")
    with refused(errno.ENOENT):
        os.unlink(root / "missing")
    with refused(errno.ENOTDIR):
        os.unlink(root / "file" / "x")
    with refused(errno.ENOTDIR):
        os.unlink(f"{root}/file/")
    os.unlink(root / "file")
    with refused(errno.ENOENT):
        os.unlink(root / "file")
    assert os.listdir(root) == ["dir"]


@case()
def case_deep_tree(root: Path) -> None:
    deep = root.joinpath(*(f"d{i}" for i in range(40)))
    deep.mkdir(parents=True)
    (deep / "leaf").write_bytes(b"down here")
    assert read_at(deep / "leaf") == b"down here"
    assert [len(dirs) for _, dirs, _ in os.walk(root)] == [1] * 40 + [0]


@case()
def case_rename_file(root: Path) -> None:
    (root / "a").write_bytes(b"content")
    (root / "d").mkdir()
    os.rename(root / "a", root / "b")
    os.rename(root / "b", root / "d" / "c")
    for gone in ("a", "b"):
        with refused(errno.ENOENT):
            os.stat(root / gone)
    assert read_at(root / "d" / "c") == b"content"
    assert os.listdir(root) == ["d"]


@case()
def case_rename_over_a_file(root: Path) -> None:
    (root / "new").write_bytes(b"new content")
    (root / "old").write_bytes(b"old")
    inode = (root / "new").stat().st_ino
    os.rename(root / "new", root / "old")
    assert read_at(root / "old") == b"new content"
    assert (root / "old").stat().st_ino == inode
    assert os.listdir(root) == ["old"]


@case()
def case_rename_over_an_open_file(root: Path) -> None:
    (root / "target").write_bytes(b"before")
    (root / "next").write_bytes(b"after it")
    with opened(root / "target", os.O_RDWR) as fd:
        os.rename(root / "next", root / "target")
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 20, 0) == b"before"
        os.pwrite(fd, b"B", 0)
        assert os.pread(fd, 20, 0) == b"Before"
        assert read_at(root / "target") == b"after it"
    assert read_at(root / "target") == b"after it"


@case()
def case_rename_onto_itself_does_nothing(root: Path) -> None:
    (root / "f").write_bytes(b"same")
    (root / "d").mkdir()
    os.rename(root / "f", root / "f")
    os.rename(root / "d", root / "d")
    assert read_at(root / "f") == b"same"
    assert sorted(os.listdir(root)) == ["d", "f"]


@case()
def case_rename_directory_with_content(root: Path) -> None:
    (root / "old" / "sub" / "deep").mkdir(parents=True)
    for name in ("f", "sub/f", "sub/deep/f"):
        (root / "old" / name).write_text(name)
    os.rename(root / "old", root / "new")
    for name in ("f", "sub/f", "sub/deep/f"):
        assert (root / "new" / name).read_text() == name
        with refused(errno.ENOENT):
            os.stat(root / "old" / name)
    (root / "old").mkdir()
    assert os.listdir(root / "old") == []
    (root / "old" / "f").write_text("another")
    assert (root / "new" / "f").read_text() == "f"


@case()
def case_rename_directory_over_an_empty_one(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / "f").write_bytes(b"x")
    (root / "b").mkdir()
    os.rename(root / "a", root / "b")
    assert os.listdir(root) == ["b"]
    assert read_at(root / "b" / "f") == b"x"


@case()
def case_rename_errnos(root: Path) -> None:
    (root / "dir" / "sub").mkdir(parents=True)
    (root / "full").mkdir()
    (root / "full" / "f").write_bytes(b"kept")
    (root / "file").write_bytes(b"kept")
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(root / "dir", root / "full")
    with refused(errno.EISDIR):
        os.rename(root / "file", root / "dir")
    with refused(errno.ENOTDIR):
        os.rename(root / "dir", root / "file")
    with refused(errno.EINVAL):
        os.rename(root / "dir", root / "dir" / "sub" / "inside")
    with refused(errno.ENOTEMPTY):
        os.rename(root / "full" / "f", root / "full")
    with refused(errno.ENOENT):
        os.rename(root / "missing", root / "other")
    with refused(errno.ENOENT):
        os.rename(root / "file", root / "missing" / "f")
    with refused(errno.ENOTDIR):
        os.rename(root / "file", root / "full" / "f" / "g")
    assert read_at(root / "file") == b"kept"
    assert read_at(root / "full" / "f") == b"kept"
    assert os.listdir(root / "dir") == ["sub"]


@case()
def case_rename_noreplace(root: Path) -> None:
    (root / "a").write_bytes(b"a")
    (root / "b").write_bytes(b"b")
    with refused(errno.EEXIST):
        renameat2(root / "a", root / "b", RENAME_NOREPLACE)
    assert read_at(root / "a") == b"a" and read_at(root / "b") == b"b"
    renameat2(root / "a", root / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(root)) == ["b", "c"]
    assert read_at(root / "c") == b"a"
    with refused(errno.EINVAL):
        renameat2(root / "b", root / "c", RENAME_NOREPLACE | RENAME_EXCHANGE)


@case()
def case_rename_exchange_files(root: Path) -> None:
    (root / "a").write_bytes(b"from a")
    (root / "b").write_bytes(b"b")
    inodes = (root / "a").stat().st_ino, (root / "b").stat().st_ino
    renameat2(root / "a", root / "b", RENAME_EXCHANGE)
    assert read_at(root / "a") == b"b" and read_at(root / "b") == b"from a"
    assert ((root / "b").stat().st_ino, (root / "a").stat().st_ino) == inodes
    with refused(errno.ENOENT):
        renameat2(root / "a", root / "missing", RENAME_EXCHANGE)
    assert sorted(os.listdir(root)) == ["a", "b"]


@case()
def case_rename_exchange_a_file_and_a_directory(root: Path) -> None:
    (root / "f").write_bytes(b"file")
    (root / "d").mkdir()
    (root / "d" / "inner").write_bytes(b"inner")
    renameat2(root / "f", root / "d", RENAME_EXCHANGE)
    assert read_at(root / "d") == b"file"
    assert read_at(root / "f" / "inner") == b"inner"


@case()
def case_rename_exchange_two_directories(root: Path) -> None:
    for name in ("a", "b"):
        (root / name / "sub").mkdir(parents=True)
        (root / name / "sub" / "f").write_text(name)
    renameat2(root / "a", root / "b", RENAME_EXCHANGE)
    assert (root / "a" / "sub" / "f").read_text() == "b"
    assert (root / "b" / "sub" / "f").read_text() == "a"
    with refused(errno.EINVAL):
        renameat2(root / "a", root / "a" / "sub", RENAME_EXCHANGE)


@case()
def case_rename_an_open_file_then_write(root: Path) -> None:
    with opened(root / "f.tmp", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"first ")
        os.rename(root / "f.tmp", root / "f")
        os.write(fd, b"second")
        assert os.path.samestat(os.fstat(fd), os.stat(root / "f"))
        assert read_at(root / "f") == b"first second"
    assert read_at(root / "f") == b"first second"
    assert os.listdir(root) == ["f"]


@case()
def case_rename_a_directory_with_open_files_below(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    with opened(root / "a" / "b" / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"one ")
        os.rename(root / "a", root / "z")
        os.write(fd, b"two")
    assert read_at(root / "z" / "b" / "f") == b"one two"


@case()
def case_descriptor_of_a_renamed_directory(root: Path) -> None:
    (root / "a").mkdir()
    with opened(root / "a", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rename(root / "a", root / "b")
        with opened("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd) as inner:
            os.write(inner, b"relative")
        os.mkdir("sub", dir_fd=fd)
        assert sorted(os.listdir(fd)) == ["f", "sub"]
        os.rename("f", "g", src_dir_fd=fd, dst_dir_fd=fd)
        os.unlink("g", dir_fd=fd)
    assert os.listdir(root / "b") == ["sub"]


@case()
def case_working_directory_is_renamed(root: Path) -> None:
    (root / "a").mkdir()

    def work() -> None:
        os.chdir(root / "a")
        os.rename(root / "a", root / "b")
        assert os.getcwd() == os.path.realpath(root / "b")
        Path("f").write_bytes(b"x")
        assert os.listdir("..") == ["b"]

    in_child(work)
    assert os.listdir(root / "b") == ["f"]


@case()
def case_working_directory_is_removed(root: Path) -> None:
    (root / "a").mkdir()

    def work() -> None:
        os.chdir(root / "a")
        os.rmdir(root / "a")
        with refused(errno.ENOENT):
            os.getcwd()
        with refused(errno.ENOENT):
            os.open("f", os.O_WRONLY | os.O_CREAT)
        with refused(errno.ENOENT):
            os.mkdir("d")
        assert os.listdir(".") == []

    in_child(work)


@case()
def case_removed_directory_that_is_open(root: Path) -> None:
    (root / "d").mkdir()
    with opened(root / "d", os.O_RDONLY) as fd:
        os.rmdir(root / "d")
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        with refused(errno.ENOENT):
            os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        (root / "d").mkdir()
        (root / "d" / "another").write_bytes(b"")
        assert os.listdir(fd) == []


@case()
def case_unlinked_file_that_is_open(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"still here")
    with opened(path, os.O_RDWR) as fd:
        inode = os.fstat(fd).st_ino
        os.unlink(path)
        assert os.listdir(root) == []
        assert os.fstat(fd).st_nlink == 0
        assert os.fstat(fd).st_ino == inode
        assert os.pread(fd, 20, 0) == b"still here"
        os.pwrite(fd, b"STILL", 0)
        os.ftruncate(fd, 7)
        assert os.pread(fd, 20, 0) == b"STILL h"
        os.fchmod(fd, 0o600)
        os.fsync(fd)
        path.write_bytes(b"another file")
        assert os.pread(fd, 20, 0) == b"STILL h"
        assert path.stat().st_ino != inode
    assert read_at(path) == b"another file"


@case()
def case_unlinked_before_its_first_byte(root: Path) -> None:
    path = root / "f"
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        os.unlink(path)
        os.write(fd, b"anonymous")
        assert os.pread(fd, 20, 0) == b"anonymous"
    assert os.listdir(root) == []


@case()
def case_unlink_then_create_gives_an_empty_file(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"old content")
    os.unlink(path)
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        assert os.fstat(fd).st_size == 0
        os.write(fd, b"new")
    assert read_at(path) == b"new"


@case()
def case_lock_file_again_and_again(root: Path) -> None:
    # git's way with index.lock: O_EXCL, then either a rename over the real file or an unlink.
    path, lock = root / "index", root / "index.lock"
    for i in range(60):
        with opened(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.write(fd, b"%d" % i)
        with refused(errno.EEXIST):
            os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if i % 3:
            os.rename(lock, path)
            assert read_at(path) == b"%d" % i
        else:
            os.unlink(lock)
        with refused(errno.ENOENT):
            os.stat(lock)
    assert os.listdir(root) == ["index"]


@case()
def case_lock_file_without_content(root: Path) -> None:
    lock = root / "lock"
    for _ in range(60):
        fd = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.unlink(lock)
        os.close(fd)
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(lock)
        os.mkdir(lock)
        os.rmdir(lock)
    assert os.listdir(root) == []


@case()
def case_name_changes_its_kind(root: Path) -> None:
    path = root / "name"
    for _ in range(2):
        path.write_bytes(b"file")
        assert path.is_file()
        path.unlink()
        path.mkdir()
        assert path.is_dir()
        path.rmdir()
        path.symlink_to("target")
        assert path.is_symlink()
        path.unlink()
        os.mkfifo(path)
        assert path.is_fifo()
        path.unlink()
    assert os.listdir(root) == []


@case()
def case_missing_name_appears(root: Path) -> None:
    # A remembered miss must go when the name is made in any of the ways.
    def missing(name: str) -> None:
        with refused(errno.ENOENT):
            os.stat(root / name)

    for name in ("file", "dir", "link", "renamed"):
        missing(name)
    (root / "file").write_bytes(b"")
    (root / "dir").mkdir()
    (root / "link").symlink_to("file")
    (root / "x").write_bytes(b"")
    os.rename(root / "x", root / "renamed")
    for name in ("file", "dir", "link", "renamed"):
        os.stat(root / name)
    missing("x")


@case()
def case_listing_is_complete_and_typed(root: Path) -> None:
    (root / "file").write_bytes(b"")
    (root / "dir").mkdir()
    (root / "link").symlink_to("file")
    os.mkfifo(root / "fifo")
    with os.scandir(root) as entries:
        found = {entry.name: entry for entry in entries}
        assert sorted(found) == ["dir", "fifo", "file", "link"]
        for name, entry in found.items():
            assert entry.inode() == os.lstat(root / name).st_ino, name
        assert found["dir"].is_dir() and found["file"].is_file() and found["link"].is_symlink()


@case()
def case_stream_of_many_entries(root: Path) -> None:
    # Symlinks: the cheapest node to make, and a listing does not care. 60 KB of names: many buffers full.
    names = {f"entry-{i:05d}-a-name-that-makes-the-listing-long-enough-for-many-buffers" for i in range(STREAM_ENTRIES)}
    for name in names:
        os.symlink("x", root / name)
    listed = os.listdir(root)
    assert len(listed) == STREAM_ENTRIES
    assert set(listed) == names
    # One pass that deletes as it reads leaves nothing behind.
    seen: list[str] = []
    with os.scandir(root) as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(root / entry.name)
    assert len(seen) == len(set(seen)) == STREAM_ENTRIES
    os.rmdir(root)
    os.mkdir(root)


@case()
def case_stream_while_entries_come_and_go(root: Path) -> None:
    # POSIX: what stays in the directory for the whole scan is returned exactly once; the rest may or may not be.
    stays = {f"stay-{i:04d}" for i in range(CHANGING)}
    for name in stays:
        os.symlink("x", root / name)
    for i in range(CHANGING):
        os.symlink("x", root / f"goes-{i:04d}")
    seen: list[str] = []
    with os.scandir(root) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count < CHANGING:
                os.unlink(root / f"goes-{count:04d}")
                os.symlink("x", root / f"comes-{count:04d}")
    assert sum(name.startswith("stay-") for name in seen) == CHANGING
    assert {name for name in seen if name.startswith("stay-")} == stays
    assert len(seen) == len(set(seen))
    assert set(os.listdir(root)) == stays | {f"comes-{i:04d}" for i in range(CHANGING)}


@case()
def case_rewound_stream_sees_changes(root: Path) -> None:
    (root / "a").write_bytes(b"")
    with opened(root, os.O_RDONLY) as fd:
        assert os.listdir(fd) == ["a"]
        (root / "b").write_bytes(b"")
        os.unlink(root / "a")
        assert os.listdir(fd) == ["b"]


@case()
def case_trailing_slash_needs_a_directory(root: Path) -> None:
    (root / "f").write_bytes(b"")
    (root / "d").mkdir()
    with refused(errno.ENOTDIR):
        os.stat(f"{root}/f/")
    with refused(errno.ENOTDIR, errno.EISDIR):
        os.rename(f"{root}/f", f"{root}/g/")
    os.rename(f"{root}/d/", f"{root}/e/")
    assert sorted(os.listdir(root)) == ["e", "f"]
