"""Inodes, handles, and the interface of what answers for them.

Decided here and only here: how a kernel inode number is made, when an inode may be forgotten, and what
a mounted directory answers when nothing else is said: it is read-only, has no files, and cannot be
written. One node of a namespace has one inode per session that the kernel sees it through, so that
sessions share no page cache and no dentry.

Threading: one trio thread; the methods of inodes, handles and their table do not await.
"""

from __future__ import annotations

import copy
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import trio

from fusefs.core.attributes import Caller, SetAttr, Space, Stat
from fusefs.core.buffers import Buffer
from fusefs.core.tree import Node
from fusefs.rules.errors import Denied, FsError, NotADirectory, NotFound, NotPermitted, StaleVersion
from fusefs.rules.model import Kind

INDEX_SHIFT = 40
"""A kernel inode number is the session's index above this bit and the incarnation below it."""


_ABSENT_NAMES = 10_000
"""Missing names that the kernel may remember of one directory: each is to be found again."""


def _random_numbers() -> Iterator[int]:
    """Of 64 bits, 512 for each system call: one for each inode and handle would take a tenth of a listing."""
    while True:
        yield from struct.unpack("=512Q", os.urandom(4096))


_numbers = _random_numbers()


class Guard:
    """A lock that costs nothing while it is free: trio's own takes a round of the event loop each time. First come,
    first served."""

    __slots__ = ("_held", "_waiting")

    def __init__(self) -> None:
        self._held = False
        self._waiting: trio.lowlevel.ParkingLot | None = None

    async def __aenter__(self) -> None:
        if not self._held:
            self._held = True
            return
        if self._waiting is None:
            self._waiting = trio.lowlevel.ParkingLot()
        await self._waiting.park()  # whoever leaves hands it over, held

    async def __aexit__(self, *_exc: object) -> None:
        if self._waiting:
            self._waiting.unpark()
        else:
            self._held = False


class Inode:
    """A node as one session's kernel mount sees it.

    Attributes:
        owner: the file system (session, control directory, layout folder) that answers for it.
        node: the node; the owner knows its type.
        lock: held over the commit of the buffer and over the loading of its content.
        kernel_version: the version whose pages the kernel holds, None when unknown.
        told: the version whose size the kernel was given last, None: none, it asks before it reads.
        voids: how often its attributes or pages were made void.
        renewed: up to which of these an open took the place of the call that tells the kernel.
        calm: up to which of these the kernel is past: no such call is under way, and none comes.
        void_below: sizes and pages of older versions than this one were dropped by the kernel.
        pinned: content of an orphan, kept while handles are open.
        absent: names of a directory that the kernel may remember as missing.
        generation: what a file handle must know beside the number. Of the inode, not of the node: a session's view of
            a file says nothing of another session's.
    """

    __slots__ = (
        "absent",
        "buffer",
        "calm",
        "generation",
        "handles",
        "kernel_version",
        "kino",
        "lock",
        "lookups",
        "node",
        "owner",
        "pinned",
        "renewed",
        "told",
        "void_below",
        "voids",
    )

    def __init__(self, owner: Filesystem, node: Node, kino: int) -> None:
        self.owner = owner
        self.node = node
        self.kino = kino
        self.lookups = 0
        self.kernel_version: int | None = None
        self.told: int | None = None
        self.void_below = 0
        self.voids = self.renewed = self.calm = 0
        self.buffer: Buffer | None = None
        self.handles = _NO_HANDLES
        self.pinned: bytes | None = None
        self.absent: set[str] | None = None
        self.generation = next(_numbers) >> 32
        self.lock = Guard()

    def remember_absent(self, name: str) -> bool:
        """Note that the kernel was told a name is missing. False: too many, it must not remember this one."""
        if self.absent is None:
            self.absent = set()
        if len(self.absent) >= _ABSENT_NAMES:
            return False
        self.absent.add(name)
        return True

    def forget_absent(self, name: str) -> bool:
        """Whether the kernel may remember the name as missing; it is about to be told otherwise."""
        if self.absent is not None and name in self.absent:
            self.absent.discard(name)
            return True
        return False

    @property
    def told_version(self) -> int:
        """The version that a handle of a file without a name reads: whose size the kernel has."""
        return self.node.version if self.told is None else self.told

    @property
    def changers(self) -> Iterable[Handle]:
        return (handle for handle in self.handles if handle.changes)


