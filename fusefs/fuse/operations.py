"""pyfuse3's requests, translated to the core and back.

Decided here and only here: how the core's values look to the kernel, and that no exception but
FUSEError leaves a handler: any other would end the mount. `handler` sees to that; a test proves by
reflection that every handler has it.

Threading: pyfuse3 runs each request as a trio task of its own.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, InodeT, ReaddirToken, RequestContext, SetattrFields

from fusefs import telemetry
from fusefs.core.attributes import Caller, SetAttr, Stat
from fusefs.core.filesystem import Handle, Inode, InodeTable, Opened
from fusefs.db.pool import flow
from fusefs.rules.errors import BadName, BadPath, FsError, outcome
from fusefs.rules.model import Kind

_BLOCK = 512
_IO_BLOCK = 4096
_log = telemetry.get_logger()
_requests = telemetry.counters.requests
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

_SPECIAL = {stat_bits.S_IFREG: Kind.FILE, stat_bits.S_IFIFO: Kind.FIFO, stat_bits.S_IFSOCK: Kind.SOCKET}
_RENAME_MODES = {0: "", int(pyfuse3.RENAME_NOREPLACE): "noreplace", int(pyfuse3.RENAME_EXCHANGE): "exchange"}


def handler(function: F) -> F:
    """Count the request, and let only FUSEError out. A fault of ours is logged and answered with EIO."""
    name = function.__name__

    @wraps(function)
    async def wrapper(*args: Any) -> Any:
        _requests[name] += 1
        try:
            return await function(*args)
        except FUSEError:
            raise
        except FsError as error:
            raise FUSEError(error.errno) from None
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not end the mount)
            _log.exception("fuse.handler_failed", handler=name)
            raise FUSEError(outcome(error).errno) from None

    wrapper.is_handler = True  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def _name(parent: Inode, raw: bytes) -> str:
    """A name as text. Raises BadName, and has the directory's owner tell it: the number alone says little."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        error = BadName()
        parent.owner.refuse_name(parent, raw.decode(errors="backslashreplace"), error)
        raise error from None


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid)


def _told(inode: Inode) -> EntryAttributes:
    """Attributes as the kernel is told them now."""
    if inode.pinned is None:
        inode.told = inode.node.version
    return _attributes(inode.owner.stat(inode))


def _attributes(stat: Stat) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = InodeT(stat.ino)
    entry.generation = stat.generation
    entry.entry_timeout = stat.entry_timeout_s
    entry.attr_timeout = stat.attr_timeout_s
    entry.st_mode = stat.mode
    entry.st_nlink = stat.nlink
    entry.st_uid = stat.uid
    entry.st_gid = stat.gid
    entry.st_size = stat.size
    entry.st_blksize = _IO_BLOCK
    entry.st_blocks = (stat.size + _BLOCK - 1) // _BLOCK
    entry.st_mtime_ns = stat.mtime_ns
    entry.st_ctime_ns = stat.ctime_ns
    entry.st_atime_ns = stat.atime_ns
    return entry


def _file_info(opened: Opened) -> FileInfo:
    return FileInfo(fh=opened.handle.fh, keep_cache=opened.keep_cache, direct_io=opened.direct_io)


