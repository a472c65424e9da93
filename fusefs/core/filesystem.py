"""The interface between a door to the kernel and what answers for an inode.

Decided here and only here: what a mounted directory answers when nothing else is said: it is
read-only, has no files, and cannot be written.

Threading: one trio thread.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from fusefs.core.inodes import Handle, Inode, InodeTable, Stat
from fusefs.rules.errors import Denied, NotADirectory, NotFound, NotPermitted
from fusefs.rules.model import Kind

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2) on Linux; Python's `time` does not name it."""


def now_ns() -> int:
    """The clock of time stamps, as coarse as a local disk's (one tick, 4 ms): writes of one tick leave
    mtime alone, and the kernel keeps their pages."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


@dataclass(slots=True)
class SetAttr:
    """What setattr is to change; None leaves it. Times in ns."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """What statfs shows: bytes and files in all and free."""

    total_bytes: int
    free_bytes: int
    total_files: int
    free_files: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to open: the handle, and how the kernel may cache it."""

    handle: Handle
    keep_cache: bool = False
    direct_io: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made the request."""

    uid: int
    gid: int


class Filesystem:
    """Answers for a set of inodes. Names are text; paths never reach this layer."""

    index = 0
    root: Inode


    def __init__(self, table: InodeTable) -> None:
        self.table = table

    def forgotten(self, inode: Inode) -> None:
        """The kernel knows the inode no more and no handle is open."""

    def stat(self, inode: Inode) -> Stat:
        raise NotImplementedError

    async def lookup(self, parent: Inode, name: str) -> Inode | None:
        raise NotImplementedError

    async def list_names(self, inode: Inode) -> list[str]:
        """The names of a directory, for one pass of readdir."""
        raise NotImplementedError

    async def entry(self, parent: Inode, name: str) -> Inode | None:
        """One entry of a listing; None when it has gone meanwhile."""
        return await self.lookup(parent, name)

    def negative_timeout_s(self, parent: Inode, name: str) -> float:
        """How long, in s, the kernel may remember that a name is absent."""
        return 0.0

    async def setattr(self, inode: Inode, change: SetAttr, handle: Handle | None, caller: Caller) -> None:
        raise Denied("this file is made by the file system")

    async def readlink(self, inode: Inode) -> bytes:
        raise NotFound

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        raise Denied("this directory is made by the file system")

    async def mknod(self, parent: Inode, name: str, kind: Kind, mode: int, caller: Caller) -> Inode:
        raise Denied("this directory is made by the file system")

    async def symlink(self, parent: Inode, name: str, target: bytes, caller: Caller) -> Inode:
        raise Denied("this directory is made by the file system")

    async def link(self) -> Inode:
        """A row is one path (DESIGN section 2)."""
        raise NotPermitted("hard links are not supported")

    async def unlink(self, parent: Inode, name: str) -> None:
        raise Denied("this directory is made by the file system")

    async def rmdir(self, parent: Inode, name: str) -> None:
        raise Denied("this directory is made by the file system")

    async def rename(self, parent: Inode, name: str, new_parent: Inode, new_name: str, mode: str) -> None:
        raise Denied("this directory is made by the file system")

    async def create(self, parent: Inode, name: str, mode: int, flags: int, caller: Caller) -> tuple[Inode, Opened]:
        raise Denied("this directory is made by the file system")

    async def open(self, inode: Inode, flags: int) -> Opened:
        raise Denied("this file is made by the file system")

    async def opendir(self, inode: Inode) -> Handle:
        if inode.node.kind is not Kind.DIR:
            raise NotADirectory
        handle = Handle(inode, os.O_RDONLY)
        self.table.open(handle)
        return handle

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        raise NotImplementedError

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        raise Denied("this file is made by the file system")

    async def flush(self, handle: Handle) -> None:
        """Commit what was written; nothing was."""

    async def fsync(self, handle: Handle) -> None:
        """Commit what was written; nothing was."""

    async def release(self, handle: Handle) -> None:
        self.table.close(handle)

    def space(self) -> Space:
        return Space(1 << 40, 1 << 40, 1 << 32, 1 << 32)
