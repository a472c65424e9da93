"""Open, read, write, flush: the content of files, and the three version checks.

Decided here and only here (DESIGN section 6): what a commit expects of the row that it meets, when a
flush commits, what a lost race leaves behind, and what an orphan's handles still read.

Threading: one trio thread. A commit holds the inode's lock; what is written meanwhile makes the
buffer dirty again.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from fusefs import telemetry
from fusefs.core.attributes import now_ns
from fusefs.core.buffers import Buffer
from fusefs.core.filesystem import Filesystem, Handle, Inode, InodeTable, Opened
from fusefs.core.namespace import Namespace
from fusefs.core.session import Session
from fusefs.core.tree import UNCOMMITTED, Node
from fusefs.rules import paths
from fusefs.rules.config import Consistency
from fusefs.rules.errors import FsError, IsADirectory, NotFound, StaleVersion, TooLarge
from fusefs.rules.model import Attrs, Commit, Kind
from fusefs.rules.paths import Op
from fusefs.store import files

_PAGE = 4096
_log = telemetry.get_logger()


class FileIo:
    """The data side of one session's file system.

    Args:
        view: the session's file system, which owns the inodes.
    """

    def __init__(self, ns: Namespace, session: Session, table: InodeTable, view: Filesystem) -> None:
        self.ns = ns
        self.session = session
        self.table = table
        self._view = view
        # Set by the view: what happens to the name of an uncommitted file that met another one there.
        self.lost_name: Callable[[Node], Awaitable[None]]
        self._limits = session.settings.limits
        self._strict = session.settings.consistency is Consistency.STRICT

    # -- Open --------------------------------------------------------------------------------------

    async def open(self, inode: Inode, flags: int) -> Opened:
        """open(2) of an existing file. Raises Denied, StaleVersion (the first check)."""
        node = inode.node
        if node.kind is Kind.DIR:
            raise IsADirectory
        writing = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        if writing:
            paths.check(self.session.scope, Op.WRITE, node.path)
        buffer = inode.buffer
        own = buffer is not None and buffer.uncommitted
        if (writing or self._strict) and not own and not node.gone:
            await self.ns.barrier()
        if node.gone and not inode.handles:
            raise StaleVersion("deleted or replaced", path=node.path)
        if flags & os.O_TRUNC:
            await self._truncate_at_open(inode)
        handle = Handle(inode, flags)
        if inode.buffer is not None and inode.buffer.uncommitted and inode.buffer.expected is not None:
            handle.version = inode.buffer.expected
        if handle.readable and node.committed:
            self.session.saw(node, node.version)
        keep = self._keep_cache(inode)
        self.table.open(handle)
        return Opened(handle, keep_cache=keep)

    def _keep_cache(self, inode: Inode) -> bool:
        """Whether the kernel's pages are of the version that is served now. keep_cache=False drops the
        pages but not the old size, which would cut reads short (measured): attributes go first."""
        version = inode.node.version
        if inode.buffer is not None and inode.buffer.uncommitted:
            return True
        if inode.kernel_version == version:
            return True
        if inode.kernel_version is not None:
            self.ns.kernel.invalidate_attr_now(inode.kino)
        inode.kernel_version = version
        return False

    async def _truncate_at_open(self, inode: Inode) -> None:
        node = inode.node
        buffer = inode.buffer
        if buffer is None or not buffer.uncommitted:
            self.session.check_replace(node)
            buffer = inode.buffer = Buffer(None if not node.committed else node.version, bytearray(), whole=True)
        else:
            buffer.data.clear()
            if not buffer.whole:
                buffer.whole, buffer.expected = True, node.version
        buffer.pending, buffer.flushes = True, 0
        buffer.mtime_ns = now_ns()
        inode.kernel_version = node.version

    def opened_new(self, inode: Inode, flags: int, expected: int | None) -> Opened:
        """The handle of a file that this call made; `expected` is the claim's version, None: uncommitted."""
        buffer = inode.buffer = Buffer(expected, bytearray(), whole=True)
        buffer.appends_only = True
        buffer.pending = True
        buffer.mtime_ns = inode.node.mtime_ns
        inode.kernel_version = inode.node.version
        handle = Handle(inode, flags)
        handle.created = True
        self.table.open(handle)
        return Opened(handle, keep_cache=True)

    # -- Read --------------------------------------------------------------------------------------

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """pread(2). Raises NotFound where nothing of the file is left anywhere."""
        inode = handle.inode
        content = await self.current(inode, handle)
        return content[offset : offset + size]

    async def current(self, inode: Inode, handle: Handle | None = None) -> bytes:
        """What the session reads now: its own buffer, else the newest version, else what an orphan was."""
        buffer = inode.buffer
        if buffer is not None and buffer.uncommitted:
            if buffer.whole:
                return bytes(buffer.data)
            return await self._base(inode, handle) + bytes(buffer.data)
        return await self._base(inode, handle)

    async def _base(self, inode: Inode, handle: Handle | None) -> bytes:
        node = inode.node
        if not node.committed:
            return inode.pinned or b""
        if not node.gone:
            try:
                version, content = await self.ns.content(node)
            except NotFound:
                if not node.gone:
                    raise
            else:
                if handle is None or handle.readable:
                    self.session.saw(node, version)
                if inode.kernel_version != version and inode.kernel_version is not None:
                    inode.kernel_version = version
                return content
        if inode.pinned is None:
            kept = await self.ns.content_at(node, node.version)
            if kept is None:
                raise StaleVersion("deleted, and its content was not kept", path=node.path)
            inode.pinned = kept
        return inode.pinned

    async def pin(self, inode: Inode) -> None:
        """Keep the content of a file that is about to lose its name while it is open here."""
        if inode.handles and inode.node.kind is Kind.FILE and inode.node.committed and inode.pinned is None:
            inode.pinned = self.ns.contents.get(inode.node.id, inode.node.version)

    # -- Write -------------------------------------------------------------------------------------

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """pwrite(2), or an append for O_APPEND, whose offset from the kernel is stale.

        Raises StaleVersion (the second check), TooLarge, OverQuota; after any of them the handle is
        poisoned and nothing of it is committed.
        """
        if handle.failed is not None:
            handle.check()
        inode = handle.inode
        node = inode.node
        # The one write that an O_APPEND handle makes at its offset: a dirty mmap page, written back.
        page = handle.readable and offset % _PAGE == 0 and offset < handle.size_at_open
        append = handle.append and not page
        buffer = inode.buffer
        try:
            self._check_there(node)
            if not append and not node.gone and node.version != handle.version:
                raise StaleVersion(path=node.path, expected=_shown(handle.version), actual=node.version)
            if append:
                buffer = self._append_buffer(inode)
                start = len(buffer.data) if buffer.whole else node.size + len(buffer.data)
            else:
                if buffer is None or not buffer.whole or (not buffer.uncommitted and buffer.expected != node.version):
                    buffer = await self._whole_buffer(inode, handle)
                start = offset
            end = start + len(data)
            files.check_size(self._limits, node.path, end)
            if not node.gone:
                self.ns.usage.check(node.path, end - node.size)
        except StaleVersion as error:
            await self._lose(inode, handle, error, _with_write(buffer, offset, data))
            raise
        except FsError as error:
            self._fail(inode, handle, "write", error)
            raise
        if append:
            buffer.append(data)
        else:
            buffer.write(offset, data)
            buffer.appends_only = False
        handle.wrote = True
        buffer.mtime_ns = now_ns()
        return len(data)

    def _check_there(self, node: Node) -> None:
        """A file that this session deleted or replaced lives on for its handles, as on a local disk; one
        that others took away does not, since its bytes would be lost without a word. Raises StaleVersion."""
        if node.gone and node.removed_by is not self._view and node.committed:
            raise StaleVersion("deleted or replaced by others while you had it open", path=node.path)

    def _append_buffer(self, inode: Inode) -> Buffer:
        buffer = inode.buffer
        if buffer is None or not (buffer.uncommitted or not buffer.whole):
            node = inode.node
            if node.committed and not node.gone:
                buffer = Buffer(node.version, bytearray(), whole=False)
            else:
                buffer = Buffer(None, bytearray(inode.pinned or b""), whole=True)
            inode.buffer = buffer
        return buffer

    async def _whole_buffer(self, inode: Inode, handle: Handle) -> Buffer:
        """A buffer that holds the whole content at the handle's version, plus what was appended."""
        async with inode.lock:
            node, buffer = inode.node, inode.buffer
            if buffer is not None and buffer.whole and (buffer.uncommitted or buffer.expected == node.version):
                return buffer
            if node.gone or not node.committed:
                base = await self._base(inode, handle)
            else:
                version, base = await self.ns.content(node)
                if version != handle.version:
                    raise StaleVersion(path=node.path, expected=_shown(handle.version), actual=version)
            appended = b"" if buffer is None or buffer.whole else bytes(buffer.data)
            fresh = Buffer(handle.version if node.committed else None, bytearray(base + appended), whole=True)
            if buffer is not None:
                fresh.dirty, fresh.attrs = buffer.dirty, buffer.attrs
            inode.buffer = fresh
            return fresh

    async def truncate(self, inode: Inode, size: int, handle: Handle | None) -> None:
        """ftruncate(2) through a handle, or truncate(2), which commits at once: nothing closes it."""
        node = inode.node
        if handle is not None:
            handle.check()
        else:
            paths.check(self.session.scope, Op.WRITE, node.path)
        files.check_size(self._limits, node.path, size)
        buffer = inode.buffer
        if handle is None and not (buffer is not None and buffer.uncommitted):
            await self.ns.barrier()
            if node.gone:
                raise StaleVersion("deleted or replaced", path=node.path)
            self.session.check_replace(node)
        by = handle or Handle(inode, os.O_RDWR)
        try:
            self._check_there(node)
            if handle is not None and not node.gone:
                if node.version != handle.version:
                    raise StaleVersion(path=node.path, expected=_shown(handle.version), actual=node.version)
                if not (buffer is not None and buffer.uncommitted):
                    # sort -o and others open without O_TRUNC and truncate then.
                    self.session.check_replace(node)
            if size == 0 and (buffer is None or not buffer.uncommitted):
                buffer = inode.buffer = Buffer(by.version if node.committed else None, bytearray(), whole=True)
            else:
                buffer = await self._whole_buffer(inode, by)
        except StaleVersion as error:
            if handle is not None:
                await self._lose(inode, handle, error, None)
            raise
        if not node.gone:
            self.ns.usage.check(node.path, size - node.size)
        if size != len(buffer.data) or not buffer.uncommitted:
            buffer.truncate(size)
        buffer.appends_only = False
        buffer.dirty = True
        buffer.mtime_ns = now_ns()
        by.wrote = True
        if handle is None:
            await self.commit(inode, by)

    # -- Commit ------------------------------------------------------------------------------------

    async def flush(self, handle: Handle) -> None:
        """close(2) of one descriptor. bash flushes before its first write, so a create or a truncation
        with nothing written commits at the second flush only. Raises StaleVersion (the third check); a limit
        that a write met was told by that write."""
        if isinstance(handle.failed, StaleVersion):
            handle.check()
        elif handle.failed is not None:
            return
        buffer = handle.inode.buffer
        if buffer is None or not handle.writable:
            return
        if buffer.dirty or buffer.committing is not None:
            await self.commit(handle.inode, handle)
        elif buffer.pending:
            buffer.flushes += 1
            if buffer.flushes > 1:
                await self.commit(handle.inode, handle)

    async def fsync(self, handle: Handle) -> None:
        """fsync(2): commits whatever is not committed."""
        handle.check()
        if handle.inode.buffer is not None and handle.inode.buffer.uncommitted:
            await self.commit(handle.inode, handle)

    async def release(self, handle: Handle) -> None:
        """The last close of an open file. It can tell nobody, so a refusal goes to the conflicts, the
        errors file and a counter."""
        inode = handle.inode
        try:
            buffer = inode.buffer
            if (
                handle.writable
                and buffer is not None
                and buffer.uncommitted
                and (handle.failed is None or not inode.node.committed)
            ):
                await self.commit(inode, handle)
        except StaleVersion:
            pass  # told by _lose
        except FsError as error:
            _log.error(
                "fs.release_failed",
                **self.session.scope.log_context(),
                path=inode.node.path,
                error=type(error).__name__,
                bytes=len(buffer.data) if buffer is not None else 0,
            )
        finally:
            self.table.close(handle)
            if not any(inode.writers) and inode.buffer is not None and not inode.buffer.uncommitted:
                inode.buffer = None
            if not inode.handles:
                inode.pinned = None

    async def commit(self, inode: Inode, handle: Handle) -> None:
        """Write the buffer to Postgres, exactly once, against the version that it was built on.

        Raises StaleVersion after keeping the bytes as a conflict; Unavailable with the buffer as it was.
        """
        async with inode.lock:
            node, buffer = inode.node, inode.buffer
            if buffer is None or not buffer.uncommitted:
                handle.check()
                return
            if node.gone:
                try:
                    self._check_there(node)
                except StaleVersion as error:
                    await self._lose(inode, handle, error, bytes(buffer.data) if buffer.dirty else None)
                    raise
                # As on a local disk, what is written to a file without a name ends with its last handle.
                inode.pinned = bytes(buffer.data) if buffer.whole else (inode.pinned or b"") + bytes(buffer.data)
                buffer.dirty = buffer.pending = False
                if not buffer.whole:
                    inode.buffer = None
                return
            before, size_before = node.version, node.size
            dirty = buffer.dirty
            data = buffer.take()
            try:
                done = await self._store(inode, handle, buffer, data)
            except StaleVersion as error:
                await self._lose(inode, handle, error, data)
                raise
            except TooLarge as error:
                self._fail(inode, handle, "write", error)
                raise
            except FsError:
                buffer.restore(dirty)
                raise
            self._committed(inode, buffer, data, before, size_before, done)

    async def _store(self, inode: Inode, handle: Handle, buffer: Buffer, data: bytes) -> Commit:
        node, scope, ns = inode.node, self.session.scope, self.ns
        mtime_ns = now_ns() if buffer.mtime_ns is None else buffer.mtime_ns
        attrs = Attrs(buffer.attrs.mode, buffer.attrs.uid, buffer.attrs.gid, mtime_ns)
        policy = Op.CREATE if handle.created else Op.WRITE
        if buffer.expected is None:
            return await self._create(inode, handle, buffer, data, attrs)
        if not buffer.whole:
            return await files.append(
                ns.db, scope, self._limits, node.path, node.id, data, attrs=attrs, handle=handle.serial, policy=policy
            )
        return await files.write(
            ns.db,
            scope,
            self._limits,
            node.path,
            node.id,
            buffer.expected,
            data,
            attrs=attrs,
            handle=handle.serial,
            policy=policy,
        )

    async def _create(self, inode: Inode, handle: Handle, buffer: Buffer, data: bytes, attrs: Attrs) -> Commit:
        node, scope, ns = inode.node, self.session.scope, self.ns
        whole = Attrs(
            node.mode if attrs.mode is None else attrs.mode,
            node.uid if attrs.uid is None else attrs.uid,
            node.gid if attrs.gid is None else attrs.gid,
            attrs.mtime_ns,
        )

        async def create() -> Commit:
            revived = self.session.revives(node.path)
            return await files.create(
                ns.db,
                scope,
                self._limits,
                node.path,
                data,
                ino=node.ino,
                node_id=node.id,
                attrs=whole,
                handle=handle.serial,
                revive=revived is not None and revived.id == node.id,
            )

        try:
            done = await create()
        except NotFound:
            # The directory was moved or deleted elsewhere; by the barrier the mirror knows which.
            path = node.path
            await ns.barrier()
            if node.gone or node.path == path:
                raise StaleVersion("its directory was deleted by others", path=path) from None
            done = await create()
        except StaleVersion:
            if not (buffer.appends_only and data and handle.append):
                raise
            # Two sessions began the same log: both appends survive.
            row = await files.stat(ns.db, scope, node.path)
            done = await files.append(
                ns.db, scope, self._limits, node.path, row.id, data, attrs=Attrs(mtime_ns=attrs.mtime_ns),
                handle=handle.serial,
            )  # fmt: skip
            ns.tree.rekey(node, row.id)
            inode.kernel_version = None
        self.session.occupied(node.path)
        return done

    def _committed(
        self, inode: Inode, buffer: Buffer, data: bytes, before: int, size_before: int, done: Commit
    ) -> None:
        """Take a commit into the mirror, unless an announcement was faster."""
        node, ns, session = inode.node, self.ns, self.session
        buffer.settle()
        created = before == UNCOMMITTED
        if buffer.whole:
            ns.contents.put(done.id, done.version, data)
            grown = done.size - (0 if created else size_before)
            continuous = True
        else:
            grown = len(data)
            continuous = done.version == before + 1 and done.size == size_before + len(data)
        ns.usage.add(1 if created else 0, grown)
        if inode.kernel_version is not None:
            if continuous and inode.kernel_version == before:
                inode.kernel_version = done.version
            elif not continuous:
                inode.kernel_version = None
                ns.kernel.invalidate_inode(inode.kino)
        stored = buffer.attrs
        node.mode = node.mode if stored.mode is None else stored.mode
        node.uid = node.uid if stored.uid is None else stored.uid
        node.gid = node.gid if stored.gid is None else stored.gid
        if not buffer.uncommitted:
            buffer.attrs = Attrs()
        buffer.expected = done.version
        for handle in inode.handles:
            if handle.version == before:
                handle.version = done.version
        session.saw(node, done.version)
        node.owner = None
        if done.version > node.version or (done.version == node.version and done.ctime_ns >= node.ctime_ns):
            node.version, node.size = done.version, done.size
            node.mtime_ns, node.ctime_ns = done.mtime_ns, done.ctime_ns
            node.session = session.scope.session
        if created:
            if node.parent is not None:
                ns.directory_changed(node.parent)
                ns.name_appeared(node.parent, node.name, by=self._view)
        else:
            ns.content_changed(node, by=self._view)

    # -- Refusals ----------------------------------------------------------------------------------

    def _fail(self, inode: Inode, handle: Handle, op: str, error: FsError) -> None:
        """A limit was met: nothing of the buffer is committed, the old content stays."""
        handle.failed = error
        self._drop(inode)
        self.session.refuse(op, inode.node.path, error)

    async def _lose(self, inode: Inode, handle: Handle, error: StaleVersion, data: bytes | None) -> None:
        """A race was lost: keep the bytes, tell the session, poison the handles that wrote."""
        node = inode.node
        path = node.path
        buffer = inode.buffer
        handle.failed = error
        for other in inode.handles:
            if other.wrote:
                other.failed = error
        expected = error.expected if buffer is None else buffer.expected
        self._drop(inode)
        telemetry.counters.conflicts += 1
        self.session.refuse("write", path, error)
        if data is not None:
            await files.record_conflict(
                self.ns.db,
                self.session.scope,
                path,
                node_id=node.id if node.committed else None,
                expected=expected if expected != UNCOMMITTED else None,
                actual=error.actual,
                op="append" if buffer is not None and not buffer.whole else "write",
                content=data,
            )
        if not node.committed:
            await self.lost_name(node)

    def _drop(self, inode: Inode) -> None:
        """Forget the buffer, and the kernel's pages, which hold its bytes."""
        node = inode.node
        inode.buffer = None
        if not node.committed and not node.gone:
            # Its name is still to be made, as an empty file.
            inode.buffer = Buffer(None, bytearray(), whole=True)
            inode.buffer.pending = True
        inode.kernel_version = None
        self.ns.kernel.invalidate_inode(inode.kino)


def _shown(version: int) -> int | None:
    return None if version == UNCOMMITTED else version


def _with_write(buffer: Buffer | None, offset: int, data: bytes) -> bytes:
    """What the writer wanted, for the conflict: its buffer with the refused write in it."""
    if buffer is None:
        return data
    if not buffer.whole:
        return bytes(buffer.data) + data
    wanted = Buffer(None, bytearray(buffer.data), whole=True)
    wanted.write(offset, data)
    return bytes(wanted.data)
