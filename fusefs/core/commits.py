"""Commits: how a buffer becomes a row, and what a lost race leaves behind.

Decided here and only here (docs/internals/concurrency.md): what a commit expects of the row that it
meets, how it is taken into the mirror, and that the bytes of a refused write are kept once and told once.

Threading: one trio thread. A commit holds the inode's lock; what is written meanwhile makes the buffer
dirty again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from fusefs import telemetry
from fusefs.core.attributes import now_ns
from fusefs.core.buffers import Buffer, Taken
from fusefs.core.filesystem import Filesystem, Handle, Inode
from fusefs.core.namespace import Namespace
from fusefs.core.session import Session
from fusefs.core.tree import SUPERSEDED, UNCOMMITTED, Node
from fusefs.db.group_commit import Attempt
from fusefs.rules.errors import FsError, NotFound, OverQuota, RescueFailed, StaleVersion, TooLarge
from fusefs.rules.model import CLAIMED, NO_ATTRS, Attrs, Commit, NodeRow
from fusefs.rules.paths import Op
from fusefs.store import files
from fusefs.store.rescue import Rescued

_ATTEMPTS = 8
"""To make a file whose directory others move, or whose name they take and leave, meanwhile."""
_log = telemetry.get_logger()


class Commits:
    """Commits the buffers of one session.

    Args:
        view: the session's file system, which owns the inodes.
    """

    def __init__(self, ns: Namespace, session: Session, view: Filesystem) -> None:
        self.ns = ns
        self.session = session
        self._view = view
        # Set by the view: a file that was not committed lost its name, at a path of a directory, to another.
        self.name_lost: Callable[[Node, str], Awaitable[None]]
        self._limits = session.settings.limits

    async def commit(self, inode: Inode, handle: Handle) -> None:
        """Write the buffer to Postgres, exactly once, against the version that it was built on.

        Raises StaleVersion after keeping the bytes as a conflict; Unavailable with the buffer as it was.
        """
        async with inode.lock:
            node, buffer = inode.node, inode.buffer
            if buffer is None or not buffer.uncommitted:
                handle.check()
                return
            await self.settle(inode)
            if not (buffer.dirty or buffer.pending):
                return
            await self.ns.held.store(node)  # set before what is written now
            if node.gone:
                try:
                    self.check_there(node)
                except StaleVersion as error:
                    await self.lose(inode, handle, error, bytes(buffer.data) if buffer.dirty else None)
                    raise
                # As on a local disk, what is written to a file without a name ends with its last handle.
                inode.pinned = bytes(buffer.data) if buffer.whole else (inode.pinned or b"") + bytes(buffer.data)
                buffer.dirty = buffer.pending = False
                if not buffer.whole:
                    inode.buffer = None
                return
            dirty = buffer.dirty
            taken = self._take(node, buffer)
            attempt = files.new_attempt(announced=not self.ns.alone)
            try:
                done = await self._store(inode, handle, buffer, taken, attempt)
            except StaleVersion as error:
                await self.lose(inode, handle, error, taken.data if dirty or buffer.dirty else None)
                raise
            except (TooLarge, OverQuota) as error:
                self.fail(inode, handle, "write", error)
                raise
            except BaseException:
                buffer.restore(dirty)
                if attempt.backend is not None:
                    # Lost on its way, or cancelled: it may have been applied.
                    buffer.unsettled = attempt, taken
                    self.ns.doubt(attempt.backend, [node.parent] if node.parent is not None else [], inode)
                raise
            self._committed(inode, buffer, taken, done)

    async def settle(self, inode: Inode) -> None:
        """Find out what became of a commit that was lost on its way. Under the inode's lock.

        Raises Unsettled, with the buffer as it was, when nobody can tell even now.
        """
        buffer = inode.buffer
        if buffer is None or buffer.unsettled is None:
            return
        attempt, taken = buffer.unsettled
        done = None
        if attempt.backend is not None:
            done = await files.settle(self.ns.db, self.session.scope, attempt, taken.attrs.mtime_ns or 0)
        if done is None:
            buffer.unsettled = None
        else:
            buffer.settle_late(taken)
            self._committed(inode, buffer, taken, done)

    def _take(self, node: Node, buffer: Buffer) -> Taken:
        if buffer.mtime_ns is None:
            buffer.mtime_ns = now_ns()
        return Taken(buffer.take(), buffer.attrs._replace(mtime_ns=buffer.mtime_ns), node.version, node.size)

    async def _store(self, inode: Inode, handle: Handle, buffer: Buffer, taken: Taken, attempt: Attempt) -> Commit:
        node, scope, ns = inode.node, self.session.scope, self.ns
        data, attrs = taken.data, taken.attrs
        policy = Op.CREATE if handle.created else Op.WRITE
        if buffer.expected is None:
            return await self._create(inode, handle, buffer, taken, attempt)
        if buffer.whole and buffer.expected == SUPERSEDED:
            raise StaleVersion(
                "others changed the file and renamed it over another; read it again and retry", path=node.path
            )
        if not buffer.whole:
            return await files.append(
                ns.db,
                scope,
                self._limits,
                node.path,
                node.id,
                data,
                attrs=attrs,
                handle=handle.serial,
                policy=policy,
                attempt=attempt,
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
            attempt=attempt,
        )

    async def _create(self, inode: Inode, handle: Handle, buffer: Buffer, taken: Taken, attempt: Attempt) -> Commit:
        node, scope, ns = inode.node, self.session.scope, self.ns
        data, attrs = taken.data, taken.attrs
        whole = _complete(attrs, node)

        async def create() -> Commit:
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
                revive=node.revived,
                attempt=attempt,
            )

        for _ in range(_ATTEMPTS):
            try:
                done = await create()
                break
            except NotFound:
                # The directory was moved or deleted elsewhere.
                path, parent = node.path, node.parent
                if parent is None or not await ns.follow_move(parent, parent.path) or node.gone:
                    raise StaleVersion("its directory was deleted by others", path=path) from None
            except StaleVersion:
                if not (buffer.appends_only and handle.joins and all(each.joins for each in inode.changers)):
                    raise
                try:
                    row = await files.stat(ns.db, scope, node.path)
                except NotFound:
                    continue  # and took it away again
                done = await self._append_to(row, inode, handle, buffer, taken, attempt)
                break
        else:
            raise StaleVersion("made and taken away by others again and again", path=node.path)
        self.session.occupied(node.path)
        return done

    async def _append_to(
        self, row: NodeRow, inode: Inode, handle: Handle, buffer: Buffer, taken: Taken, attempt: Attempt
    ) -> Commit:
        """Two sessions began the same log: both appends survive, and this file is the other's."""
        node, data = inode.node, taken.data
        if node.gone:
            buffer.become_append(row.version)
        else:
            self.ns.become(node, row)
        if not data:
            return Commit(row.id, row.version, row.size, row.mtime_ns, row.ctime_ns)
        return await files.append(
            self.ns.db,
            self.session.scope,
            self._limits,
            row.path,
            row.id,
            data,
            attrs=Attrs(mtime_ns=taken.attrs.mtime_ns),
            handle=handle.serial,
            attempt=attempt,
        )

    def _committed(self, inode: Inode, buffer: Buffer, taken: Taken, done: Commit) -> None:
        """Take a commit into the mirror, unless an announcement was faster."""
        node, ns, session = inode.node, self.ns, self.session
        data, before, size_before = taken.data, taken.version, taken.size
        if before == UNCOMMITTED and not buffer.whole:
            # The file became another's, and this an append to it.
            before, size_before = done.version - bool(data), done.size - len(data)
        buffer_was_whole = buffer.whole
        buffer.settle()
        created = before == UNCOMMITTED and buffer.whole
        if buffer.whole:
            ns.contents.put(done.id, done.version, data)
            grown = done.size - (0 if created else size_before)
            continuous = True
        else:
            grown = len(data)
            continuous = done.version == before + 1 and done.size == size_before + len(data)
        ns.usage.add(1 if created else 0, grown)
        if done.id != node.id and not node.gone:
            # Others renamed the file over another while we asked. Their announcement was faster and brought what is
            # there now; our version was one of the lineage that went.
            if buffer.expected is not None:
                buffer.expected = SUPERSEDED
            ns.kernel_unsure(inode)
            return
        if not continuous or inode.told != before:
            ns.kernel_unsure(inode)
        else:
            inode.told = done.version
            if inode.kernel_version == before:
                inode.kernel_version = done.version
        node.take_attrs(buffer.attrs)
        if buffer.whole and buffer.appends_only and any(handle.append for handle in inode.changers):
            # What follows is appended to whatever others append meanwhile.
            buffer.continue_appending(len(data))
        if not buffer.uncommitted:
            buffer.attrs = NO_ATTRS
        buffer.expected = done.version
        for handle in inode.handles:
            if handle.version == before:
                handle.version = done.version
        if buffer_was_whole:
            session.saw(node, done.version)
        elif data:
            session.appended(node, done.version)
        node.owner = None
        live = ns.tree.by_id.get(done.id)
        if live is not None and live is not node and live.version < done.version:
            # Others renamed a file over this one while we asked: what we appended is in theirs.
            live.version, live.size = done.version, done.size
            live.mtime_ns, live.ctime_ns, live.changed_ns = done.mtime_ns, done.ctime_ns, done.ctime_ns
            ns.content_changed(live)
            return
        if ns.tree.accepts(node, done.version, done.ctime_ns):
            node.era = ns.tree.era
            node.version, node.size = done.version, done.size
            node.mtime_ns, node.ctime_ns, node.changed_ns = done.mtime_ns, done.ctime_ns, done.ctime_ns
            node.session = session.scope.session
            node.show_held()
        if created:
            if node.parent is not None:
                ns.tree.touch(node)
                ns.store_time_of(node.parent)
                ns.name_appeared(node.parent, node.name, by=self._view)
        else:
            ns.content_changed(node, by=self._view)

    # -- Refusals ----------------------------------------------------------------------------------

    def check_there(self, node: Node) -> None:
        """A file that this session deleted or replaced lives on for its handles, as on a local disk; one
        that others took away does not, since its bytes would be lost without a word. Raises StaleVersion."""
        if node.gone and node.removed_by is not self._view:
            raise StaleVersion("deleted or replaced by others while you had it open", path=node.path)

    def fail(self, inode: Inode, handle: Handle, op: str, error: FsError) -> None:
        """A limit was met: nothing of the buffer is committed, the old content stays. Every handle that wrote
        into it is told, at its next write or its close."""
        handle.failed = error
        for other in inode.handles:
            if other is not handle and other.wrote and other.failed is None:
                other.failed, other.untold = error, True
        self._drop(inode)
        self.session.refuse(op, inode.node.path, error)

    async def lose(self, inode: Inode, handle: Handle, error: StaleVersion, data: bytes | None) -> None:
        """A race was lost: keep the bytes, tell the session, poison the handles that wrote.

        Args:
            data: what is kept as a conflict; None: nothing was written.
        """
        node, buffer = inode.node, inode.buffer
        path = node.path
        handle.failed = error
        handle.kept = data is not None
        for other in inode.handles:
            if other.wrote:
                other.failed = error
                other.kept = data is not None
            elif other.changes and other.failed is None and buffer is not None and buffer.pending:
                other.failed = error  # its truncation goes with the buffer, and nothing may be written without it
        telemetry.counters.conflicts += 1
        if data is not None and buffer is not None and buffer.whole and len(buffer.data) > len(data):
            data = bytes(buffer.data)  # with what was written while the commit was refused
        # Before anything is awaited: what is written from now on is not part of what was lost.
        lost_from = node.parent if not node.committed else None
        if lost_from is not None:
            self.ns.lose_uncommitted(node)
        self._drop(inode)
        try:
            if data is not None:
                await self._keep(node, path, handle, error, data)
        finally:
            self.session.refuse("write", path, error)
        if lost_from is not None:
            await self.name_lost(lost_from, path)

    async def keep_first(self, handle: Handle, data: bytes) -> None:
        """Keep the first bytes that are written to a handle which was refused before it wrote any."""
        error = handle.failed
        if isinstance(error, StaleVersion) and not handle.kept:
            handle.kept = True
            node = handle.inode.node
            await self._keep(node, node.path, handle, error, data)

    async def _keep(self, node: Node, path: str, handle: Handle, error: StaleVersion, data: bytes) -> None:
        """Store the bytes of a lost race as a conflict; where Postgres does not take them, in the rescue
        directory, a cancellation included."""
        node_id = node.id if node.committed else None
        try:
            with trio.fail_after(self.session.settings.write_timeout_s):
                conflict_id = await files.record_conflict(
                    self.ns.db,
                    self.session.scope,
                    path,
                    node_id=node_id,
                    expected=error.expected,
                    actual=error.actual,
                    op="append" if handle.append else "write",
                    content=data,
                )
        except BaseException as failure:
            rescued = Rescued(path, node_id, error.expected, attrs=_complete(Attrs(mtime_ns=now_ns()), node))
            error.given_hint += f" {await self._rescue(rescued, data, type(failure).__name__)}"
            if not isinstance(failure, FsError | trio.TooSlowError):
                raise
        else:
            error.given_hint += f" What you wrote is kept: .fusefs/conflicts/{conflict_id[:8]}-…"

    async def give_up(self, inode: Inode, handle: Handle | None, error: FsError) -> None:
        """Postgres did not take the buffer, and nobody will try again: its bytes go to the rescue directory, and
        the file is what Postgres has.

        Args:
            handle: the last one that could write, which is being closed; None at the end of the mount.
        """
        async with inode.lock:
            node, buffer = inode.node, inode.buffer
            if buffer is None or not buffer.uncommitted:
                return
            if handle is not None and any(other is not handle for other in inode.changers):
                return  # opened meanwhile: its close tries again
            path = node.path
            attrs = buffer.attrs._replace(mtime_ns=now_ns() if buffer.mtime_ns is None else buffer.mtime_ns)
            attempt, taken = buffer.unsettled or (None, None)
            backend = None if attempt is None else attempt.backend
            rescued = Rescued(
                path,
                node.id if node.committed else None,
                buffer.expected if buffer.whole else None,
                append=not buffer.whole or (buffer.appends_only and any(each.append for each in inode.changers)),
                created=handle is not None and handle.created,
                write_id=None if attempt is None else attempt.write_id,
                backend=None if backend is None else (backend.pid, backend.started_us),
                taken=0 if taken is None else len(taken.data),
                attrs=attrs if node.committed and node.version != CLAIMED else _complete(attrs, node),
            )
            # Before anything is awaited: what is written from now on finds the file as Postgres has it.
            data = bytes(buffer.data)
            if not node.committed and not node.gone:
                self.ns.lose_uncommitted(node)
            self._drop(inode)
        error.given_hint = await self._rescue(rescued, data, type(error).__name__)
        self.session.refuse("close", path, error)

    async def _rescue(self, rescued: Rescued, data: bytes, reason: str) -> str:
        """Keep bytes on the local disk. Returns a sentence that says where, or that they are lost."""
        known = {**self.session.scope.log_context(), "path": rescued.path, "bytes": len(data), "error": reason}
        self.ns.not_taken += 1
        try:
            with trio.CancelScope(shield=True):
                kept = await trio.to_thread.run_sync(self.ns.rescue.keep, self.session.scope, rescued, data, reason)
        except RescueFailed as failure:
            _log.error("fs.write_lost", **known, reason=failure.message)
            return f"What was written is lost: {failure.message}."
        telemetry.counters.rescued += 1
        _log.warning("fs.write_rescued", **known, id=kept)
        return f"What was written is kept on this machine: fusefs rescue put {kept}"

    def _drop(self, inode: Inode) -> None:
        """Forget the buffer, and the kernel's pages, which hold its bytes."""
        node = inode.node
        inode.buffer = None
        if not node.committed and not node.gone:
            # Its name is still to be made, as an empty file.
            inode.buffer = Buffer(None, bytearray(), whole=True)
            inode.buffer.pending = True
        self.ns.kernel_unsure(inode)


def _complete(attrs: Attrs, node: Node) -> Attrs:
    """Attributes with which a file can be made: what is not given is the node's."""
    return Attrs(node.mode, node.uid, node.gid).then(attrs)