_NO_HANDLES: set[Handle] = set()
"""Of each inode that was never opened; nothing is put into it. One of its own would be a sixth of what a file takes."""


class Void:
    """One call that has the kernel drop what it knows of an inode. Implements `attributes.Drop`."""

    __slots__ = ("_inode", "_number", "_pages")

    def __init__(self, inode: Inode, *, pages: bool) -> None:
        self._inode = inode
        self._number = inode.voids
        self._pages = pages

    def drop_begins(self) -> int | None:
        inode = self._inode
        return inode.node.version if inode.renewed < self._number else None

    def drop_ended(self, version: int) -> None:
        if self._pages:
            self._inode.void_below = version


class Handle:
    """One open file description.

    Attributes:
        version: the version at open, raised by this session's own commits; a write on a handle whose
            version was superseded by others is refused.
        failed: set by the first refusal; every later write and flush repeats it.
        kept: what was written when it was refused is a conflict.
        direct: the kernel reads and writes past its pages, so that nothing of a mapping comes through it.
        serial: identifies the handle in `write_handle`.
        created: this handle made the file.
        changes: its close may have something to commit: it writes, or its open made or emptied the file (flock(1) makes
            its file by O_RDONLY | O_CREAT).
        exclusive: its open was to make the file (O_EXCL).
        joins: where others made the file first, theirs will do: what it writes is appended, or it wanted only that the
            file is there.
        calm: the inode's count of voids at the open; None: the kernel may have been about to drop what it knows, or the
            handle does not read. While the count is the same, what is served is what the process gets, whole: the
            kernel throws attributes away that it asked for before such a call and got after it (measured), and cuts
            the read for which it asked at the old size, or fills it with NULs. A process that reads in two steps
            would have the beginning of one version and the end of another, too.
        untold: its bytes were given up with another handle's, and no call of its own has said so.
        flushes: how often it was flushed with nothing written; each descriptor that bash shuffles counts.
        wrote: this handle has put bytes into the buffer.
    """

    __slots__ = (
        "append",
        "calm",
        "changes",
        "created",
        "direct",
        "exclusive",
        "failed",
        "fh",
        "flushes",
        "inode",
        "joins",
        "kept",
        "names",
        "readable",
        "serial",
        "size_at_open",
        "untold",
        "version",
        "writable",
        "wrote",
    )

    def __init__(self, inode: Inode, flags: int) -> None:
        access = flags & os.O_ACCMODE
        self.inode = inode
        self.fh = 0
        self.readable = access != os.O_WRONLY
        self.writable = access != os.O_RDONLY
        self.append = bool(flags & os.O_APPEND)
        self.changes = self.writable or bool(flags & os.O_TRUNC)
        self.exclusive = bool(flags & os.O_EXCL)
        self.joins = (self.append or not self.changes) and not self.exclusive
        self.version = inode.node.version
        self.size_at_open = inode.node.size
        self.failed: FsError | None = None
        self.kept = False
        self.calm: int | None = None
        self.direct = False
        self.untold = False
        self.flushes = 0
        self.serial = next(_numbers) >> 2
        self.created = False
        self.wrote = False
        self.names: list[str] | None = None

    @property
    def shows(self) -> bool:
        """Whether the process gets what a read is answered with."""
        return self.calm == self.inode.voids

    def check(self) -> None:
        """Raise what this handle failed with before."""
        if self.failed is not None:
            again = copy.copy(self.failed)
            again.told = True
            raise again


