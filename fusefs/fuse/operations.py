"""The kernel's requests, translated to the core and back.

Decided here and only here: how the core's values look to the kernel, and that nothing leaves `Operations.answer` but an
answer: an exception would end the mount.

Threading: a request is answered in the task of `device` that read it.
"""

from __future__ import annotations

import errno
import os
import stat as stat_bits
from collections.abc import Awaitable, Callable
from typing import Any

from fusefs import telemetry
from fusefs.core.attributes import Caller, SetAttr, now_ns
from fusefs.core.filesystem import Handle, Inode, InodeTable, Opened
from fusefs.db.pool import flow
from fusefs.fuse import protocol
from fusefs.fuse.device import Device
from fusefs.fuse.protocol import Opcode, Request
from fusefs.rules.errors import BadName, BadPath, FsError, outcome
from fusefs.rules.model import Kind

_log = telemetry.get_logger()
_requests = telemetry.counters.requests

_SPECIAL = {stat_bits.S_IFREG: Kind.FILE, stat_bits.S_IFIFO: Kind.FIFO, stat_bits.S_IFSOCK: Kind.SOCKET}
_RENAME_MODES = {0: "", 1: "noreplace", 2: "exchange"}
"""renameat2(2)'s flags."""


class Refused(Exception):
    """A refusal that is the door's own: what the core is never asked."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _name(parent: Inode, raw: bytes) -> str:
    """A name as text. Raises BadName, and has the directory's owner tell it: the number alone says little."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        error = BadName()
        parent.owner.refuse_name(parent, raw.decode(errors="backslashreplace"), error)
        raise error from None


def _caller(request: Request) -> Caller:
    return Caller(request.uid, request.gid)


def _told(inode: Inode) -> bytes:
    """Attributes as the kernel is told them now."""
    _note_told(inode)
    return protocol.attr_out(inode.owner.stat(inode))


def _note_told(inode: Inode) -> None:
    if inode.pinned is None:
        inode.told = inode.node.version


def _entry(inode: Inode) -> bytes:
    """An inode that the reply makes known to the kernel."""
    inode.lookups += 1
    _note_told(inode)
    return protocol.entry_out(inode.owner.stat(inode))


def _opened(opened: Opened) -> bytes:
    flags = protocol.KEEP_CACHE if opened.keep_cache else 0
    if opened.direct_io:
        flags |= protocol.DIRECT_IO
    if not opened.handle.changes:
        flags |= protocol.NOFLUSH  # its close has nothing to commit
    return protocol.open_out(opened.handle.fh, flags)


