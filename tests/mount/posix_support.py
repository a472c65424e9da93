"""What the POSIX cases share: the table itself, and the system calls that Python does not offer.

Decided here and only here: how a case is registered and where it applies (`plain`, `mount`, both).
A case gets an empty directory of its own and asserts one behaviour; it must hold on ext4 as well,
unless it is marked `mount_only`.

Threading: cases run one at a time in the main thread; `Child` forks, and the child ends by `os._exit`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

Body = Callable[[Path], None]

NOBODY = 65534
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    body: Body
    mount_only: bool
    root_only: bool


CASES: list[Case] = []


def case(*, mount_only: bool = False, root_only: bool = False) -> Callable[[Body], Body]:
    """Register a case. `root_only`: it needs another user's id, which an ordinary user cannot take."""

    def register(body: Body) -> Body:
        CASES.append(Case(body.__name__.removeprefix("case_"), body, mount_only, root_only))
        return body

    return register


@contextlib.contextmanager
def refused(*codes: int) -> Iterator[None]:
    """The block must raise OSError with one of the errnos."""
    names = "/".join(errno.errorcode[code] for code in codes)
    got = 0
    try:
        yield
    except OSError as exc:
        got = exc.errno or -1
    assert got, f"succeeded, wanted {names}"
    assert got in codes, f"refused with {errno.errorcode.get(got, got)}, wanted {names}"


def errno_of(call: Callable[[], object]) -> int:
    """The errno that a call fails with, 0 when it succeeds: for what a file system may or may not offer."""
    try:
        call()
    except OSError as exc:
        return exc.errno or -1
    return 0


@contextlib.contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o644, *, dir_fd: int | None = None) -> Iterator[int]:
    """A file descriptor for the block. Closing may raise: that is when a version conflict is told."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def read_at(path: Path) -> bytes:
    """The content through a handle of its own."""
    return path.read_bytes()


def pattern(size: int, seed: int = 0) -> bytes:
    """`size` bytes in which any misplaced or missing block shows: no period divides a power of two."""
    unit = bytes((i * 7 + seed) % 251 for i in range(251))
    return (unit * (size // 251 + 1))[:size]


class Child:
    """A forked process that runs `work` and reports its failure; `wait` raises that as AssertionError.

    Args:
        work: called in the child.
        uid: user and group to become first; only root can.
    """

    def __init__(self, work: Callable[[], object], *, uid: int | None = None) -> None:
        self._report, report = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with threads alive; the child touches none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._report)
            self._run(work, uid, report)
        os.close(report)

    @staticmethod
    def _run(work: Callable[[], object], uid: int | None, report: int) -> NoReturn:
        status = 1
        try:
            signal.alarm(60)
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            os.write(report, traceback.format_exc().encode(errors="replace")[-60000:])
        finally:
            os._exit(status)

    def wait(self) -> None:
        """Reap the child. Raises AssertionError with the child's traceback when it failed."""
        chunks: list[bytes] = []
        while chunk := os.read(self._report, 65536):
            chunks.append(chunk)
        os.close(self._report)
        _, status = os.waitpid(self.pid, 0)
        text = b"".join(chunks).decode(errors="replace")
        assert status == 0, f"the child failed (status {status}):\n{text}"


def in_child(work: Callable[[], object], *, uid: int | None = None) -> None:
    """Run `work` in a process of its own and wait for it."""
    Child(work, uid=uid).wait()


def unprivileged(work: Callable[[], object]) -> None:
    """Run `work` without root's rights: as `nobody` when root runs the suite, else as ourselves."""
    in_child(work, uid=NOBODY if os.geteuid() == 0 else None)


_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


def _checked(result: int, path: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


def renameat2(old: Path | str, new: Path | str, flags: int) -> None:
    """renameat2(2). Raises OSError."""
    _checked(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags), str(old))


def utimensat(path: Path | str, atime: tuple[int, int], mtime: tuple[int, int], flags: int = 0) -> None:
    """utimensat(2) with (seconds, nanoseconds); the nanoseconds may be UTIME_NOW or UTIME_OMIT."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    _checked(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, flags), str(path))


class _FileHandle(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128))


def file_handle(path: Path | str) -> bytes:
    """name_to_handle_at(2): what the kernel keeps of a file's identity, its generation included."""
    handle = _FileHandle(size=128)
    mount_id = ctypes.c_int()
    _checked(
        _libc.name_to_handle_at(AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), 0),
        str(path),
    )
    return bytes(handle.data[: handle.size])


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Raises OSError."""
    _checked(_libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)), f"fd {fd}")
