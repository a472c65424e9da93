"""POSIX cases on what stat shows and who may do what: modes, owners, times, inode numbers, links."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import time
from pathlib import Path

from tests.mount.posix_support import (
    AT_SYMLINK_NOFOLLOW,
    NOBODY,
    UTIME_NOW,
    UTIME_OMIT,
    case,
    file_handle,
    in_child,
    opened,
    read_at,
    refused,
    unprivileged,
    utimensat,
)

PAST_NS = 1_000_000_000_123_456_789
ONE_HOUR_NS = 3600 * 10**9


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(value: int):  # type: ignore[no-untyped-def]
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


@case()
def case_mode_at_creation_honours_the_umask(root: Path) -> None:
    with umask(0o027):
        os.close(os.open(root / "f", os.O_WRONLY | os.O_CREAT, 0o777))
        os.mkdir(root / "d", 0o777)
        os.mkfifo(root / "p", 0o666)
    with umask(0):
        os.close(os.open(root / "all", os.O_WRONLY | os.O_CREAT, 0o666))
    assert mode_of(root / "f") == 0o750
    assert mode_of(root / "d") == 0o750
    assert mode_of(root / "p") == 0o640
    assert mode_of(root / "all") == 0o666


@case()
def case_chmod(root: Path) -> None:
    (root / "f").write_bytes(b"x")
    (root / "d").mkdir()
    for mode in (0o000, 0o600, 0o755, 0o777, 0o4755, 0o2711, 0o1777, 0o6444, 0o644):
        os.chmod(root / "f", mode)
        assert mode_of(root / "f") == mode
        assert stat.S_ISREG((root / "f").stat().st_mode)
    os.chmod(root / "d", 0o1770)
    assert mode_of(root / "d") == 0o1770
    with refused(errno.ENOENT):
        os.chmod(root / "missing", 0o600)


@case()
def case_chmod_through_a_handle(root: Path) -> None:
    with opened(root / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"before ")
        os.fchmod(fd, 0o640)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
        assert mode_of(root / "f") == 0o640
        os.write(fd, b"after")
    assert mode_of(root / "f") == 0o640
    assert read_at(root / "f") == b"before after"


@case()
def case_chmod_follows_a_symlink(root: Path) -> None:
    (root / "f").write_bytes(b"")
    os.symlink("f", root / "link")
    os.chmod(root / "link", 0o700)
    assert mode_of(root / "f") == 0o700
    assert stat.S_ISLNK(os.lstat(root / "link").st_mode)


@case()
def case_mode_survives_writes_and_rename(root: Path) -> None:
    path = root / "tool"
    path.write_bytes(b"#!/bin/sh\n")
    path.chmod(0o751)
    with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
        os.write(fd, b"#!/bin/sh\nexit 0\n")
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"# end\n")
    os.rename(path, root / "renamed")
    assert mode_of(root / "renamed") == 0o751


@case(root_only=True)
def case_chown(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    os.chown(path, 1234, 2345)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)
    os.chown(path, -1, 77)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 77)
    os.chown(path, 88, -1)
    assert (path.stat().st_uid, path.stat().st_gid) == (88, 77)
    with opened(path, os.O_RDONLY) as fd:
        os.fchown(fd, 5, 6)
    assert (path.stat().st_uid, path.stat().st_gid) == (5, 6)
    os.symlink("f", root / "link")
    os.lchown(root / "link", 9, 9)
    assert os.lstat(root / "link").st_uid == 9
    assert path.stat().st_uid == 5
    assert read_at(path) == b"x"


@case(root_only=True)
def case_chown_clears_the_set_id_bits(root: Path) -> None:
    # chown(2): for an executable file, even when root does it.
    path = root / "f"
    path.write_bytes(b"x")
    path.chmod(0o6755)
    os.chown(path, 1234, 1234)
    assert mode_of(path) == 0o755


@case(root_only=True)
def case_write_by_an_ordinary_user_clears_the_set_id_bits(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o6755)

    def work() -> None:
        with opened(path, os.O_WRONLY) as fd:
            os.write(fd, b"y")

    unprivileged(work)
    assert mode_of(path) == 0o755
    assert read_at(path) == b"y"


@case(root_only=True)
def case_new_files_belong_to_the_caller(root: Path) -> None:
    root.chmod(0o777)

    def work() -> None:
        (root / "f").write_bytes(b"mine")
        (root / "d").mkdir()
        os.symlink("f", root / "l")

    unprivileged(work)
    for name in ("f", "d", "l"):
        status = os.lstat(root / name)
        assert (status.st_uid, status.st_gid) == (NOBODY, NOBODY), name


@case(root_only=True)
def case_set_group_directory_passes_its_group_on(root: Path) -> None:
    shared = root / "shared"
    shared.mkdir()
    os.chown(shared, 0, 4321)
    shared.chmod(0o2775)
    (shared / "f").write_bytes(b"")
    (shared / "d").mkdir()
    assert (shared / "f").stat().st_gid == 4321
    assert (shared / "d").stat().st_gid == 4321
    assert mode_of(shared / "d") & stat.S_ISGID


@case()
def case_access_bits_for_an_ordinary_user(root: Path) -> None:
    root.chmod(0o755)
    for name, mode in (("closed", 0o000), ("open", 0o644), ("tool", 0o755)):
        (root / name).write_bytes(b"#!/bin/sh\nexit 7\n")
        (root / name).chmod(mode)
    (root / "locked").mkdir()
    (root / "locked" / "f").write_bytes(b"")
    (root / "locked").chmod(0o000)

    def work() -> None:
        with refused(errno.EACCES):
            os.open(root / "closed", os.O_RDONLY)
        with refused(errno.EACCES):
            os.listdir(root / "locked")
        with refused(errno.EACCES):
            os.stat(root / "locked" / "f")
        assert read_at(root / "open").startswith(b"#!")
        assert os.access(root / "open", os.R_OK) and not os.access(root / "open", os.X_OK)
        assert os.access(root / "tool", os.X_OK) and not os.access(root / "closed", os.R_OK)
        assert subprocess.run([root / "tool"], check=False).returncode == 7
        with refused(errno.EACCES):
            subprocess.run([root / "open"], check=False)

    unprivileged(work)
    (root / "locked").chmod(0o755)


@case(root_only=True)
def case_other_users_cannot_change_what_is_not_theirs(root: Path) -> None:
    root.chmod(0o755)
    (root / "f").write_bytes(b"root's")
    (root / "f").chmod(0o644)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    (root / "sticky" / "f").write_bytes(b"root's")

    def work() -> None:
        with refused(errno.EACCES):
            os.open(root / "f", os.O_WRONLY)
        with refused(errno.EACCES):
            os.unlink(root / "f")
        with refused(errno.EACCES):
            os.mkdir(root / "d")
        with refused(errno.EACCES):
            os.rename(root / "f", root / "g")
        with refused(errno.EPERM):
            os.chmod(root / "f", 0o777)
        with refused(errno.EPERM):
            os.chown(root / "f", NOBODY, -1)
        with refused(errno.EPERM):
            os.utime(root / "f", (0, 0))
        with refused(errno.EPERM):
            os.unlink(root / "sticky" / "f")
        (root / "sticky" / "own").write_bytes(b"")
        os.unlink(root / "sticky" / "own")

    unprivileged(work)
    assert read_at(root / "f") == b"root's"
    assert os.listdir(root / "sticky") == ["f"]


@case()
def case_utime_keeps_nanoseconds(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    (root / "d").mkdir()
    for target in (path, root / "d"):
        for mtime_ns in (PAST_NS, 1, 0, 2**31 * 10**9 + 7, 4_000_000_000_999_999_999):
            os.utime(target, ns=(PAST_NS, mtime_ns))
            assert target.stat().st_mtime_ns == mtime_ns
    assert read_at(path) == b"x"
    assert path.stat().st_size == 1


@case()
def case_utime_before_1970(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    utimensat(path, (-86400, 5), (-86400, 5))
    assert path.stat().st_mtime_ns == -86400 * 10**9 + 5


@case()
def case_utime_omit_leaves_the_other_time(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    os.utime(path, ns=(PAST_NS, PAST_NS))
    utimensat(path, (5, 5), (0, UTIME_OMIT))
    assert path.stat().st_mtime_ns == PAST_NS
    utimensat(path, (0, UTIME_OMIT), (7, 7))
    assert path.stat().st_mtime_ns == 7 * 10**9 + 7
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert path.stat().st_mtime_ns == 7 * 10**9 + 7


@case()
def case_utime_now_is_the_local_clock(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    os.utime(path, ns=(PAST_NS, PAST_NS))
    before = time.time_ns()
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_NOW))
    after = time.time_ns()
    # The kernel stamps with its coarse clock, which may be one tick (at most 10 ms) behind.
    assert before - 10_000_000 <= path.stat().st_mtime_ns <= after
    os.utime(path, ns=(PAST_NS, PAST_NS))
    os.utime(path)
    assert abs(path.stat().st_mtime_ns - time.time_ns()) < ONE_HOUR_NS


@case()
def case_utime_of_a_symlink_itself(root: Path) -> None:
    (root / "f").write_bytes(b"x")
    os.utime(root / "f", ns=(PAST_NS, PAST_NS))
    os.symlink("f", root / "link")
    utimensat(root / "link", (11, 0), (11, 12), AT_SYMLINK_NOFOLLOW)
    assert os.lstat(root / "link").st_mtime_ns == 11 * 10**9 + 12
    assert (root / "f").stat().st_mtime_ns == PAST_NS


@case()
def case_utime_while_open_survives_the_close(root: Path) -> None:
    # tar and cp -p set the times through the handle that they wrote with.
    path = root / "f"
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"content")
        os.utime(fd, ns=(PAST_NS, PAST_NS))
        assert path.stat().st_mtime_ns == PAST_NS
    assert path.stat().st_mtime_ns == PAST_NS
    assert read_at(path) == b"content"


@case()
def case_utime_of_zero_while_open(root: Path) -> None:
    # 1970 is a time like any other, though tables like 0 for "not set". Archives for reproducible builds use it.
    path = root / "f"
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"content")
        os.utime(fd, ns=(0, 0))
    assert path.stat().st_mtime_ns == 0
    with opened(root / "g", os.O_WRONLY | os.O_CREAT) as fd:
        os.utime(fd, ns=(0, 0))
        os.fsync(fd)
    assert (root / "g").stat().st_mtime_ns == 0


@case()
def case_touch_of_one_time(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    os.utime(path, ns=(PAST_NS, PAST_NS))
    subprocess.run(["touch", "-a", path], check=True)
    assert path.stat().st_mtime_ns == PAST_NS
    subprocess.run(["touch", "-m", "-d", "2001-02-03 04:05:06.789Z", path], check=True)
    assert path.stat().st_mtime_ns == 981_173_106_789_000_000


@case()
def case_content_changes_move_the_mtime(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"content")

    def moved(change: str) -> None:
        status = path.stat()
        assert abs(status.st_mtime_ns - time.time_ns()) < ONE_HOUR_NS, change
        os.utime(path, ns=(PAST_NS, PAST_NS))

    os.utime(path, ns=(PAST_NS, PAST_NS))
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"C")
    moved("write")
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"!")
    moved("append")
    os.truncate(path, 3)
    moved("truncate")
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
    moved("O_TRUNC")


@case()
def case_other_changes_leave_the_mtime(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"content")
    os.utime(path, ns=(PAST_NS, PAST_NS))
    ctime = path.stat().st_ctime_ns
    assert read_at(path) == b"content"
    path.chmod(0o600)
    assert path.stat().st_mtime_ns == PAST_NS
    assert path.stat().st_ctime_ns >= ctime
    os.rename(path, root / "g")
    assert (root / "g").stat().st_mtime_ns == PAST_NS
    with opened(root / "g", os.O_RDWR):
        pass
    assert (root / "g").stat().st_mtime_ns == PAST_NS


@case()
def case_entry_changes_move_the_directory_mtime(root: Path) -> None:
    directory = root / "d"
    directory.mkdir()

    def moved(change: str) -> None:
        assert abs(directory.stat().st_mtime_ns - time.time_ns()) < ONE_HOUR_NS, change
        os.utime(directory, ns=(PAST_NS, PAST_NS))

    os.utime(directory, ns=(PAST_NS, PAST_NS))
    (directory / "f").write_bytes(b"")
    moved("create")
    (directory / "f").write_bytes(b"again")
    assert directory.stat().st_mtime_ns == PAST_NS, "writing a file is no change of its directory"
    os.rename(directory / "f", directory / "g")
    moved("rename")
    os.unlink(directory / "g")
    moved("unlink")
    (directory / "sub").mkdir()
    moved("mkdir")
    (directory / "sub").rmdir()
    moved("rmdir")
    os.symlink("x", directory / "link")
    moved("symlink")


@case()
def case_new_files_are_newer_than_old_ones(root: Path) -> None:
    previous = 0
    for i in range(20):
        (root / f"f{i}").write_bytes(b"x")
        mtime_ns = (root / f"f{i}").stat().st_mtime_ns
        assert mtime_ns >= previous
        previous = mtime_ns
    assert abs(previous - time.time_ns()) < 10 * 10**9


@case()
def case_inode_number_is_stable_and_unique(root: Path) -> None:
    names = [f"f{i}" for i in range(10)]
    for name in names:
        (root / name).write_text(name)
    (root / "d").mkdir()
    numbers = {name: (root / name).stat().st_ino for name in [*names, "d", "."]}
    assert len(set(numbers.values())) == 12 and 0 not in numbers.values()
    (root / "f0").write_text("rewritten")
    os.truncate(root / "f1", 1)
    (root / "f2").chmod(0o600)
    os.utime(root / "f3", (1, 1))
    os.rename(root / "f4", root / "d" / "moved")
    with opened(root / "f5", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"more")
    assert (root / "d" / "moved").stat().st_ino == numbers.pop("f4")
    for name, number in numbers.items():
        assert (root / name).stat().st_ino == number, name


@case()
def case_file_handle_is_stable_and_unique(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    identity = file_handle(path)
    os.truncate(path, 0)
    path.chmod(0o600)
    path.write_bytes(b"rewritten")
    os.rename(path, root / "g")
    assert file_handle(root / "g") == identity
    path.write_bytes(b"another")
    assert file_handle(path) != identity


@case()
def case_recreated_file_is_another_one(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"one")
    with opened(path, os.O_RDONLY) as fd:
        os.unlink(path)
        path.write_bytes(b"two")
        assert not os.path.samestat(os.fstat(fd), path.stat())
        assert os.pread(fd, 9, 0) == b"one"


@case()
def case_link_counts(root: Path) -> None:
    (root / "f").write_bytes(b"")
    os.symlink("f", root / "l")
    assert (root / "f").stat().st_nlink == 1
    assert os.lstat(root / "l").st_nlink == 1
    directory = root / "d"
    directory.mkdir()

    def plausible(subdirectories: int) -> None:
        # 2 and one for each subdirectory as on ext4, or always 1 as on btrfs; find relies on either.
        assert directory.stat().st_nlink in (1, 2 + subdirectories)

    plausible(0)
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    (directory / "f").write_bytes(b"")
    plausible(2)
    os.rename(directory / "a", root / "a")
    plausible(1)
    (directory / "b").rmdir()
    plausible(0)


@case()
def case_sizes_and_blocks(root: Path) -> None:
    for size in (0, 1, 511, 512, 513, 4096, 100_000):
        with opened(root / "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            os.write(fd, b"x" * size)
            os.fsync(fd)
        status = (root / "f").stat()
        assert status.st_size == size
        assert status.st_blocks * 512 >= (size if size else 0)
        assert status.st_blocks * 512 <= size + 65_536
        assert status.st_blksize >= 512
    used = subprocess.run(["du", "-b", "f"], cwd=root, check=True, capture_output=True).stdout
    assert used == b"100000\tf\n"


@case()
def case_statvfs_is_plausible(root: Path) -> None:
    status = os.statvfs(root)
    assert status.f_namemax == 255
    assert status.f_bsize >= 512 and status.f_frsize >= 512
    assert status.f_blocks >= status.f_bfree >= status.f_bavail > 0
    assert status.f_files >= status.f_ffree > 0
    result = subprocess.run(["df", "-P", "."], cwd=root, check=True, capture_output=True)
    assert len(result.stdout.splitlines()) == 2


@case()
def case_extended_attributes_fail_in_an_orderly_way(root: Path) -> None:
    (root / "f").write_bytes(b"")
    with refused(errno.ENODATA, errno.EOPNOTSUPP):
        os.getxattr(root / "f", "user.missing")
    with refused(errno.ENODATA, errno.EOPNOTSUPP):
        os.getxattr(root / "f", "security.capability")
    subprocess.run(["ls", "-la"], cwd=root, check=True, capture_output=True)


@case()
def case_umask_of_a_child_is_its_own(root: Path) -> None:
    def work() -> None:
        os.umask(0o077)
        (root / "private").write_bytes(b"")

    in_child(work)
    assert mode_of(root / "private") == 0o600
