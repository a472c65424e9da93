"""The kernel's FUSE protocol, as bytes.

Decided here and only here: how requests and answers of `<linux/fuse.h>` (7.31, Linux 5.4 and later) are laid out, which
features of it are asked for, and nothing of what they mean.

Threading: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from fusefs.core.attributes import Space, Stat

MAJOR, MINOR = 7, 31
ROOT = 1
MAX_WRITE = 1 << 20
MAX_PAGES = MAX_WRITE // 4096
READ_SIZE = MAX_WRITE + 4096
"""What one read from the kernel must have room for: the largest WRITE and what precedes its bytes."""

BLOCK = 512
IO_BLOCK = 4096
NAME_MAX = 255
TARGET_MAX = 4095
"""Bytes of a symlink's target that the kernel takes."""


class Opcode(IntEnum):
    """The requests that are answered. Every other gets ENOSYS, after which the kernel does not ask again."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Notify(IntEnum):
    """What the kernel is told unasked."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6


# Features (INIT). Not among them: WRITEBACK_CACHE, which would move writes past the version check; EXPORT_SUPPORT, so
# the kernel opens file handles (open_by_handle_at) only while it still knows the inode.
_ASYNC_READ = 1 << 0
_ATOMIC_O_TRUNC = 1 << 3
_BIG_WRITES = 1 << 5
_AUTO_INVAL_DATA = 1 << 12
_DO_READDIRPLUS = 1 << 13
_ASYNC_DIO = 1 << 15
_MAX_PAGES = 1 << 22
WANTED = _ASYNC_READ | _ATOMIC_O_TRUNC | _BIG_WRITES | _AUTO_INVAL_DATA | _DO_READDIRPLUS | _ASYNC_DIO | _MAX_PAGES

# How the kernel may treat an open file. Plain numbers: an IntFlag's `|` takes 1 us.
DIRECT_IO = 1 << 0
KEEP_CACHE = 1 << 1
NOFLUSH = 1 << 5

# Which attributes a SETATTR names.
SET_MODE = 1 << 0
SET_UID = 1 << 1
SET_GID = 1 << 2
SET_SIZE = 1 << 3
SET_ATIME = 1 << 4
SET_MTIME = 1 << 5
SET_FH = 1 << 6
SET_ATIME_NOW = 1 << 7
SET_MTIME_NOW = 1 << 8

# Requests, by the names of their structures.
IN_HEADER = Struct("=IIQQIIIHH")  # length, opcode, unique, nodeid, uid, gid, pid, ext length, padding
U32 = Struct("=I")
U64 = Struct("=Q")
INIT_IN = Struct("=IIII")  # major, minor, max_readahead, flags
SETATTR_IN = Struct("=IIQQQQQQIIIIIIII")
MKNOD_IN = Struct("=IIII")  # mode, rdev, umask, padding
MKDIR_IN = Struct("=II")  # mode, umask
RENAME2_IN = Struct("=QII")  # new directory, flags, padding
CREATE_IN = Struct("=IIII")  # flags, mode, umask, open flags
READ_IN = Struct("=QQIIQII")  # fh, offset, size, …
WRITE_IN = Struct("=QQIIQII")  # fh, offset, size, …
BATCH_FORGET_IN = Struct("=II")  # count
FORGET_ONE = Struct("=QQ")  # nodeid, lookups
XATTR_IN = Struct("=II")  # size

# Answers.
OUT_HEADER = Struct("=IiQ")  # length, -errno or Notify, unique
INIT_OUT = Struct("=IIIIHHIIHHI28x")
_ATTR = Struct("=QQQQQQIIIIIIIIII")
_ENTRY_OUT = Struct("=QQQQII")  # then _ATTR
_ATTR_OUT = Struct("=QII")  # then _ATTR
_DIRENT = Struct("=QQII")
_OPEN_OUT = Struct("=QIi")
WRITE_OUT = Struct("=II")
_STATFS_OUT = Struct("=QQQQQIIII24x")
_INVAL_INODE_OUT = Struct("=Qqq")
_INVAL_ENTRY_OUT = Struct("=QII")
_DELETE_OUT = Struct("=QQII")

NS = 1_000_000_000


@dataclass(slots=True)
class Request:
    """One request. `nodeid` is the inode it is for; `body` is what follows the header."""

    unique: int
    opcode: int
    nodeid: int
    uid: int
    gid: int
    body: bytes


