"""A mount against a plain directory: the same random calls must give the same results and errnos.

Decided here and only here: which calls are compared and what of a result is. Inode numbers, ctime and
the order of a listing are left out; content, size, mode, kind, link target and mtime as set are in.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests import harness
from tests.mount.posix_support import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

EXAMPLES = 20
STEPS = 30
# Few names: calls must meet each other.
NAMES = ("a", "b", "dir", "dir/a", "dir/sub", "dir/sub/a", "b/x", "é")
CONTENTS = (b"", b"x", b"text\n", b"bin\0\xff", b"long " * 2000)
PATHS = st.sampled_from(NAMES)
OFFSETS = st.sampled_from((0, 1, 4095, 4096, 10_000))
FLAGS = st.sampled_from((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))
MORE_FLAGS = st.sampled_from((0, os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_TRUNC, os.O_CREAT | os.O_TRUNC, os.O_APPEND))
MTIME_NS = 1_500_000_000_123_456_789
MAX_HANDLES = 4


class Half:
    """One of the two directories, with its open handles."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: list[int] = []

    def tree(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        for path in self.root.rglob("*"):
            status = path.lstat()
            value: Any = None
            if stat.S_ISREG(status.st_mode):
                value = path.read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                value = os.readlink(path)
            mtime = status.st_mtime_ns if status.st_mtime_ns == MTIME_NS else None
            mode = None if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
            size = None if stat.S_ISDIR(status.st_mode) else status.st_size
            links = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
            found[str(path.relative_to(self.root))] = (stat.S_IFMT(status.st_mode), mode, size, mtime, links, value)
        return found

    def open_files(self) -> list[tuple[int, int, int]]:
        return [
            (status.st_size, stat.S_IMODE(status.st_mode), status.st_nlink) for status in map(os.fstat, self.handles)
        ]

    def close(self) -> None:
        for fd in self.handles:
            os.close(fd)
        self.handles.clear()


class Twins(RuleBasedStateMachine):
    """Does every step on both directories."""

    mount_root: Path
    plain_root: Path

    def __init__(self) -> None:
        super().__init__()
        self.halves = tuple(
            Half(Path(tempfile.mkdtemp(prefix="model-", dir=root))) for root in (self.mount_root, self.plain_root)
        )

    def teardown(self) -> None:
        for half in self.halves:
            half.close()
            shutil.rmtree(half.root)

    def both(self, action: Callable[[Half], Any]) -> None:
        outcomes: list[Any] = []
        for half in self.halves:
            try:
                outcomes.append(action(half))
            except OSError as exc:
                outcomes.append(errno.errorcode[exc.errno or 0])
        assert outcomes[0] == outcomes[1], f"the mount gives {outcomes[0]!r}, the plain directory {outcomes[1]!r}"

    def handle(self, half: Half, index: int) -> int:
        if not half.handles:
            raise OSError(errno.EBADF, "no open handle")
        return half.handles[index % len(half.handles)]

    @rule(path=PATHS, data=st.sampled_from(CONTENTS))
    def write_file(self, path: str, data: bytes) -> None:
        self.both(lambda half: (half.root / path).write_bytes(data))

    @rule(path=PATHS, data=st.sampled_from(CONTENTS))
    def append_file(self, path: str, data: bytes) -> None:
        def action(half: Half) -> int:
            with (half.root / path).open("ab") as file:
                return file.write(data)

        self.both(action)

    @rule(path=PATHS)
    def mkdir(self, path: str) -> None:
        self.both(lambda half: os.mkdir(half.root / path, 0o755))

    @rule(path=PATHS)
    def rmdir(self, path: str) -> None:
        self.both(lambda half: os.rmdir(half.root / path))

    @rule(path=PATHS)
    def unlink(self, path: str) -> None:
        self.both(lambda half: os.unlink(half.root / path))

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: str, new: str) -> None:
        self.both(lambda half: os.rename(half.root / old, half.root / new))

    @rule(old=PATHS, new=PATHS, flags=st.sampled_from((RENAME_EXCHANGE, RENAME_NOREPLACE)))
    def rename_with_flags(self, old: str, new: str, flags: int) -> None:
        self.both(lambda half: renameat2(half.root / old, half.root / new, flags))

    @rule(path=PATHS, to=st.sampled_from((*NAMES, "nowhere", ".")))
    def symlink(self, path: str, to: str) -> None:
        self.both(lambda half: os.symlink(to, half.root / path))

    @rule(path=PATHS, size=OFFSETS)
    def truncate(self, path: str, size: int) -> None:
        self.both(lambda half: os.truncate(half.root / path, size))

    @rule(path=PATHS, mode=st.sampled_from((0o700, 0o744, 0o755, 0o6711)))
    def chmod(self, path: str, mode: int) -> None:
        self.both(lambda half: os.chmod(half.root / path, mode))

    @rule(path=PATHS)
    def utime(self, path: str) -> None:
        self.both(lambda half: os.utime(half.root / path, ns=(MTIME_NS, MTIME_NS)))

    @rule(path=PATHS, flags=FLAGS, more=MORE_FLAGS)
    def open(self, path: str, flags: int, more: int) -> None:
        if flags == os.O_RDONLY and more & os.O_TRUNC:
            return  # unspecified by POSIX

        def action(half: Half) -> None:
            if len(half.handles) == MAX_HANDLES:
                os.close(half.handles.pop(0))
            fd = os.open(half.root / path, flags | more, 0o644)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                os.close(fd)
            else:
                half.handles.append(fd)

        self.both(action)

    @rule(index=st.integers(0, MAX_HANDLES), offset=OFFSETS, data=st.sampled_from(CONTENTS))
    def pwrite(self, index: int, offset: int, data: bytes) -> None:
        self.both(lambda half: os.pwrite(self.handle(half, index), data, offset))

    @rule(index=st.integers(0, MAX_HANDLES), offset=OFFSETS)
    def pread(self, index: int, offset: int) -> None:
        self.both(lambda half: os.pread(self.handle(half, index), 5000, offset))

    @rule(index=st.integers(0, MAX_HANDLES), size=OFFSETS)
    def ftruncate(self, index: int, size: int) -> None:
        self.both(lambda half: os.ftruncate(self.handle(half, index), size))

    @rule(index=st.integers(0, MAX_HANDLES))
    def fsync(self, index: int) -> None:
        self.both(lambda half: os.fsync(self.handle(half, index)))

    @rule(index=st.integers(0, MAX_HANDLES))
    def close(self, index: int) -> None:
        def action(half: Half) -> None:
            fd = self.handle(half, index)
            half.handles.remove(fd)
            os.close(fd)

        self.both(action)

    @invariant()
    def trees_are_equal(self) -> None:
        mount, plain = self.halves
        assert mount.tree() == plain.tree()
        assert mount.open_files() == plain.open_files()


def check(mount_root: Path, plain_root: Path) -> None:
    class Bound(Twins):
        pass

    Bound.mount_root = mount_root
    Bound.plain_root = plain_root
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def plain_roots(tmp_path: Path) -> tuple[Path, Path]:
    roots = tmp_path / "one", tmp_path / "two"
    for root in roots:
        root.mkdir()
    return roots


def test_plain_directory_equals_another(plain_roots: tuple[Path, Path]) -> None:
    check(*plain_roots)


def test_mount_equals_a_plain_directory(module_mount: harness.MountFactory, plain_roots: tuple[Path, Path]) -> None:
    check(module_mount(session="model").path, plain_roots[0])