class Operations:
    """The answers of one mount. Which object answers for an inode is the inode's `owner`."""

    def __init__(self, device: Device, table: InodeTable, root: Any, *, xattr: bool) -> None:
        self._device = device
        self._table = table
        self._root = root
        self._xattr = xattr
        self._handlers: dict[int, tuple[str, Callable[[Request], Awaitable[bytes]]]] = {
            int(opcode): (name, getattr(self, name))
            for opcode, name in {
                **{opcode: opcode.name.lower() for opcode in Opcode},
                Opcode.RENAME2: "rename",
                Opcode.READDIRPLUS: "readdir",
            }.items()
            if opcode not in (Opcode.FORGET, Opcode.BATCH_FORGET)
        }

    async def answer(self, request: Request) -> None:
        """Count a request and answer it. A fault of ours is logged and answered with EIO."""
        opcode, unique = request.opcode, request.unique
        try:
            name, handler = self._handlers[opcode]
        except KeyError:
            if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET):
                self._forget(request)  # no reply
            else:
                self._device.refuse(unique, errno.ENOSYS)
            return
        _requests[name] += 1
        try:
            body = await handler(request)
        except Refused as refusal:
            self._device.refuse(unique, refusal.number)
        except FsError as error:
            self._device.refuse(unique, error.errno)
        except Exception as error:  # noqa: BLE001  (whatever it is, it must not end the mount)
            _log.exception("fuse.handler_failed", handler=name)
            self._device.refuse(unique, outcome(error).errno)
        else:
            self._device.reply(unique, body)

    def _inode(self, kino: int) -> Inode:
        """The inode of a request, whose session the request's work is for. Raises StaleVersion."""
        inode = self._table.get(kino)
        flow.set(inode.owner.index)
        return inode

    def _handle(self, fh: int) -> Handle:
        handle = self._table.handles[fh]
        flow.set(handle.inode.owner.index)
        return handle

    def _handle_of(self, request: Request) -> Handle:
        """The handle that a request begins with."""
        return self._handle(protocol.U64.unpack_from(request.body)[0])

    def _forget(self, request: Request) -> None:
        body = request.body
        if request.opcode == Opcode.FORGET:
            forgotten = [(request.nodeid, protocol.U64.unpack_from(body)[0])]
        else:
            count, _ = protocol.BATCH_FORGET_IN.unpack_from(body)
            start, size = protocol.BATCH_FORGET_IN.size, protocol.FORGET_ONE.size
            forgotten = [*protocol.FORGET_ONE.iter_unpack(body[start : start + count * size])]
        _requests["forget"] += len(forgotten)
        for kino, lookups in forgotten:
            self._table.forget(kino, lookups)

    # -- The connection ----------------------------------------------------------------------------

    async def init(self, request: Request) -> bytes:
        major, minor, max_readahead, offered = protocol.INIT_IN.unpack_from(request.body)
        missing = protocol.WANTED & ~offered
        if major != protocol.MAJOR or missing:
            _log.error("fuse.kernel_too_old", protocol=f"{major}.{minor}", missing=hex(missing))
            raise Refused(errno.EPROTO)
        return protocol.init_out(minor, max_readahead, offered)

    async def destroy(self, request: Request) -> bytes:
        return b""

    # -- Names -------------------------------------------------------------------------------------

    async def lookup(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        try:
            name = protocol.one_name(request.body).decode()
        except UnicodeDecodeError:
            raise Refused(errno.ENOENT) from None
        inode = await parent.owner.lookup(parent, name)
        if inode is not None:
            return _entry(inode)
        timeout_s = parent.owner.negative_timeout_s(parent, name)
        if timeout_s == 0:
            raise Refused(errno.ENOENT)
        return protocol.absent_out(timeout_s)

    async def mknod(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        mode, _, _, _ = protocol.MKNOD_IN.unpack_from(request.body)
        name = protocol.one_name(request.body, protocol.MKNOD_IN.size)
        kind = _SPECIAL.get(stat_bits.S_IFMT(mode))
        if kind is None:
            raise Refused(errno.EPERM)
        return _entry(await parent.owner.mknod(parent, _name(parent, name), kind, mode, _caller(request)))

    async def mkdir(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        mode, _ = protocol.MKDIR_IN.unpack_from(request.body)
        name = protocol.one_name(request.body, protocol.MKDIR_IN.size)
        return _entry(await parent.owner.mkdir(parent, _name(parent, name), mode, _caller(request)))

    async def unlink(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        await parent.owner.unlink(parent, _name(parent, protocol.one_name(request.body)))
        return b""

    async def rmdir(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        await parent.owner.rmdir(parent, _name(parent, protocol.one_name(request.body)))
        return b""

    async def symlink(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        name, target = protocol.two_names(request.body)
        return _entry(await parent.owner.symlink(parent, _name(parent, name), target, _caller(request)))

    async def rename(self, request: Request) -> bytes:
        if request.opcode == Opcode.RENAME:
            (new_parent_kino,) = protocol.U64.unpack_from(request.body)
            flags, start = 0, protocol.U64.size
        else:
            new_parent_kino, flags, _ = protocol.RENAME2_IN.unpack_from(request.body)
            start = protocol.RENAME2_IN.size
        old, new = protocol.two_names(request.body, start)
        parent, new_parent = self._inode(request.nodeid), self._inode(new_parent_kino)
        if flags not in _RENAME_MODES:
            raise BadPath("unknown flags of rename")
        if parent.owner is not new_parent.owner:
            raise Refused(errno.EXDEV)
        await parent.owner.rename(parent, _name(parent, old), new_parent, _name(new_parent, new), _RENAME_MODES[flags])
        return b""

    async def link(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        name = protocol.one_name(request.body, protocol.U64.size)
        return _entry(await parent.owner.link(parent, _name(parent, name)))

    # -- Attributes --------------------------------------------------------------------------------

    async def getattr(self, request: Request) -> bytes:
        found = self._inode(request.nodeid)
        await found.owner.refresh(found)
        return _told(found)

    async def setattr(self, request: Request) -> bytes:
        found = self._inode(request.nodeid)
        (
            valid,
            _,
            fh,
            size,
            _,
            atime_s,
            mtime_s,
            _,
            atime_ns,
            mtime_ns,
            _,
            mode,
            _,
            uid,
            gid,
            _,
        ) = protocol.SETATTR_IN.unpack_from(request.body)
        change = SetAttr(
            mode=mode if valid & protocol.SET_MODE else None,
            uid=uid if valid & protocol.SET_UID else None,
            gid=gid if valid & protocol.SET_GID else None,
            size=size if valid & protocol.SET_SIZE else None,
            atime_ns=_time_ns(valid, protocol.SET_ATIME, protocol.SET_ATIME_NOW, atime_s, atime_ns),
            mtime_ns=_time_ns(valid, protocol.SET_MTIME, protocol.SET_MTIME_NOW, mtime_s, mtime_ns),
        )
        handle = self._table.handles.get(fh) if valid & protocol.SET_FH else None
        await found.owner.setattr(found, change, handle, _caller(request))
        return _told(found)

    async def readlink(self, request: Request) -> bytes:
        found = self._inode(request.nodeid)
        target = await found.owner.readlink(found)
        if len(target) > protocol.TARGET_MAX:
            raise Refused(errno.ENAMETOOLONG)  # a row of others' making: symlink(2) refuses it
        return target

    async def access(self, request: Request) -> bytes:
        """access(2) and chdir(2); asked only where root alone gets in (see `serving`), whom no mode stops but
        that of a file without any x bit."""
        found = self._inode(request.nodeid)
        (mode,) = protocol.U32.unpack_from(request.body)
        if mode & os.X_OK and not found.owner.stat(found).may_be_executed:
            raise Refused(errno.EACCES)
        return b""

    async def statfs(self, request: Request) -> bytes:
        return protocol.statfs_out(await self._root.space())

    async def getxattr(self, request: Request) -> bytes:
        # ENOSYS makes the kernel stop asking; else it asks for security.capability before each write.
        raise Refused(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)

    async def listxattr(self, request: Request) -> bytes:
        if not self._xattr:
            raise Refused(errno.ENOSYS)
        size, _ = protocol.XATTR_IN.unpack_from(request.body)
        return b"" if size else protocol.XATTR_IN.pack(0, 0)  # size 0 asks for the size

    async def setxattr(self, request: Request) -> bytes:
        raise Refused(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)

    async def removexattr(self, request: Request) -> bytes:
        raise Refused(errno.EOPNOTSUPP if self._xattr else errno.ENOSYS)

    # -- Open files --------------------------------------------------------------------------------

    async def open(self, request: Request) -> bytes:
        found = self._inode(request.nodeid)
        (flags,) = protocol.U32.unpack_from(request.body)
        return _opened(await found.owner.open(found, flags))

    async def create(self, request: Request) -> bytes:
        parent = self._inode(request.nodeid)
        flags, mode, _, _ = protocol.CREATE_IN.unpack_from(request.body)
        name = protocol.one_name(request.body, protocol.CREATE_IN.size)
        inode, opened = await parent.owner.create(parent, _name(parent, name), mode, flags, _caller(request))
        return _entry(inode) + _opened(opened)

    async def read(self, request: Request) -> bytes:
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(request.body)
        handle = self._handle(fh)
        return await handle.inode.owner.read(handle, offset, size)

    async def write(self, request: Request) -> bytes:
        fh, offset, size, *_ = protocol.WRITE_IN.unpack_from(request.body)
        handle = self._handle(fh)
        start = protocol.WRITE_IN.size
        written = await handle.inode.owner.write(handle, offset, request.body[start : start + size])
        return protocol.WRITE_OUT.pack(written, 0)

    async def flush(self, request: Request) -> bytes:
        handle = self._handle_of(request)
        await handle.inode.owner.flush(handle)
        return b""

    async def release(self, request: Request) -> bytes:
        handle = self._handle_of(request)
        await handle.inode.owner.release(handle)
        return b""

    async def fsync(self, request: Request) -> bytes:
        handle = self._handle_of(request)
        await handle.inode.owner.fsync(handle)
        return b""

    # -- Directories -------------------------------------------------------------------------------

    async def opendir(self, request: Request) -> bytes:
        found = self._inode(request.nodeid)
        return protocol.open_out((await found.owner.opendir(found)).fh)

    async def readdir(self, request: Request) -> bytes:
        """Names as of the first call of a pass: an offset is a position in them, so that entries which
        come and go meanwhile neither shift the others nor repeat them."""
        fh, start, size, *_ = protocol.READ_IN.unpack_from(request.body)
        handle = self._handle(fh)
        directory = handle.inode
        owner = directory.owner
        if start == 0 or handle.names is None:
            handle.names = await owner.list_names(directory)
        entries: list[tuple[bytes, int, Inode]] = []
        try:
            for position in range(start, len(handle.names)):
                name = handle.names[position]
                raw = name.encode()
                size_of_entry = protocol.direntplus_size(raw)
                if size_of_entry > size:
                    break
                inode = await owner.entry(directory, name)
                if inode is None:
                    continue
                size -= size_of_entry
                inode.lookups += 1
                entries.append((raw, position + 1, inode))
        except BaseException:
            for _, _, inode in entries:
                self._table.forget(inode.kino, 1)  # the kernel never hears of it
            raise
        # Only now, since an entry may have been waited for: the kernel could not yet be told what changed meanwhile.
        for _, _, inode in entries:
            _note_told(inode)
        return b"".join([protocol.direntplus(raw, after, inode.owner.stat(inode)) for raw, after, inode in entries])

    async def releasedir(self, request: Request) -> bytes:
        return await self.release(request)

    async def fsyncdir(self, request: Request) -> bytes:
        directory = self._handle_of(request).inode
        await directory.owner.fsyncdir(directory)
        return b""


def _time_ns(valid: int, given: int, now: int, seconds: int, nanoseconds: int) -> int | None:
    """What a SETATTR says of a time; seconds before 1970 travel as unsigned ones."""
    if valid & now:
        return now_ns()
    if not valid & given:
        return None
    if seconds >= 1 << 63:
        seconds -= 1 << 64
    return seconds * protocol.NS + nanoseconds
