"""One session's view of a namespace: what it sees, and the attributes.

Decided here and only here: which entries a session sees, what their attributes are, and when a change
of attributes is stored. Names that change are in `names.py`, contents in `io.py`.

Threading: one trio thread.
"""

from __future__ import annotations

import os
import stat as stat_bits
from collections.abc import Callable
from typing import TypeVar

from fusefs.core.attributes import Caller, SetAttr, Space, Stat, now_ns
from fusefs.core.filesystem import Filesystem, Handle, Inode, InodeTable, Opened
from fusefs.core.io import FileIo
from fusefs.core.names import Names
from fusefs.core.namespace import Namespace
from fusefs.core.session import Session
from fusefs.core.tree import Node
from fusefs.rules import paths
from fusefs.rules.config import Consistency
from fusefs.rules.errors import (
    BadPath,
    FsError,
    NotADirectory,
    NotFound,
    NotPermitted,
    OverQuota,
    PathTooLong,
    TooLarge,
)
from fusefs.rules.model import Attrs, Kind
from fusefs.rules.paths import Op
from fusefs.store import files, namespaces

T = TypeVar("T")
_UNLIMITED = 1 << 40


class SessionFs(Filesystem):
    """The file system that one session sees.

    Args:
        index: places the session's inodes in the kernel's number space; 0 for a mount of one session.
        on_forgotten: called when the kernel knows nothing of the session any more.
    """

    def __init__(
        self,
        table: InodeTable,
        ns: Namespace,
        session: Session,
        index: int,
        on_forgotten: Callable[[SessionFs], None] | None = None,
    ) -> None:
        super().__init__(table)
        self.index = index
        self.ns = ns
        self.session = session
        self.scope = session.scope
        self.settings = session.settings
        self.io = FileIo(ns, session, table, self)
        self.names = Names(self, table, ns, session, self.io, self._child)
        self.io.commits.name_lost = self.names.name_lost
        self.control_root: Inode | None = None
        self._on_forgotten = on_forgotten
        self._limits = session.settings.limits
        self._strict = session.settings.consistency is Consistency.STRICT
        ns.views.append(self)
        self.root = table.obtain(self, ns.tree.root)
        if index == 0:
            # The kernel never looks up the root of a mount, and never forgets it.
            self.root.lookups = 1

    def forgotten(self, inode: Inode) -> None:
        if inode is self.root and self._on_forgotten is not None:
            self._on_forgotten(self)
        self.ns.tree.drop(inode.node)

    def close(self) -> None:
        """The session's mount has gone."""
        self.ns.views.remove(self)

    # -- Looking -----------------------------------------------------------------------------------

    def stat(self, inode: Inode) -> Stat:
        node, buffer, settings = inode.node, inode.buffer, self.settings
        mode, uid, gid, size, mtime_ns = node.mode, node.uid, node.gid, node.size, node.mtime_ns
        if buffer is not None and buffer.uncommitted:
            size = len(buffer.data) if buffer.whole else size + len(buffer.data)
            mtime_ns = mtime_ns if buffer.mtime_ns is None else buffer.mtime_ns
            attrs = buffer.attrs
            mode = mode if attrs.mode is None else attrs.mode
            uid = uid if attrs.uid is None else attrs.uid
            gid = gid if attrs.gid is None else attrs.gid
        elif node.gone and inode.pinned is not None:
            size = len(inode.pinned)
        timeout_s = 0.0 if self._strict or not self.ns.live else settings.kernel_timeout_s
        return Stat(
            inode.kino,
            inode.generation,
            mode | node.kind.mode_type,
            0 if node.gone else 1,
            settings.uid if uid is None else uid,
            settings.gid if gid is None else gid,
            size,
            mtime_ns,
            max(node.ctime_ns, mtime_ns),
            mtime_ns if node.atime_ns is None else node.atime_ns,
            timeout_s,
            timeout_s,
        )

    async def refresh(self, inode: Inode) -> None:
        if inode.buffer is None or not inode.buffer.replaces:  # else the content that the session has is its own
            await self.ns.refresh(inode.node)

    def _visible(self, node: Node) -> bool:
        """Another session's uncommitted file, and its machine-written ones, do not exist here."""
        if node.owner is not None and node.owner is not self:
            return False
        parent = node.parent
        if parent is None or parent.parent is not self.root.node or "/" + parent.name not in paths.MACHINE_WRITTEN:
            return True
        return paths.visible(self.scope, node.path)

    async def lookup(self, parent: Inode, name: str) -> Inode | None:
        if name == paths.CONTROL_NAME and parent is self.root and self.control_root is not None:
            return self.control_root
        node = await self._child(parent, name)
        if node is None:
            return None
        return self.table.obtain(self, node)

    async def _child(self, parent: Inode, name: str) -> Node | None:
        """The visible node at a name. Raises NotADirectory, PathTooLong."""
        directory = parent.node
        if directory.kind is not Kind.DIR:
            raise NotADirectory
        if len(name) * 4 > self._limits.max_name_bytes and len(name.encode()) > self._limits.max_name_bytes:
            raise PathTooLong("the name is too long", path=name)
        if self._strict:
            await self.ns.barrier()
        node = await self.ns.child(directory, name)
        if node is None or not self._visible(node):
            return None
        return node

    def negative_timeout_s(self, parent: Inode, name: str) -> float:
        if self._strict or not self.ns.live or not parent.remember_absent(name):
            return 0.0
        return self.settings.kernel_timeout_s

    async def list_names(self, inode: Inode) -> list[str]:
        directory = inode.node
        if self._strict:
            await self.ns.barrier()
        await self.ns.load(directory)
        return [name for name, node in directory.children.items() if self._visible(node)]

    async def entry(self, parent: Inode, name: str) -> Inode | None:
        node = parent.node.children.get(name)
        if node is None and not parent.node.loaded:
            # Unloaded since the listing began.
            node = await self.ns.child(parent.node, name)
        if node is None or not self._visible(node):
            return None
        return self.table.obtain(self, node)

    async def readlink(self, inode: Inode) -> bytes:
        return await self.io.current(inode)

    # -- Attributes --------------------------------------------------------------------------------

    async def setattr(self, inode: Inode, change: SetAttr, handle: Handle | None, caller: Caller) -> None:
        node = inode.node
        try:
            if not node.gone:
                paths.check(self.scope, Op.CREATE if handle is not None and handle.created else Op.SETATTR, node.path)
            if any(
                time is not None and not -(1 << 63) <= time < 1 << 63 for time in (change.mtime_ns, change.atime_ns)
            ):
                raise BadPath("the time is out of range: 64 bits of ns", path=node.path)
            if change.size is not None:
                await self.io.truncate(inode, change.size, handle)
            if change.atime_ns is not None:
                node.atime_ns = change.atime_ns
            attrs = Attrs(
                None if change.mode is None else stat_bits.S_IMODE(change.mode),
                change.uid,
                change.gid,
                change.mtime_ns,
            )
            if attrs != Attrs():
                await self._set_attrs(inode, attrs)
        except FsError as error:
            self.session.refuse_change("setattr", node.path, error)
            raise

    async def _set_attrs(self, inode: Inode, attrs: Attrs) -> None:
        """Attributes ride along with the commit that is due anyway; else they are held where nobody else follows
        (`held.py`), or stored at once. A commit under way has taken its own already."""
        if inode.buffer is not None and inode.buffer.committing is not None:
            async with inode.lock:
                pass
        node, buffer = inode.node, inode.buffer
        if buffer is not None and buffer.uncommitted and not node.gone:
            buffer.attrs = buffer.attrs.then(attrs._replace(mtime_ns=None))
            if attrs.mtime_ns is not None:
                buffer.mtime_ns = attrs.mtime_ns
            return
        if node is self.ns.tree.root:
            await namespaces.set_root_attrs(self.ns.db, self.scope, attrs)
            node.ctime_ns = now_ns()
        elif not node.gone and self.ns.alone:
            paths.check(self.scope, Op.SETATTR, node.path)
            self.ns.held.add(node, attrs)
        elif not node.gone:
            await self.ns.held.store(node)
            node_id = node.id
            found = await files.set_attrs(self.ns.db, self.scope, [files.AttrsChange(node.path, node_id, attrs)])
            if node_id not in found:
                raise NotFound(path=node.path)
            row, _ = found[node_id]
            if not node.is_before(row.version, row.ctime_ns):
                return  # others' change came after this one, and was announced before its answer was here
            self.ns.take_state(node, row)
        node.take_attrs(attrs)
        if attrs.mtime_ns is not None and node.kind is Kind.DIR:
            self.ns.directory_times_set(node)
        self.ns.attrs_changed(node, by=self)

    def refuse_name(self, parent: Inode, name: str, error: FsError) -> None:
        self.session.refuse("name", paths.join(parent.node.path, name), error)

    # -- Names -------------------------------------------------------------------------------------

    async def create(self, parent: Inode, name: str, mode: int, flags: int, caller: Caller) -> tuple[Inode, Opened]:
        return await self.names.create(parent, name, mode, flags, caller)

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        return await self.names.mkdir(parent, name, mode, caller)

    async def mknod(self, parent: Inode, name: str, kind: Kind, mode: int, caller: Caller) -> Inode:
        return await self.names.mknod(parent, name, kind, mode, caller)

    async def symlink(self, parent: Inode, name: str, target: bytes, caller: Caller) -> Inode:
        return await self.names.symlink(parent, name, target, caller)

    async def link(self, parent: Inode, name: str) -> Inode:
        error = NotPermitted(
            "hard links are not supported: a row is one path", hint="Copy the file, or make a symlink."
        )
        self.session.refuse("link", paths.join(parent.node.path, name), error)
        raise error

    async def unlink(self, parent: Inode, name: str) -> None:
        await self.names.unlink(parent, name)

    async def rmdir(self, parent: Inode, name: str) -> None:
        await self.names.rmdir(parent, name)

    async def rename(self, parent: Inode, name: str, new_parent: Inode, new_name: str, mode: str) -> None:
        await self.names.rename(parent, name, new_parent, new_name, mode)

    # -- Contents ----------------------------------------------------------------------------------

    async def open(self, inode: Inode, flags: int) -> Opened:
        try:
            return await self.io.open(inode, flags)
        except FsError as error:
            self.session.refuse_change("open", inode.node.path, error)
            raise

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        return await self.io.read(handle, offset, size)

    async def write(self, handle: Handle, offset: int, data: bytes) -> int:
        return await self.io.write(handle, offset, data)

    async def flush(self, handle: Handle) -> None:
        await self.io.flush(handle)

    async def fsync(self, handle: Handle) -> None:
        await self.io.fsync(handle)

    async def fsyncdir(self, directory: Inode) -> None:
        """Names are in Postgres when the call that made them returns; those that mkdir claims, not yet on its disk."""
        await self.ns.held.store()
        await self.ns.db.sync()

    async def release(self, handle: Handle) -> None:
        if handle.inode.node.kind is Kind.DIR:
            self.table.close(handle)
        else:
            await self.io.release(handle)

    async def space(self) -> Space:
        await self.ns.ask_quota()
        usage = self.ns.usage
        total = _UNLIMITED if usage.quota_bytes is None else usage.quota_bytes
        free = max(total - usage.bytes, 0)
        return Space(total, free, 1 << 32, (1 << 32) - usage.files)

    async def commit(self, inode: Inode) -> None:
        if inode.buffer is not None and inode.buffer.uncommitted:
            writer = next(iter(inode.changers), None) or Handle(inode, os.O_RDWR)
            try:
                await self.io.commits.commit(inode, writer)
            except (TooLarge, OverQuota):
                writer.untold = True  # no call of its own has failed
                raise

    def went_back(self, node: Node) -> None:
        self.session.went_back(node)

    async def settle(self, inode: Inode) -> None:
        async with inode.lock:
            await self.io.commits.settle(inode)

    async def give_up(self, inode: Inode, error: FsError) -> None:
        await self.io.commits.give_up(inode, None, error)

    async def commit_all(self) -> None:
        """Commit every buffer, as far as possible; what fails is told by the log and the conflicts."""
        for inode in list(self.inodes.values()):
            try:
                await self.commit(inode)
            except FsError as error:
                self.session.refuse_change("commit", inode.node.path, error)