def parse(buffer: bytearray, length: int) -> Request:
    """The request in the first bytes of a buffer, which may be used again afterwards."""
    _, opcode, unique, nodeid, uid, gid, _, _, _ = IN_HEADER.unpack_from(buffer)
    return Request(unique, opcode, nodeid, uid, gid, bytes(memoryview(buffer)[IN_HEADER.size : length]))


def one_name(body: bytes, offset: int = 0) -> bytes:
    """The name that a request ends with."""
    return body[offset:-1]


def two_names(body: bytes, offset: int = 0) -> tuple[bytes, bytes]:
    first, second, _ = body[offset:].split(b"\0", 2)
    return first, second


def init_out(minor: int, max_readahead: int, flags: int) -> bytes:
    """The answer to INIT: the features of `WANTED` that the kernel offers. How many requests may wait in the background
    (0, 0) is left to the kernel; times have a grain of 1 ns."""
    return INIT_OUT.pack(MAJOR, min(minor, MINOR), max_readahead, flags & WANTED, 0, 0, MAX_WRITE, 1, MAX_PAGES, 0, 0)


def _attributes(stat: Stat) -> bytes:
    atime_s, atime_ns = divmod(stat.atime_ns, NS)
    mtime_s, mtime_ns = divmod(stat.mtime_ns, NS)
    ctime_s, ctime_ns = divmod(stat.ctime_ns, NS)
    # Seconds before 1970 travel as the kernel's unsigned ones.
    mask = (1 << 64) - 1
    return _ATTR.pack(
        stat.ino,
        stat.size,
        (stat.size + BLOCK - 1) // BLOCK,
        atime_s & mask,
        mtime_s & mask,
        ctime_s & mask,
        atime_ns,
        mtime_ns,
        ctime_ns,
        stat.mode,
        stat.nlink,
        stat.uid,
        stat.gid,
        0,
        IO_BLOCK,
        0,
    )


def entry_out(stat: Stat) -> bytes:
    """A name's inode and its attributes."""
    entry_s, entry_ns = _timeout(stat.entry_timeout_s)
    attr_s, attr_ns = _timeout(stat.attr_timeout_s)
    return _ENTRY_OUT.pack(stat.ino, stat.generation, entry_s, attr_s, entry_ns, attr_ns) + _attributes(stat)


def absent_out(timeout_s: float) -> bytes:
    """A name that is not there, and how long the kernel may remember that."""
    seconds, nanoseconds = _timeout(timeout_s)
    return _ENTRY_OUT.pack(0, 0, seconds, 0, nanoseconds, 0) + bytes(_ATTR.size)


def attr_out(stat: Stat) -> bytes:
    return _ATTR_OUT.pack(*_timeout(stat.attr_timeout_s), 0) + _attributes(stat)


def open_out(fh: int, flags: int = 0) -> bytes:
    return _OPEN_OUT.pack(fh, flags, 0)


def direntplus_size(name: bytes) -> int:
    return _ENTRY_OUT.size + _ATTR.size + (_DIRENT.size + len(name) + 7) // 8 * 8


def direntplus(name: bytes, position: int, stat: Stat) -> bytes:
    """One entry of READDIRPLUS. `position` is where a later request goes on."""
    entry = _DIRENT.pack(stat.ino, position, len(name), stat.mode >> 12) + name
    return entry_out(stat) + entry + b"\0" * (-len(entry) % 8)


def statfs_out(space: Space) -> bytes:
    free = space.free_bytes // IO_BLOCK
    return _STATFS_OUT.pack(
        space.total_bytes // IO_BLOCK, free, free, space.total_files, space.free_files, IO_BLOCK, NAME_MAX, IO_BLOCK, 0
    )


def answer(unique: int, body: bytes) -> tuple[bytes, bytes]:
    """An answer that succeeded, to be written at once."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique), body


def refusal(unique: int, errno: int) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size, -errno, unique)


def inval_inode(ino: int, *, attr_only: bool) -> bytes:
    return _notice(Notify.INVAL_INODE, _INVAL_INODE_OUT.pack(ino, -1 if attr_only else 0, 0))


def inval_entry(parent: int, name: bytes) -> bytes:
    return _notice(Notify.INVAL_ENTRY, _INVAL_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0")


def delete(parent: int, child: int, name: bytes) -> bytes:
    return _notice(Notify.DELETE, _DELETE_OUT.pack(parent, child, len(name), 0) + name + b"\0")


def _notice(code: Notify, body: bytes) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body


def _timeout(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * NS)