class Operations(pyfuse3.Operations):
    """All handlers of one mount. Which object answers for an inode is the inode's `owner`."""

    # Without look-ups of "." the kernel re-opens file handles (open_by_handle_at) only while it still
    # knows the inode.
    supports_dot_lookup = False
    # It would move writes past the version check.
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, table: InodeTable, root: Any, *, xattr: bool) -> None:
        super().__init__()
        self._table = table
        self._root = root
        self._xattr = xattr

    def _inode(self, kino: InodeT) -> Inode:
        """The inode of a request, whose session the request's work is for. Raises StaleVersion."""
        inode = self._table.get(kino)
        flow.set(inode.owner.index)
        return inode

    def _handle(self, fh: int) -> Handle:
        handle = self._table.handles[fh]
        flow.set(handle.inode.owner.index)
        return handle

    def _answer(self, inode: Inode) -> EntryAttributes:
        """Attributes of an inode that the reply makes known to the kernel."""
        inode.lookups += 1
        return _told(inode)

    @handler
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        parent = self._inode(parent_inode)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise FUSEError(errno.ENOENT) from None
        inode = await parent.owner.lookup(parent, text)
        if inode is not None:
            return self._answer(inode)
        timeout_s = parent.owner.negative_timeout_s(parent, text)
        if timeout_s == 0:
            raise FUSEError(errno.ENOENT)
        absent = EntryAttributes()
        absent.st_ino = InodeT(0)
        absent.entry_timeout = timeout_s
        return absent

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """No reply and no error: not a handler that can fail."""
        _requests["forget"] += len(inode_list)
        for inode, lookups in inode_list:
            self._table.forget(inode, lookups)

    @handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        found = self._inode(inode)
        await found.owner.refresh(found)
        return _told(found)

    @handler
    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        found = self._inode(inode)
        change = SetAttr(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        handle = None if fh is None else self._table.handles.get(fh)
        await found.owner.setattr(found, change, handle, _caller(ctx))
        return _told(found)

    @handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        found = self._inode(inode)
        return await found.owner.readlink(found)

    @handler
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        parent = self._inode(parent_inode)
        kind = _SPECIAL.get(stat_bits.S_IFMT(mode))
        if kind is None:
            raise FUSEError(errno.EPERM)
        return self._answer(await parent.owner.mknod(parent, _name(parent, name), kind, mode, _caller(ctx)))

    @handler
    async def mkdir(self, parent_inode: InodeT, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        parent = self._inode(parent_inode)
        return self._answer(await parent.owner.mkdir(parent, _name(parent, name), mode, _caller(ctx)))

    @handler
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        parent = self._inode(parent_inode)
        await parent.owner.unlink(parent, _name(parent, name))

    @handler
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        parent = self._inode(parent_inode)
        await parent.owner.rmdir(parent, _name(parent, name))

    @handler
    async def symlink(self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        parent = self._inode(parent_inode)
        return self._answer(await parent.owner.symlink(parent, _name(parent, name), target, _caller(ctx)))

    @handler
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        parent, new_parent = self._inode(parent_inode_old), self._inode(parent_inode_new)
        if flags not in _RENAME_MODES:
            raise BadPath("unknown flags of rename")
        if parent.owner is not new_parent.owner:
            raise FUSEError(errno.EXDEV)
        await parent.owner.rename(
            parent, _name(parent, name_old), new_parent, _name(new_parent, name_new), _RENAME_MODES[flags]
        )

    @handler
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        parent = self._inode(new_parent_inode)
        return self._answer(await parent.owner.link(parent, _name(parent, new_name)))

    @handler
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        found = self._inode(inode)
        return _file_info(await found.owner.open(found, flags))

    @handler
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        parent = self._inode(parent_inode)
        inode, opened = await parent.owner.create(parent, _name(parent, name), mode, flags, _caller(ctx))
        return _file_info(opened), self._answer(inode)

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        handle = self._handle(fh)
        return await handle.inode.owner.read(handle, off, size)

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        handle = self._handle(fh)
        return await handle.inode.owner.write(handle, off, buf)

    @handler
    async def flush(self, fh: int) -> None:
        handle = self._handle(fh)
        await handle.inode.owner.flush(handle)

    @handler
    async def release(self, fh: int) -> None:
        handle = self._handle(fh)
        await handle.inode.owner.release(handle)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        handle = self._handle(fh)
        await handle.inode.owner.fsync(handle)

    @handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> int:
        found = self._inode(inode)
        return (await found.owner.opendir(found)).fh

    @handler
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Names as of the first call of a pass: an offset is a position in them, so that entries which
        come and go meanwhile neither shift the others nor repeat them."""
        handle = self._handle(fh)
        directory = handle.inode
        owner = directory.owner
        if start_id == 0 or handle.names is None:
            handle.names = await owner.list_names(directory)
        for position in range(start_id, len(handle.names)):
            name = handle.names[position]
            inode = await owner.entry(directory, name)
            if inode is None:
                continue
            attributes = _attributes(inode.owner.stat(inode))
            if not pyfuse3.readdir_reply(token, name.encode(), attributes, position + 1):
                self._table.release(inode)
                break
            inode.told = inode.node.version
            inode.lookups += 1

    @handler
    async def releasedir(self, fh: int) -> None:
        handle = self._handle(fh)
        await handle.inode.owner.release(handle)

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        directory = self._handle(fh).inode
        await directory.owner.fsyncdir(directory)

    @handler
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        space = await self._root.space()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = _IO_BLOCK
        data.f_blocks = space.total_bytes // _IO_BLOCK
        data.f_bfree = data.f_bavail = space.free_bytes // _IO_BLOCK
        data.f_files = space.total_files
        data.f_ffree = data.f_favail = space.free_files
        data.f_namemax = 255
        return data

    @handler
    async def access(self, inode: InodeT, mode: int, ctx: RequestContext) -> bool:
        """access(2) and chdir(2); asked only where root alone gets in (see `serving`), whom no mode stops but
        that of a file without any x bit."""
        found = self._inode(inode)
        return not mode & os.X_OK or found.owner.stat(found).may_be_executed

    @handler
    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        # ENOSYS makes the kernel stop asking; else it asks for security.capability before each write.
        raise FUSEError(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)

    @handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        if self._xattr:
            return []
        raise FUSEError(errno.ENOSYS)

    @handler
    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        raise FUSEError(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)

    @handler
    async def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        raise FUSEError(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)
