"""Open, read, write, flush: the content of files.

Decided here and only here (docs/internals/concurrency.md): the first two version checks, when a flush
commits, and what an orphan's handles still read. The commit itself is in `commits.py`.

Threading: one trio thread.
"""

from __future__ import annotations

import os

import trio

from fusefs import telemetry
from fusefs.core.attributes import now_ns
from fusefs.core.buffers import Buffer
from fusefs.core.commits import Commits
from fusefs.core.filesystem import Filesystem, Handle, Inode, InodeTable, Opened
from fusefs.core.namespace import Namespace
from fusefs.core.session import Session
from fusefs.core.tree import SUPERSEDED, UNCOMMITTED, Node
from fusefs.rules import paths
from fusefs.rules.config import Consistency, Durability
from fusefs.rules.errors import FsError, IsADirectory, NotFound, StaleVersion
from fusefs.rules.model import Kind
from fusefs.rules.paths import Op
from fusefs.store import files, versions

_PAGE = 4096
_CALM_S = 1.0
_CALM_TRIES = 3
"""How long, and how often, an open waits until the kernel has dropped what others changed: 50 us as a rule."""
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
        self.commits = Commits(ns, session, view)
        self._limits = session.settings.limits
        self._relaxed = session.settings.durability is Durability.RELAXED
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
        if writing and self.ns.doubtful:
            # Else the check would compare with what was there before a change of our own.
            await self.ns.settle_doubts()
        await self.ns.refresh(node)
        # Also before an append, which is checked against nothing: it must not begin on a file that others removed.
        if (writing or self._strict) and not own and not node.gone:
            await self.ns.barrier()
        if flags & os.O_ACCMODE != os.O_WRONLY and not own:
            await self._calm_down(inode)
        if node.gone and not inode.handles and (writing or not self._is_kept(inode)):
            raise StaleVersion("deleted or replaced", path=node.path)
        if flags & os.O_TRUNC:
            await self.remember(node)
            async with inode.lock:
                await self.commits.settle(inode)
                self._truncate_at_open(inode)
        handle = Handle(inode, flags)
        if inode.buffer is not None and inode.buffer.replaces and inode.buffer.expected is not None:
            handle.version = inode.buffer.expected
        keep = self._keep_cache(inode)
        self._vouch(handle, keep)
        self.table.open(handle)
        return Opened(handle, keep_cache=keep, direct_io=handle.direct)

    def _is_kept(self, inode: Inode) -> bool:
        """Whether a file can still be read that this session deleted or replaced after the kernel had found it by its
        name. The kernel looks a second time after ESTALE, and no third: a name that is replaced all the time must be
        found."""
        node = inode.node
        if inode.pinned is None and node.removed_by is self._view:
            inode.pinned = self.ns.contents.get(node.id, inode.told_version)
        return inode.pinned is not None

    def _vouch(self, handle: Handle, keep: bool) -> None:
        """Note what is known, at an open, of what the kernel knows."""
        inode = handle.inode
        node = inode.node
        own = inode.buffer is not None and inode.buffer.uncommitted
        if handle.readable and inode.calm == inode.voids:
            handle.calm = inode.voids
            if node.committed and not own and (keep or node.size == 0):
                self.session.saw(node, node.version)  # the kernel has it, and need not ask
        # The kernel appends at the size that it knows, without asking. Where that may be an old one, such a handle's
        # write at 0 must not be taken for a page of a mapping that comes back.
        handle.direct = handle.append and handle.readable and not own and inode.told != node.version

    async def _calm_down(self, inode: Inode) -> None:
        """Let the kernel be past what it was told of an inode, so that what a process asks for after its open counts.
        Not where that takes long, or others change the file again and again: then what it reads does not count."""
        for _ in range(_CALM_TRIES):
            self._renew(inode)
            voids = inode.voids
            if inode.calm == voids:
                return
            with trio.move_on_after(_CALM_S) as waiting:
                await self.ns.kernel.passed(inode.kino)
            if waiting.cancelled_caught:
                return
            inode.calm = max(inode.calm, voids)

    def _renew(self, inode: Inode) -> None:
        """Make what the kernel knows of an inode void at once; the open that does so drops the pages. The calls that
        are to do it a moment later are needless then, and would come between the process's question and its answer."""
        if inode.renewed != inode.voids:
            inode.kernel_version = None
        elif inode.told in (None, inode.node.version):
            return
        self.ns.void_now(inode)
        inode.renewed = inode.voids

    async def remember(self, node: Node) -> None:
        """Find out whether a session that goes on after a restart had seen all of its own newest version, before it is
        asked whether it may replace it: an append does not show what was there."""
        session, version = self.session, node.version
        if session.must_remember(node):
            unseen = await versions.has_unseen(self.ns.db, session.scope, node.id, version, session.resumed_ns)
            session.remembered(node, version, seen=not unseen)

    def _keep_cache(self, inode: Inode) -> bool:
        """Whether the kernel's pages are of the version that is served now. keep_cache=False drops the
        pages but not the old size, which would cut reads short (measured): attributes go first."""
        version = inode.node.version
        if inode.buffer is not None and inode.buffer.uncommitted:
            return True
        self._renew(inode)
        if inode.kernel_version == version:
            return True
        inode.kernel_version = version
        return False

    def _truncate_at_open(self, inode: Inode) -> None:
        """Under the inode's lock: a commit under way has taken what it commits, and must not find the buffer
        of another kind when it is done."""
        node = inode.node
        buffer = inode.buffer
        if buffer is None or not buffer.replaces:
            self.session.check_replace(node)
        if buffer is None or not buffer.uncommitted:
            buffer = inode.buffer = Buffer(None if not node.committed else node.version, bytearray(), whole=True)
            inode.told = node.version  # the kernel cuts the file itself
        else:
            buffer.data.clear()
            if not buffer.whole:
                buffer.whole, buffer.appends_only, buffer.expected = True, False, node.version
        buffer.pending = True
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
        handle.created = handle.changes = True
        if expected is not None:
            handle.version = expected
        self.table.open(handle)
        return Opened(handle, keep_cache=True)

    # -- Read --------------------------------------------------------------------------------------

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """pread(2). Raises NotFound where nothing of the file is left anywhere."""
        inode = handle.inode
        buffer = inode.buffer
        if buffer is not None and buffer.whole and buffer.uncommitted:
            return bytes(buffer.data[offset : offset + size])
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
                if handle is not None and not handle.direct and inode.told not in (None, version):
                    version, content = await self._as_told(inode, version, content)
                if handle is None or handle.shows:
                    self.session.saw(node, version)
                else:
                    self.session.glimpsed(node)
                if inode.kernel_version != version and inode.kernel_version is not None:
                    inode.kernel_version = version
                return content
        if node.removed_by is not self._view:
            self.session.glimpsed(node)  # its lineage may go on, and the name be another's
        if inode.pinned is None:
            kept = await self.ns.content_at(node, inode.told_version)
            if kept is None:
                raise StaleVersion("deleted, and its content was not kept", path=node.path)
            inode.pinned = kept
        return inode.pinned

    async def _as_told(self, inode: Inode, version: int, content: bytes) -> tuple[int, bytes]:
        """What a READ gets when others changed the file after the kernel was told its size: the version of that
        size. The kernel would cut a longer one and fill a shorter one with NULs.

        Where the kernel has dropped that size already, it asks for another before it reads for read(2); so this is a
        page of a mapping, for which it does not ask, and which shows what there is now.
        """
        node, told = inode.node, inode.told
        if told is None or told < inode.void_below:
            return version, content
        older = await self.ns.content_at(node, told)
        self.ns.void(inode)
        return (version, content) if older is None else (told, older)

    async def pin(self, inode: Inode) -> None:
        """Keep the content of a file that is about to lose its name while it is open here."""
        if inode.handles and inode.node.kind is Kind.FILE and inode.node.committed and inode.pinned is None:
            inode.pinned = self.ns.contents.get(inode.node.id, inode.told_version)

    # -- Write -------------------------------------------------------------------------------------

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """pwrite(2), or an append for O_APPEND, whose offset from the kernel is stale.

        Raises StaleVersion (the second check), TooLarge, OverQuota; after any of them the handle is
        poisoned and nothing of it is committed.
        """
        if handle.failed is not None:
            await self.commits.keep_first(handle, data)
            handle.check()
        inode = handle.inode
        node = inode.node
        # The one write that an O_APPEND handle makes at its offset: a dirty mmap page, written back.
        page = handle.readable and not handle.direct and offset % _PAGE == 0 and offset < handle.size_at_open
        append = handle.append and not page
        if inode.buffer is not None and inode.buffer.unsettled is not None:
            async with inode.lock:
                await self.commits.settle(inode)
        buffer = inode.buffer
        try:
            self.commits.check_there(node)
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
            if not node.gone and self.ns.usage.is_over(end - node.size):
                await self.ns.ask_quota()
                self.ns.usage.check(node.path, end - node.size)
                return await self.write(handle, offset, data)  # there is room by now; begin anew after the wait
        except StaleVersion as error:
            await self.commits.lose(inode, handle, error, _with_write(buffer, None if append else offset, data))
            raise
        except FsError as error:
            self.commits.fail(inode, handle, "write", error)
            raise
        if append:
            buffer.append(data)
        else:
            buffer.write(offset, data)
            buffer.appends_only = False
        handle.wrote = True
        buffer.touch(now_ns())
        return len(data)

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
            await self.commits.settle(inode)
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
        if not node.gone and self.ns.usage.is_over(size - node.size):
            await self.ns.ask_quota()
            self.ns.usage.check(node.path, size - node.size)
        async with inode.lock:
            await self.commits.settle(inode)
        buffer = inode.buffer
        own = buffer is not None and buffer.replaces
        if not own:
            await self.remember(node)
        if handle is None and not own:
            await self.ns.barrier()
            if node.gone:
                raise StaleVersion("deleted or replaced", path=node.path)
            self.session.check_replace(node)
        by = handle or Handle(inode, os.O_RDWR)
        try:
            self.commits.check_there(node)
            if handle is not None and not node.gone:
                if node.version != handle.version:
                    raise StaleVersion(path=node.path, expected=_shown(handle.version), actual=node.version)
                if not own:
                    # sort -o and others open without O_TRUNC and truncate then.
                    self.session.check_replace(node)
            if size == 0 and (buffer is None or not buffer.uncommitted):
                buffer = inode.buffer = Buffer(by.version if node.committed else None, bytearray(), whole=True)
            else:
                buffer = await self._whole_buffer(inode, by)
        except StaleVersion as error:
            if handle is not None:
                await self.commits.lose(inode, handle, error, None)
            raise
        if size != len(buffer.data) or not buffer.uncommitted:
            buffer.truncate(size)
        buffer.appends_only = False
        buffer.dirty = True
        buffer.touch(now_ns())
        by.wrote = True
        if handle is None:
            try:
                await self.commits.commit(inode, by)
            except FsError:
                if not any(inode.changers):
                    inode.buffer = None  # the call failed, and nobody else wrote: nothing is left to commit
                raise

    # -- Flush -------------------------------------------------------------------------------------

    async def flush(self, handle: Handle) -> None:
        """close(2) of one descriptor. bash flushes before its first write, so a create or a truncation
        with nothing written commits at the second flush only. Raises StaleVersion (the third check); a limit
        that a write met was told by that write."""
        self._tell_failed(handle)
        buffer = handle.inode.buffer
        if handle.failed is not None or buffer is None or not handle.changes:
            return
        if buffer.pending and not (buffer.dirty or buffer.committing is not None):
            handle.flushes += 1
            if handle.flushes == 1 and not (handle.exclusive and not handle.inode.node.committed):
                return  # a lock file is there when its close returns
        elif not buffer.uncommitted:
            return
        await self.commits.commit(handle.inode, handle)
        # Another call committed it, and was refused, while this one waited for its turn.
        self._tell_failed(handle)

    def _tell_failed(self, handle: Handle) -> None:
        if isinstance(handle.failed, StaleVersion) or handle.untold:
            handle.untold = False
            handle.check()

    async def fsync(self, handle: Handle) -> None:
        """fsync(2): commits whatever is not committed, and waits for the server's disk where commits do not."""
        handle.check()
        if handle.inode.buffer is not None and handle.inode.buffer.uncommitted:
            await self.commits.commit(handle.inode, handle)
        await self.ns.held.store(handle.inode.node)
        if self._relaxed:
            await self.ns.db.sync()

    async def release(self, handle: Handle) -> None:
        """The last close of an open file. It can tell nobody, so a refusal goes to the conflicts, the
        errors file and a counter, and what Postgres does not take to the rescue directory."""
        inode = handle.inode
        try:
            buffer = inode.buffer
            if (
                handle.changes
                and buffer is not None
                and buffer.uncommitted
                # Also by a handle that failed, if it is the last: the bytes are another's, whose close failed.
                and (handle.failed is None or not any(other is not handle for other in inode.changers))
            ):
                await self.commits.commit(inode, handle)
        except StaleVersion:
            pass  # told by `Commits.lose`
        except FsError as error:
            await self.commits.give_up(inode, handle, error)
        finally:
            self.table.close(handle)
            if inode.buffer is not None and not inode.buffer.uncommitted and not any(inode.changers):
                inode.buffer = None
            if not inode.handles:
                inode.pinned = None


def _shown(version: int) -> int | None:
    return None if version in (UNCOMMITTED, SUPERSEDED) else version


def _with_write(buffer: Buffer | None, offset: int | None, data: bytes) -> bytes:
    """What the writer wanted, for the conflict: its buffer with the refused write in it; what is appended (offset None)
    with what waits to be committed."""
    if buffer is None:
        return data
    if offset is None or not buffer.whole:
        return bytes(buffer.data if buffer.uncommitted else b"") + data
    wanted = Buffer(None, bytearray(buffer.data), whole=True)
    wanted.write(offset, data)
    return bytes(wanted.data)