class InodeTable:
    """All inodes and handles of one kernel mount."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.handles: dict[int, Handle] = {}
        self._next_fh = 1

    def get(self, kino: int) -> Inode:
        """Raises StaleVersion for a number that was forgotten, which only a file handle can name."""
        try:
            return self.inodes[kino]
        except KeyError:
            raise StaleVersion("no such inode any more") from None

    def known(self, owner: Filesystem, ino: int) -> Inode | None:
        return self.inodes.get(owner.index << INDEX_SHIFT | ino)

    def obtain(self, owner: Filesystem, node: Node) -> Inode:
        """The inode of a node in one session, made on first use. The caller counts the look-up or
        opens a handle before it awaits."""
        kino = owner.index << INDEX_SHIFT | node.ino
        inode = self.inodes.get(kino)
        if inode is None:
            inode = self.inodes[kino] = owner.inodes[kino] = Inode(owner, node, kino)
            node.inodes.append(inode)
        elif inode.node is not node:
            # The mirror lost track of the node and found it again: the kernel did not.
            inode.node.inodes.remove(inode)
            inode.node = node
            inode.kernel_version = inode.told = None
            inode.void_below = 0
            inode.voids += 1
            node.inodes.append(inode)
        return inode

    def forget(self, kino: int, lookups: int) -> None:
        inode = self.inodes.get(kino)
        if inode is not None:
            inode.lookups -= lookups
            self.release(inode)

    def open(self, handle: Handle) -> int:
        """Register a handle. Returns its number."""
        handle.fh = self._next_fh
        self._next_fh += 1
        self.handles[handle.fh] = handle
        if not handle.inode.handles:
            handle.inode.handles = set()
        handle.inode.handles.add(handle)
        return handle.fh

    def close(self, handle: Handle) -> None:
        del self.handles[handle.fh]
        handle.inode.handles.discard(handle)
        self.release(handle.inode)

    def release(self, inode: Inode) -> None:
        """Drop an inode that neither the kernel nor a handle holds."""
        if inode.lookups <= 0 and not inode.handles and self.inodes.get(inode.kino) is inode:
            del self.inodes[inode.kino]
            del inode.owner.inodes[inode.kino]
            inode.node.inodes.remove(inode)
            inode.renewed = sys.maxsize  # the kernel has nothing of it any more
            inode.owner.forgotten(inode)


class Opened(NamedTuple):
    """The answer to open: the handle, and how the kernel may cache it."""

    handle: Handle
    keep_cache: bool = False
    direct_io: bool = False


class Filesystem:
    """Answers for a set of inodes, `inodes` by their numbers. Names are text; paths never reach this layer."""

    index = 0
    root: Inode

    def __init__(self, table: InodeTable) -> None:
        self.table = table
        self.inodes: dict[int, Inode] = {}

    def forgotten(self, inode: Inode) -> None:
        """The kernel knows the inode no more and no handle is open."""

    async def refresh(self, inode: Inode) -> None:
        """Bring an inode up to date before its attributes are told."""

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

    def refuse_name(self, parent: Inode, name: str, error: FsError) -> None:
        """Tell, where somebody can read it, that a name was refused."""

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

    async def link(self, parent: Inode, name: str) -> Inode:
        """link(2): a row is one path."""
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

    async def commit(self, inode: Inode) -> None:
        """Commit what is buffered of an inode; nothing is."""

    def went_back(self, node: Node) -> None:
        """A node's newest version is an older one than was known."""

    async def settle(self, inode: Inode) -> None:
        """Find out what became of a lost commit of an inode's; there was none. Raises Unsettled."""

    async def give_up(self, inode: Inode, error: FsError) -> None:
        """Keep elsewhere what is buffered of an inode and cannot be committed; nothing is."""

    async def flush(self, handle: Handle) -> None:
        """Commit what was written; nothing was."""

    async def fsync(self, handle: Handle) -> None:
        """Commit what was written; nothing was."""

    async def fsyncdir(self, directory: Inode) -> None:
        """Have the names of a directory on disk; there are none that change."""

    async def release(self, handle: Handle) -> None:
        self.table.close(handle)

    async def space(self) -> Space:
        return Space(1 << 40, 1 << 40, 1 << 32, 1 << 32)
