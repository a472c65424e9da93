"""One namespace in one daemon: its mirror, its contents, and the sessions that see it.

Decided here and only here: when a directory is asked of Postgres, what "the content of a node" is
while the node changes, and which kernel caches a change makes void.

Threading: one trio thread. Methods that await say so; between awaits the mirror is consistent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import trio

from fusefs import telemetry
from fusefs.core.attributes import Kernel, now_ns
from fusefs.core.contents import Contents, Reader
from fusefs.core.filesystem import Filesystem, Inode, InodeTable, Void
from fusefs.core.held import Held
from fusefs.core.loading import Loader
from fusefs.core.rescue import RescueDirectory
from fusefs.core.tree import SUPERSEDED, Node, Tree
from fusefs.db.connection import Backend
from fusefs.db.listen import Listener, Round
from fusefs.db.pool import Database
from fusefs.rules import paths
from fusefs.rules.errors import FsError, NotFound, Unavailable
from fusefs.rules.model import Attrs, Kind, NodeRow, Renamed
from fusefs.rules.scope import Principal, Scope
from fusefs.store import files, namespaces, versions

_INO_BATCH = 1000
_ATTEMPTS = 5
_MOVES = 50
"""Barriers that wait for an announcement which is known to be on its way."""
_VANISHED = 4096
_JUST_NOW_S = 5.0
"""How many names that others took away are remembered, and for how long. An announcement takes milliseconds."""
_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Doubt:
    """A change that may have been applied: by which backend, what to load when it is settled, and whose buffer."""

    backend: Backend
    directories: list[Node]
    inode: Inode | None


class Namespace:
    """The files of one (tenant, agent).

    Args:
        listener: brings the announcements.
        inos: a shared stock of incarnation numbers.
        rescue: where bytes go that Postgres does not take.
        touched, doubtful: sets of the namespaces whose directory times are to be stored, and where lost changes are
            to be settled, to which this one adds itself.
        holding: called when it holds attributes that are to be stored (`held.py`).
    """

    def __init__(
        self,
        db: Database,
        tenant_id: str,
        agent_id: str,
        row: namespaces.Namespace,
        *,
        contents: Contents,
        table: InodeTable,
        kernel: Kernel,
        listener: Listener,
        inos: Inos,
        rescue: RescueDirectory,
        touched: set[Namespace],
        doubtful: set[Namespace],
        holding: Callable[[Namespace], None],
        max_nodes: int,
    ) -> None:
        self.db = db
        self.tenant_id = tenant_id
        self.agent_id = agent_id
        self.channel = row.channel
        self.scope = Scope(tenant_id, agent_id, "daemon", Principal.SYSTEM)
        self.tree = Tree()
        self.usage = namespaces.Usage(row.quota_bytes)
        self.contents = contents
        self.table = table
        self.kernel = kernel
        self._listener = listener
        self.inos = inos
        self.rescue = rescue
        self._all_touched = touched
        self._all_doubtful = doubtful
        # Writes that Postgres did not take: rescued, or lost.
        self.not_taken = 0
        self.views: list[Filesystem] = []
        self.live = False
        # Nobody else follows, and who comes is waited for by `publish`.
        self.alone = False
        # Raised when everything cached became doubtful: a listing asked for before is then asked for again.
        self.era = 0
        self._max_nodes = max_nodes
        self._reader = Reader(contents, self._fetch)
        self._loader = Loader(self, self._fill, max_nodes)
        self.held = Held(db, self.scope, self._attrs_stored, lambda: holding(self))
        self._touched: dict[str, int] = {}
        self._vanished: OrderedDict[str, float] = OrderedDict()
        # Own moves of directories that wait for their announcement, by the old path: what takes them into the mirror.
        self.moving: dict[str, Callable[[Renamed], None]] = {}
        # One claim at a time while nothing is heard: two of them take each other for one that is made late.
        self.claiming_unheard = trio.Lock()
        self._doubts: list[Doubt] = []
        self._settling = trio.Lock()
        root = self.tree.root
        root.mode, root.uid, root.gid = row.mode, row.uid, row.gid
        root.mtime_ns = root.ctime_ns = row.mtime_ns

    async def barrier(self) -> None:
        """Return when what was committed before is in the mirror. While announcements are not live the
        mirror keeps nothing, so there is nothing to wait for."""
        await self.end_barrier(self.begin_barrier())

    def begin_barrier(self) -> Round | None:
        """Ask for a barrier, to wait for it later: what is done in between costs no time."""
        try:
            return self._listener.begin_barrier() if self.live else None
        except Unavailable:
            self._barrier_lost()
            return None

    async def end_barrier(self, begun: Round | None) -> None:
        """Wait for a barrier that was asked for."""
        if begun is not None:
            try:
                await self._listener.end_barrier(begun)
            except Unavailable:
                self._barrier_lost()

    def _barrier_lost(self) -> None:
        _log.info("namespace.barrier_lost", agent=self.agent_id)

    @property
    def claims_late(self) -> bool:
        """Whether a name that one process alone may have (O_EXCL) can wait for its first commit: there is no other
        mount and no other session to which it would have to be shown."""
        return self.alone and len(self.views) == 1

    async def publish(self) -> None:
        """Store what was answered before: attributes that are held, but those of rows that another program has locked,
        which are announced when they are stored; and what was made under names that are claimed late. Raises
        Unavailable."""
        await self.held.store_once(trio.current_time())
        for handle in list(self.table.handles.values()):
            node = handle.inode.node
            if not handle.exclusive or handle.inode.owner not in self.views:
                continue
            for _ in range(_ATTEMPTS):
                if node.committed or node.gone:
                    break
                try:
                    await handle.inode.owner.commit(handle.inode)
                except Unavailable:
                    raise
                except FsError as error:
                    # What was written met a limit, say: an empty file is what is left to be made.
                    _log.info("namespace.not_published", agent=self.agent_id, error=type(error).__name__)

    async def ask_quota(self) -> None:
        """Bring the quota up to date, if Postgres answers: it charges the commit in any case."""
        try:
            await self.usage.ask(self.db, self.tenant_id, self.agent_id)
        except Unavailable:
            _log.info("namespace.quota_unknown", agent=self.agent_id)

    async def follow_move(self, directory: Node, path: str) -> bool:
        """A statement found that a directory is not at its path any more. Whether the mirror knows by now where it
        is; False where it is gone.

        One barrier does not find it for sure: a statement sees what is committed a moment before its announcement
        is sent.
        """
        for _ in range(_MOVES):
            await self.barrier()
            if directory.gone or directory.path != path:
                break
            if directory is self.tree.root or await files.where(self.db, self.scope, directory.id) in (None, path):
                break
        return not directory.gone and directory.path != path

    # -- Metadata ----------------------------------------------------------------------------------

    async def load(self, directory: Node) -> None:
        """Make a directory's children complete. Raises StaleVersion, NotFound, Unavailable."""
        await self._loader.load(directory)

    def _went_back(self, node: Node) -> None:
        """The server never had the newest version that was known: what the same number stands for now, nobody here
        has seen."""
        _log.warning("namespace.went_back", agent=self.agent_id, path=node.path, version=node.version)
        self.contents.clear()
        for view in self.views:
            view.went_back(node)

    async def load_again(self, directory: Node) -> None:
        """Load a directory that became doubtful during a change which succeeded, and tell the kernel; if Postgres
        does not answer, the next look-up asks."""
        try:
            if self.live:
                await self.load(directory)
        except FsError as error:
            _log.info("namespace.not_loaded", agent=self.agent_id, error=type(error).__name__)

    def _fill(self, directory: Node, listing: files.Listing) -> None:
        for entry in listing.entries:
            target = listing.targets.get(entry.id)
            if target is not None:
                self.contents.put(entry.id, entry.version, target)
        filled = self.tree.fill(directory, listing.entries)
        for node in filled.changed:
            self.content_changed(node)
        for node in filled.gone:
            self.name_gone(directory, node.name, node)
            self.attrs_changed(node)
        for node, parent, name in filled.moved:
            # Its announcement was missed, or does not find it at its old name any more.
            self.name_gone(parent, name, node)
        for node, row in filled.taken:
            self.take_name(node, row, directory)
        while self.tree.went_back:
            self._went_back(self.tree.went_back.pop())
        for inode in self.inodes_of(directory):
            for name in [name for name in inode.absent or () if name in directory.children]:
                inode.forget_absent(name)
                self.kernel.invalidate_entry(inode.kino, name)
        telemetry.counters.cache_misses["directory"] += 1
        if not self.live:
            self.tree.distrust(directory)
        for node in self.tree.shrink(self._max_nodes, keep=directory):
            self.have_forgotten(node)

    def take_row(self, row: NodeRow, parent: Node, name: str) -> Node | None:
        """Bring a row into a directory (`Tree.merge`). What it says of a known file may be news to the kernel."""
        known = self.tree.by_id.get(row.id)
        before = None if known is None else known.version
        node = self.tree.merge(row, parent, name)
        if node is not None and node is known and node.version != before:
            self.content_changed(node)
        return node

    def take_state(self, node: Node, row: NodeRow) -> bool:
        """Take a state of a node's row that is not older than the known one. Returns whether its content is another, of
        which the kernel is told then."""
        content = row.version != node.version
        node.update(row)
        if content:
            self.content_changed(node)
        return content

    def take_name(self, node: Node, row: NodeRow, parent: Node) -> None:
        """Others' row is at the name of this daemon's uncommitted file.

        A file to which a session only appends becomes that row: both appends survive. Any other has lost
        its name by now: its commit will be refused, and its bytes kept.
        """
        if row.id == node.id:
            # Our own row, changed by others before our commit's answer is here.
            self.tree.distrust(parent)
            return
        inodes = self.inodes_of(node)
        buffers = [inode.buffer for inode in inodes if inode.buffer is not None]
        appends = bool(buffers) and all(buffer.appends_only and buffer.whole for buffer in buffers)
        if appends and all(handle.joins for inode in inodes for handle in inode.changers):
            if any(buffer.committing is not None for buffer in buffers):
                return  # that commit meets the row, and does the same
            self.become(node, row)
        else:
            name = node.name
            self.tree.detach(node)
            self.name_gone(parent, name, node)
            self.attrs_changed(node)
            self.tree.merge(row, parent, name)
            self.name_appeared(parent, name)

    def become(self, node: Node, row: NodeRow) -> None:
        """An uncommitted file that was only appended to turns out to be the row that others made."""
        parent, name = node.parent, node.name
        self.tree.rekey(node, row.id)
        node.update(row)
        node.row_ino = row.ino
        node.owner = None
        node.revived = False
        for inode in self.inodes_of(node):
            if inode.buffer is not None:
                inode.buffer.become_append(row.version)
            for handle in inode.handles:
                handle.version = row.version
            self.kernel_unsure(inode)
        if parent is not None:
            self.name_appeared(parent, name)

    def lose_uncommitted(self, node: Node) -> None:
        """A file that will not be made loses its name. What its other handles write is refused, as it is to a file
        that others took away."""
        parent, name = node.parent, node.name
        self.tree.detach(node)
        if parent is not None:
            self.name_gone(parent, name, node)

    async def refresh(self, node: Node) -> None:
        """Bring a node up to date where its directory is not loaded: nobody followed it meanwhile."""
        if not node.gone and node.parent is not None and not node.parent.loaded:
            await self.load(node.parent)

    async def child(self, directory: Node, name: str) -> Node | None:
        """The committed or uncommitted node at a name. Awaits only when the directory is not loaded."""
        if directory.loaded:
            self.tree.use(directory)
        else:
            await self.load(directory)
        return directory.children.get(name)

    # -- Contents ----------------------------------------------------------------------------------

    async def content(self, node: Node) -> tuple[int, bytes]:
        """The newest version and its content. Raises NotFound for a node that is gone."""
        await self.refresh(node)
        for _ in range(_ATTEMPTS):
            if node.gone or not node.committed:
                break
            content = self.contents.get(node.id, node.version)
            if content is not None:
                telemetry.counters.cache_hits["content"] += 1
                return node.version, content
            found = await self._reader.fetch(node)
            if found is not None and found[0] == node.version:
                return found
            # The row is ahead of the mirror: its announcement is on the way.
            await self.barrier()
            if found is not None and found[0] > node.version:
                # Announced to nobody (a row changed before LISTEN was back): take it as it is.
                row = await files.stat(self.db, self.scope, node.path)
                if row.id == node.id and node.parent is not None:
                    self.take_row(row, node.parent, node.name)
        if not node.gone and node.parent is not None:
            self.tree.distrust(node.parent)  # all announcements were heard, and Postgres does not have it
        raise NotFound(path=node.path)

    async def content_at(self, node: Node, version: int) -> bytes | None:
        """The content of one version of a lineage; None when it is not kept."""
        content = self.contents.get(node.id, version)
        if content is None and not node.gone and node.version == version:
            current, newest = await self.content(node)
            if current == version:
                return newest
        if content is None:
            try:
                content = await versions.read_version(self.db, self.scope, node.path, version, node.id)
            except NotFound:
                return None
        return content

    async def _fetch(self, ids: list[str]) -> dict[str, tuple[int, bytes]]:
        return await files.read(self.db, self.scope, ids)

    def doubt(self, backend: Backend, directories: list[Node], inode: Inode | None = None) -> None:
        """A change was lost on its way, and may have been applied or yet be. Its announcement, if there is one,
        is taken for an own one. So it is settled in the background, and its directories are loaded afresh."""
        self._doubts.append(Doubt(backend, directories, inode))
        self._all_doubtful.add(self)

    @property
    def doubtful(self) -> bool:
        return bool(self._doubts)

    async def settle_doubts(self) -> None:
        """Find out what became of lost changes. Not under an inode's lock, which this may take.

        Raises FsError, with the rest still to be done.
        """
        async with self._settling:
            while self._doubts:
                doubt = self._doubts[0]
                if doubt.inode is not None:
                    await doubt.inode.owner.settle(doubt.inode)
                await self.db.end(doubt.backend)
                for directory in doubt.directories:
                    self.tree.distrust(directory)
                    await self.load_again(directory)
                self._doubts.pop(0)

    # -- Renames -----------------------------------------------------------------------------------

    def apply_rename(
        self, source: Node, directory: Node, name: str, target: Node | None, done: Renamed, *, exchange: bool
    ) -> None:
        """Take a rename into the mirror.

        The source's incarnation keeps its inode; what it replaced becomes an orphan, whose handles read
        the version that they opened. The source may have moved with a content that the mirror does not know yet:
        answers and announcements come by several connections, each in its own order.
        """
        row = done.row
        if source.gone or row.ino != source.row_ino:
            # Between the move and its answer another session of this daemon asked for it, and took it for deleted; or
            # another file had been renamed over it before, and that one moved. What there is now must be asked for.
            for each in (directory, self.tree.find(paths.split(source.path)[0])):
                if each is not None:
                    self.tree.distrust(each)
            self.name_gone(directory, name, source)
            return
        if exchange:
            if target is not None and source.parent is not None:
                old_parent, old_name = source.parent, source.name
                self.tree.send_away(source, row.path)
                self.tree.attach(target, old_parent, old_name)
                target.moved(row)
            self.tree.attach(source, directory, name)
            source.moved(row)
            return
        taken_over = row.id != source.id
        known = self.tree.by_id.get(row.id)
        newer = known is not None and known is not source and known.version > row.version
        if newer or self.tree.is_buried(row.id, row.version):
            # What we know of the target is newer than this rename: ask for the result of both.
            self.tree.distrust(directory)
        displaced = self.tree.attach(source, directory, name)
        if displaced is not None and displaced.kind is Kind.DIR:
            self.tree.bury(displaced.id, displaced.version + 1)
        if not taken_over:
            source.moved(row)
            return
        content = self.contents.get(source.id, done.moved)
        self.tree.bury(source.id, done.moved + 1)
        self.tree.rekey(source, row.id)
        source.update(row)
        if content is not None:
            self.contents.put(row.id, row.version, content)
        for inode in self.inodes_of(source):
            self._take_over(inode, done)

    def _take_over(self, inode: Inode, done: Renamed) -> None:
        """An inode's file goes on in another lineage. What was built on the version that moved is built on the new one;
        anything else is on none of that lineage, whose numbers it may happen to meet."""

        def now(version: int) -> int:
            return done.row.version if version == done.moved else SUPERSEDED

        if inode.told in (None, done.moved) and inode.kernel_version in (None, done.moved):
            inode.told = None if inode.told is None else done.row.version
            inode.kernel_version = None if inode.kernel_version is None else done.row.version
        else:
            self.kernel_unsure(inode)
        for handle in inode.handles:
            handle.version = now(handle.version)
        buffer = inode.buffer
        if buffer is None:
            return
        if not buffer.uncommitted:
            inode.buffer = None
        elif buffer.expected is not None:
            buffer.expected = now(buffer.expected)

    # -- What a change makes void ------------------------------------------------------------------

    def kernel_unsure(self, inode: Inode) -> None:
        """The kernel has a size and pages that nobody else has: it must ask for both."""
        inode.kernel_version = None
        self.void_now(inode)
        self.void(inode)

    def void(self, inode: Inode, *, attr_only: bool = False) -> None:
        """Have the kernel drop an inode's attributes, and its pages unless `attr_only`, a moment later; not at all
        where an open makes that needless before."""
        inode.voids += 1
        self.kernel.invalidate_inode(inode.kino, attr_only=attr_only, drop=Void(inode, pages=not attr_only))

    def void_now(self, inode: Inode) -> None:
        """Have the kernel drop an inode's attributes before returning."""
        inode.voids += 1
        inode.calm += inode.calm == inode.voids - 1
        inode.told = None
        self.kernel.invalidate_attr_now(inode.kino)

    def content_changed(self, node: Node, by: object = None) -> None:
        """Drop attributes and pages in every session but the one that wrote them."""
        for inode in self.inodes_of(node):
            if inode.owner is not by:
                self.void(inode)

    def attrs_changed(self, node: Node, by: object = None) -> None:
        for inode in self.inodes_of(node):
            if inode.owner is not by:
                self.void(inode, attr_only=True)

    def name_appeared(self, parent: Node, name: str, by: object = None) -> None:
        """Drop the remembered absence of a name. Only where it was answered: dropping a dentry that is
        right by now would take the working directory away from a process in it."""
        for directory in self.inodes_of(parent):
            if directory.forget_absent(name) and directory.owner is not by:
                self.kernel.invalidate_entry(directory.kino, name)

    def name_gone(self, parent: Node, name: str, node: Node, by: object = None) -> None:
        """Drop a name that was a node's, where the kernel knows the node."""
        if by is None:
            path = paths.join(parent.path, name)
            self._vanished[path] = monotonic()
            self._vanished.move_to_end(path)
            if len(self._vanished) > _VANISHED:
                self._vanished.popitem(last=False)
        for inode in self.inodes_of(node):
            if inode.owner is by:
                continue
            directory = self.table.known(inode.owner, parent.ino)
            if directory is not None and directory.node is parent:
                deleted = inode.kino if node.gone and node.kind is not Kind.DIR else 0
                self.kernel.invalidate_entry(directory.kino, name, deleted)

    def vanished_just_now(self, path: str) -> bool:
        """Whether others took a name away a moment ago: they may have made it anew, and the announcement be on its
        way."""
        return monotonic() - self._vanished.get(path, -math.inf) < _JUST_NOW_S

    def have_forgotten(self, node: Node) -> None:
        """Drop the name of a file that nobody has open, so that the kernel forgets the file. Not for directories: it
        would take the working directory away from a process in it."""
        for inode in self.inodes_of(node):
            directory = None if node.parent is None else self.table.known(inode.owner, node.parent.ino)
            if directory is not None and directory.node is node.parent and not inode.handles:
                self.kernel.invalidate_entry(directory.kino, node.name)

    def _attrs_stored(self, node: Node, row: NodeRow | None) -> None:
        """Attributes that were held are stored, or their row is gone. The kernel knows them already; what else the row
        says is news to it. The ctime stays as it was shown: git, for one, takes another for a change."""
        if row is None or not node.is_before(row.version, row.ctime_ns):
            # Others took it away, or changed it after us, and ours was shown over that.
            if node.parent is not None:
                self.tree.distrust(node.parent)
            self.attrs_changed(node)
        else:
            shown, ctime_ns = (node.mode, node.uid, node.gid, node.mtime_ns), node.ctime_ns
            if not self.take_state(node, row):
                if shown == (node.mode, node.uid, node.gid, node.mtime_ns):
                    node.ctime_ns = ctime_ns
                else:
                    self.attrs_changed(node)
            self.tree.drop(node)

    # -- Directory times ---------------------------------------------------------------------------

    def directory_changed(self, directory: Node, *, store: bool = True) -> None:
        """An entry came or went: the directory's mtime is now. Stored later and together (see
        `namespaces.touch_directories`); `store` is off for what other daemons did."""
        at_ns = max(now_ns(), directory.mtime_ns)
        if store:
            directory.entries_changed(at_ns)
            self.store_time_of(directory)
        elif directory.held is None or directory.held.mtime_ns is None:  # else it may have been before that was set
            directory.mtime_ns = directory.ctime_ns = at_ns

    def store_time_of(self, directory: Node) -> None:
        """Have a directory's mtime stored as it is: an entry that came a while ago is in Postgres now."""
        self._touched[directory.id] = directory.mtime_ns
        self._all_touched.add(self)

    def directory_times_set(self, directory: Node) -> None:
        """Someone set the times on purpose, which no pending touch may undo."""
        self._touched.pop(directory.id, None)

    async def store_times(self) -> None:
        """Write the pending directory times."""
        touched, self._touched = self._touched, {}
        root = touched.pop("", None)
        try:
            if touched:
                await namespaces.touch_directories(self.db, self.tenant_id, self.agent_id, touched)
            if root is not None:
                await namespaces.set_root_attrs(self.db, self.scope, Attrs(mtime_ns=root))
        except FsError:
            for node_id, mtime_ns in touched.items():
                self._touched.setdefault(node_id, mtime_ns)
            if root is not None:
                self._touched.setdefault("", root)
            self._all_touched.add(self)
            raise

    # -- Sessions ----------------------------------------------------------------------------------

    def inodes_of(self, node: Node) -> list[Inode]:
        """The inodes of a node in the sessions that know it: what a change costs does not grow with the others."""
        return list(node.inodes)

    def known_inodes(self) -> list[Inode]:
        return [inode for view in self.views for inode in view.inodes.values()]


class Inos:
    """A stock of incarnation numbers, taken from the sequence a thousand at a time."""

    def __init__(self, db: Database, tenant_id: str) -> None:
        self._db = db
        self._tenant_id = tenant_id
        self._stock: list[int] = []
        self._lock = trio.Lock()

    def clear(self) -> None:
        """After a failover the sequence may give these numbers to others."""
        self._stock.clear()

    async def next(self) -> int:
        """Awaits once in a thousand calls."""
        while not self._stock:
            async with self._lock:
                if not self._stock:
                    numbers = await files.reserve_inos(self._db, self._tenant_id, _INO_BATCH)
                    self._stock = numbers[::-1]
        return self._stock.pop()
