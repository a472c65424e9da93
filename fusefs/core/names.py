"""Names in a session's directories: making them, taking them away, moving them.

Decided here and only here: what each such operation expects of Postgres, what it does to the mirror and
the kernel's caches after Postgres agreed, and how a change that met a moved or vanished directory is
tried again.

Threading: one trio thread. The kernel holds the directory's lock over each change to a name, so two
changes of one name in one session do not overlap; other sessions' do.
"""

from __future__ import annotations

import os
import stat as stat_bits
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TypeVar

from fusefs.core.attributes import Caller, now_ns
from fusefs.core.filesystem import Filesystem, Inode, InodeTable, Opened
from fusefs.core.io import FileIo
from fusefs.core.namespace import Namespace
from fusefs.core.session import Session
from fusefs.core.tree import Node
from fusefs.db.pool import Unsettled
from fusefs.rules import paths
from fusefs.rules.errors import (
    Exists,
    FsError,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    StaleVersion,
)
from fusefs.rules.model import Attrs, Kind, NodeRow, Renamed
from fusefs.rules.paths import Op
from fusefs.store import files

_ATTEMPTS = 8

T = TypeVar("T")


class Names:
    """Changes to the names that one session sees.

    Args:
        view: the session's file system, which owns the inodes.
        child: the visible node at a name of a directory.
    """

    def __init__(
        self,
        view: Filesystem,
        table: InodeTable,
        ns: Namespace,
        session: Session,
        io: FileIo,
        child: Callable[[Inode, str], Awaitable[Node | None]],
    ) -> None:
        self._view = view
        self.table = table
        self.ns = ns
        self.session = session
        self.scope = session.scope
        self.settings = session.settings
        self.io = io
        self._child = child
        self._limits = session.settings.limits

    # -- New names ---------------------------------------------------------------------------------

    async def create(self, parent: Inode, name: str, mode: int, flags: int, caller: Caller) -> tuple[Inode, Opened]:
        """open(2) with O_CREAT of a name that the kernel does not know. With O_EXCL the name is claimed
        in Postgres before the answer, unless this is the only mount (`Namespace.claims_late`); without, the file is
        this mount's alone until its first commit."""
        claims = bool(flags & os.O_EXCL)
        begun = self.ns.begin_barrier() if claims and self.ns.claims_late else None
        path = self._new_path(parent, name)
        try:
            await self._settle_foreign(parent.node, name)
            node = await self._child(parent, name)
            ino = await self.ns.inos.next()
            new = self._new_file(parent.node, name, ino, path, mode, caller)  # while the barrier is on its way
            # What others made there would be found at the commit only, and a shell does not look at its answer; and
            # who gets a lock file reads what its last holder wrote.
            if node is None and begun is not None:
                await self.ns.end_barrier(begun)
                node = await self._child(parent, name)
            elif node is None and not claims and self.ns.vanished_just_now(path):
                await self.ns.barrier()
                node = await self._child(parent, name)
            if node is not None:
                if claims:
                    raise _look_again(path)
                return await self._open(node, flags)
            paths.check(self.scope, Op.CREATE, path)
            expected: int | None = None
            if claims and (begun is None or not self.ns.claims_late):  # a mount may have come since the last wait
                new, expected = await self._claim(parent, name, ino, Kind.FILE, mode, caller)
            else:
                self.ns.tree.add(new, parent.node, name)
                parent.node.entries_changed(now_ns())
        except FsError as error:
            self._refused("create", error, path, parent.node)
            raise
        inode = self.table.obtain(self._view, new)
        return inode, self.io.opened_new(inode, flags, expected)

    async def _open(self, node: Node, flags: int) -> tuple[Inode, Opened]:
        """Open a node that others made meanwhile. The kernel may not know its inode yet: it is held until the
        handle holds it."""
        inode = self.table.obtain(self._view, node)
        inode.lookups += 1
        try:
            return inode, await self.io.open(inode, flags)
        finally:
            self.table.forget(inode.kino, 1)

    async def _settle_foreign(self, directory: Node, name: str) -> None:
        """Another session of this daemon has an uncommitted file at the name: it is committed first, so
        that both meet in Postgres like sessions of different daemons."""
        node = directory.children.get(name)
        if node is None or node.committed:
            return
        for inode in self.ns.inodes_of(node):
            if inode.owner is not self._view:
                await inode.owner.commit(inode)

    def _new_file(self, directory: Node, name: str, ino: int, path: str, mode: int, caller: Caller) -> Node:
        """A node that no row has yet, and no directory."""
        revived = self.session.revives(path)
        node = Node(files.new_id() if revived is None else revived.id, Kind.FILE, ino, name, None)
        node.mode = stat_bits.S_IMODE(mode)
        node.uid, node.gid = self._owner_ids(directory, caller)
        node.mtime_ns = node.ctime_ns = now_ns()
        node.owner = self._view
        node.revived = revived is not None
        node.session = self.scope.session
        return node

    async def _claim(
        self, parent: Inode, name: str, ino: int, kind: Kind, mode: int, caller: Caller
    ) -> tuple[Node, int]:
        path = self._new_path(parent, name)
        revived = self.session.revives(path) if kind is Kind.FILE else None
        uid, gid = self._owner_ids(parent.node, caller)
        if kind is Kind.DIR and parent.node.mode & stat_bits.S_ISGID:
            mode |= stat_bits.S_ISGID
        attrs = Attrs(stat_bits.S_IMODE(mode), uid, gid, now_ns())

        heard = self.ns.live or kind is not Kind.FILE

        async def claim() -> NodeRow:
            at = self._new_path(parent, name)
            return await files.claim(
                self.ns.db,
                self.scope,
                self._limits,
                at,
                kind,
                ino=ino,
                attrs=attrs,
                revive=None if revived is None else revived.id,
                heard=heard,
            )

        async with nullcontext() if heard else self.ns.claiming_unheard:
            return await self._make(parent.node, name, path, claim)

    async def _make(
        self, directory: Node, name: str, path: str, make: Callable[[], Awaitable[NodeRow]]
    ) -> tuple[Node, int]:
        """Make a row at a name, and take it into the mirror. Whoever wins the name reads what its last holder
        wrote: it may be a lock (the only mount knows what its own processes wrote). Also returns the version that was
        made: others may have written to it by now."""
        try:
            row = await self._in_directory(directory, make)
        except Exists:
            await self._winner(directory, name, path)
            raise _look_again(path) from None
        if not self.ns.alone:
            await self.ns.barrier()
        node = self.ns.take_row(row, directory, name)
        if node is None:
            raise StaleVersion("deleted by others at once", path=path)
        if node.kind is Kind.DIR and self.ns.live:
            self.ns.tree.trust(node)
        self.session.occupied(path)
        self.ns.usage.add(1, row.size)
        self.ns.directory_changed(directory)
        self.ns.name_appeared(directory, name, by=self._view)
        return node, row.version

    async def _winner(self, directory: Node, name: str, path: str) -> None:
        """Find out who made a name first. No barrier finds that out for sure: a row is visible before its announcement
        is sent."""
        with suppress(NotFound):  # it may be gone already
            self.ns.take_row(await files.stat(self.ns.db, self.scope, path), directory, name)
        # Its removal may have been announced while it was asked for, before the mirror knew it.
        self.ns.tree.distrust(directory)

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        path = self._new_path(parent, name)
        try:
            await self._settle_foreign(parent.node, name)
            if await self._child(parent, name) is not None:
                raise _look_again(path)
            ino = await self.ns.inos.next()
            node, _ = await self._claim(parent, name, ino, Kind.DIR, mode, caller)
        except FsError as error:
            self._refused("mkdir", error, path, parent.node)
            raise
        return self.table.obtain(self._view, node)

    async def mknod(self, parent: Inode, name: str, kind: Kind, mode: int, caller: Caller) -> Inode:
        return await self._special(parent, name, kind, mode, b"", caller)

    async def symlink(self, parent: Inode, name: str, target: bytes, caller: Caller) -> Inode:
        return await self._special(parent, name, Kind.SYMLINK, 0o777, target, caller)

    async def _special(self, parent: Inode, name: str, kind: Kind, mode: int, content: bytes, caller: Caller) -> Inode:
        """A node that is whole at once: a symlink, FIFO, socket, or mknod's regular file."""
        path = self._new_path(parent, name)
        try:
            await self._settle_foreign(parent.node, name)
            if await self._child(parent, name) is not None:
                raise _look_again(path)
            ino = await self.ns.inos.next()
            uid, gid = self._owner_ids(parent.node, caller)
            attrs = Attrs(stat_bits.S_IMODE(mode), uid, gid, now_ns())
            node_id = files.new_id()

            async def create() -> NodeRow:
                at = self._new_path(parent, name)
                try:
                    done = await files.create(
                        self.ns.db, self.scope, self._limits, at, content,
                        ino=ino, node_id=node_id, kind=kind, attrs=attrs,
                    )  # fmt: skip
                except StaleVersion:
                    raise Exists(path=at) from None
                self.ns.contents.put(done.id, done.version, content)
                return NodeRow(
                    done.id, at, kind, ino, done.version, done.size, attrs.mode or 0, uid, gid,
                    done.mtime_ns, done.ctime_ns, self.scope.session,
                )  # fmt: skip

            node, _ = await self._make(parent.node, name, path, create)
        except FsError as error:
            self._refused("create", error, path, parent.node)
            raise
        return self.table.obtain(self._view, node)

    # -- Names that go or move ---------------------------------------------------------------------

    async def unlink(self, parent: Inode, name: str) -> None:
        """unlink(2). Always allowed: the content stays in the history."""
        await self._remove(parent, name, directory=False)

    async def rmdir(self, parent: Inode, name: str) -> None:
        await self._remove(parent, name, directory=True)

    async def _remove(self, parent: Inode, name: str, *, directory: bool) -> None:
        path = paths.join(parent.node.path, name)
        try:
            paths.check(self.scope, Op.DELETE, path)
            node = await self._child(parent, name)
            if node is None:
                raise NotFound(path=path)
            if directory and node.kind is not Kind.DIR:
                raise NotADirectory(path=path)
            if not directory and node.kind is Kind.DIR:
                raise IsADirectory(path=path)
            await self._remove_node(parent.node, name, path, node)
        except FsError as error:
            self._refused("rmdir" if directory else "unlink", error, path, parent.node)
            raise

    async def _remove_node(self, directory: Node, name: str, path: str, node: Node) -> None:
        if any(not child.committed for child in node.children.values()):
            raise NotEmpty(path=path)
        inode = self.table.known(self._view, node.ino)
        if inode is None:
            await self._take_away(directory, name, path, node)
            return
        # A commit under way ends first; one that waits finds an orphan.
        async with inode.lock:
            await self.io.commits.settle(inode)
            await self.io.pin(inode)
            await self._take_away(directory, name, path, node)

    async def _take_away(self, directory: Node, name: str, path: str, node: Node) -> None:
        version = await self._delete_row(directory, name, path, node) if node.committed else None
        if version is None and node.gone:
            return
        node.removed_by = self._view
        if version is not None:
            self.ns.usage.add(-1, -node.size)
            if node.version > 0 and node.kind is Kind.FILE:
                self.session.vacate(path, node.id, version)
            else:
                self.session.left(path)
            replaced = self.ns.tree.by_id.get(node.id)
            if replaced is not None and replaced is not node:
                # Others renamed a file over it while we asked: the lineage that went is that file's by now.
                replaced.removed_by = self._view
                self.ns.tree.detach(replaced, version)
                self.ns.name_gone(directory, name, replaced)
        if not node.gone:
            self.ns.tree.detach(node, version)
        self.ns.directory_changed(directory)
        self.ns.name_gone(directory, name, node, by=self._view)
        self.ns.attrs_changed(node, by=self._view)

    async def _delete_row(self, directory: Node, name: str, path: str, node: Node) -> int | None:
        """Delete the row. Where others replaced it since we looked, what has the name now is deleted, and
        None returned; where they moved it, it stays: nobody named it there."""
        try:
            async with self._still(node):
                return await files.delete(self.ns.db, self.scope, path, node.id)
        except NotFound:
            await self.ns.barrier()
            now = directory.children.get(name)
            if now is node and not node.gone and node.path != path:
                # Others moved the directory.
                return await self._delete_row(directory, name, node.path, node)
            if now is not None and not now.committed and now.owner is not self._view:
                now = None  # another session of this daemon is making it
            if now is None or now is node:
                if now is node:
                    self.ns.tree.detach(node)
                raise
            await self._remove_node(directory, name, path, now)
            return None

    async def rename(self, parent: Inode, name: str, new_parent: Inode, new_name: str, mode: str) -> None:
        """rename(2). Over a file it is checked like a write of that file (the first check)."""
        source_path = paths.join(parent.node.path, name)
        path = self._new_path(new_parent, new_name)
        try:
            for each in (source_path, path):
                paths.check(self.scope, Op.RENAME, each)
            source = await self._child(parent, name)
            if source is None:
                raise NotFound(path=source_path)
            await self._commit_uncommitted(source)
            await self._settle_foreign(new_parent.node, new_name)
            for _ in range(_ATTEMPTS):
                target = await self._child(new_parent, new_name)
                if target is source:
                    if (parent, name) != (new_parent, new_name):
                        raise NotFound(path=source_path)  # others moved it there just now
                    return
                if target is not None and mode == "exchange":
                    await self._commit_uncommitted(target)
                try:
                    await self._rename(parent.node, name, source, new_parent.node, new_name, target, mode)
                    return
                except Exists:
                    if mode != "":
                        raise
                # Others made a file there since this session looked: it is loaded, and checked before it is replaced.
                await self.ns.barrier()
                self.ns.tree.distrust(new_parent.node)
            raise StaleVersion("replaced by others again and again", path=path)
        except FsError as error:
            self._refused("rename", error, path, parent.node, new_parent.node)
            raise

    async def _commit_uncommitted(self, node: Node) -> None:
        """Unflushed bytes of the source are committed before it moves (the rename publishes them)."""
        for inode in self.ns.inodes_of(node):
            if inode.owner is self._view or not node.committed:
                await inode.owner.commit(inode)

    async def _rename(
        self,
        directory: Node,
        name: str,
        source: Node,
        new_directory: Node,
        new_name: str,
        target: Node | None,
        mode: str,
    ) -> None:
        expected: int | None = None
        if target is not None and mode == "":
            for inode in self.ns.inodes_of(target):
                await inode.owner.settle(inode)
                await self.io.pin(inode)
            if any(not child.committed for child in target.children.values()):
                raise NotEmpty(path=target.path)
            if not target.committed:
                # It was never anywhere but here.
                target.removed_by = self._view
                self.ns.tree.detach(target)
                target = None
            elif target.kind is not Kind.DIR and source.kind is not Kind.DIR:
                await self.io.remember(source)
                await self.io.remember(target)
                self.session.check_replace(target)
                expected = self.session.expects(target)
        tries = 0
        while True:
            if source.parent is not directory or source.name != name:
                raise NotFound(path=source.path)  # others moved it just now, and nobody named it where it is
            old_path = source.path
            try:
                await self._move(directory, source, new_directory, new_name, target, expected, mode)
                break
            except NotFound:
                tries += 1
                before = old_path, new_directory.path
                await self.ns.barrier()
                moved = source.gone or source.parent is not directory or source.name != name
                if tries > 1 or moved or new_directory.gone or before == (source.path, new_directory.path):
                    raise
        for each in {directory, new_directory}:
            # Others moved something there before our answer was here: the kernel, which believes in our move from
            # now on, is told what there is.
            await self.ns.load_again(each)

    async def _move(
        self,
        directory: Node,
        source: Node,
        new_directory: Node,
        new_name: str,
        target: Node | None,
        expected: int | None,
        mode: str,
    ) -> None:
        """Move in Postgres, and take it into the mirror.

        A directory's move waits for its turn among the announcements: what others made below the old path is
        still to be found there, and below the new path only afterwards.
        """
        ns, path = self.ns, source.path
        shown = source.version if self.session.may_replace(source) else None

        def take(done: Renamed) -> None:
            self._renamed(directory, source, new_directory, new_name, target, done, mode, shown)

        in_turn = Kind.DIR in (source.kind, None if target is None else target.kind)
        if in_turn:
            ns.moving[path] = take
        try:
            async with self._still(source, target):
                done = await files.rename(
                    ns.db,
                    self.scope,
                    self._limits,
                    (source.id, path),
                    (None if target is None else target.id, paths.join(new_directory.path, new_name)),
                    expected=expected,
                    mode=mode,
                )
            if in_turn:
                await ns.barrier()
        except BaseException:
            ns.moving.pop(path, None)
            raise
        if in_turn and ns.moving.pop(path, None) is None:
            return  # taken in its turn
        if done is not None:
            take(done)
            return
        for each in (directory, new_directory):
            ns.tree.distrust(each)

    def _still(self, *nodes: Node | None) -> AbstractAsyncContextManager[None]:
        """No attributes of these nodes are on their way while a lineage ends or changes hands: they go by lineage."""
        if any(node is not None and node.held is not None for node in nodes):
            return self.ns.held.still()
        return nullcontext()

    def _renamed(
        self,
        directory: Node,
        source: Node,
        new_directory: Node,
        new_name: str,
        target: Node | None,
        done: Renamed,
        mode: str,
        shown: int | None,
    ) -> None:
        """Take a move into the mirror. `shown` is the version of the source that the session could have replaced."""
        ns, old_name, row = self.ns, source.name, done.row
        replaced = target is not None and mode == ""
        self.session.left(source.path)
        if replaced and target is not None:
            target.removed_by = self._view
        ns.apply_rename(source, new_directory, new_name, target, done, exchange=mode == "exchange")
        if replaced and target is not None:
            ns.usage.add(-1, -target.size)
            # Whatever the mirror has learnt since, it is this session's own write; but it has seen what it moved there
            # only if it had seen the source as it was then.
            self.session.saw(row, row.version - (done.moved != shown))
        ns.directory_changed(directory)
        ns.directory_changed(new_directory)
        ns.name_gone(directory, old_name, source, by=self._view)
        if target is not None:
            ns.name_gone(new_directory, new_name, target, by=self._view)
        ns.name_appeared(new_directory, new_name, by=self._view)
        if mode == "exchange":
            ns.name_appeared(directory, old_name, by=self._view)

    def _refused(self, op: str, error: FsError, path: str, *directories: Node) -> None:
        self.session.refuse_change(op, path, error)
        if isinstance(error, Unsettled):
            self.ns.doubt(error.backend, list(directories))

    def _new_path(self, parent: Inode, name: str) -> str:
        paths.check_name(name, self._limits)
        path = paths.join(parent.node.path, name)
        paths.check_path(path, self._limits)
        if parent.node.gone:
            raise NotFound(path=path)
        return path

    async def _in_directory(self, directory: Node, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change in a directory; once more where others moved the directory meanwhile."""
        path = directory.path
        try:
            return await change()
        except NotFound:
            if not await self.ns.follow_move(directory, path):
                raise
            return await change()

    def _owner_ids(self, directory: Node, caller: Caller) -> tuple[int | None, int | None]:
        """Owner of a new node; None, "whoever mounts", where that is who makes it."""
        gid: int | None = None if caller.gid == self.settings.gid else caller.gid
        if directory.mode & stat_bits.S_ISGID:
            gid = directory.gid
        return (None if caller.uid == self.settings.uid else caller.uid), gid

    async def name_lost(self, directory: Node, path: str) -> None:
        """An uncommitted file met another one at its name: the other is shown."""
        try:
            row = await files.stat(self.ns.db, self.scope, path)
        except NotFound:
            return
        except FsError:
            self.ns.tree.distrust(directory)  # asked for at the next look-up
            return
        self.ns.take_row(row, directory, paths.split(path)[1])


def _look_again(path: str) -> StaleVersion:
    """The name exists, but the kernel, which asked to make it, believes that it does not, and cannot be
    told otherwise before it has this answer. After ESTALE it looks the name up again, finds it, and says
    EEXIST itself; after EEXIST it would go on saying that the name is absent."""
    error = StaleVersion("made by others at the same time", path=path)
    error.told = True
    return error
