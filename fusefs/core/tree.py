"""The mirror of one namespace's metadata: nodes, and the directories that are loaded.

Decided here and only here: which node is at a path as far as this daemon knows, and how rows and
announcements that arrive out of step are merged. A row or an announcement never takes a lineage back
to an older version, and never brings a deleted one back.

Threading: one trio thread. No method awaits, so each is atomic; the loading of directories, which
awaits, is in `namespace.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from fusefs.rules.model import Attrs, Kind, NodeRow

ROOT_INO = 1
UNCOMMITTED = -1
"""`Node.version` of a file that exists in this mount only, until its first commit."""
SUPERSEDED = -2
"""What a handle or a buffer was built on, where that is no version of its file's lineage: nothing will match it."""
_TOMBSTONES = 20_000
_SHRINK_SHARE = 16
"""What part of the limit a pass of `Tree.shrink` frees at once: the calls that tell the kernel so delay others."""


class Node:
    """One incarnation of a file, directory, symlink, FIFO or socket.

    `parent` None: the root, an orphan (`gone`), or a directory moved to where nothing is loaded
    (`where` holds its path). `loaded`: `children` is complete; otherwise it holds only what is pinned.
    `touched` collects the lineages that change while the directory is being loaded; `doubted`: something changed of
    which the lineage is not known, and the listing may be from before it. `owner` is the
    session that made an uncommitted file; others do not see it.
    `revived`: it goes on with a lineage that the session deleted. `removed_by` is the session of this
    daemon that made an orphan of the node; None: others did. `inodes` are those by which the kernel and open
    handles know the node, one for each session that looked (`filesystem.Inode`); they pin it in memory.
    `row_ino` is the incarnation in Postgres; another than `ino` where two sessions made the same log at once,
    and this one's file turned out to be the other's. `changed_ns` is the row's `updated_at`, by the clock of
    Postgres: it orders the states of one version. `era` is that of the tree in which the row was taken.
    `ctime_ns` is what is shown; a directory's follows the changes in it, by this machine's clock.
    `held`: attributes that were answered and are not stored yet (`held.py`); they are shown whatever a row says.
    """

    __slots__ = (
        "atime_ns",
        "changed_ns",
        "children",
        "ctime_ns",
        "doubted",
        "era",
        "gid",
        "gone",
        "held",
        "id",
        "ino",
        "inodes",
        "kind",
        "loaded",
        "mode",
        "mtime_ns",
        "name",
        "owner",
        "parent",
        "removed_by",
        "revived",
        "row_ino",
        "session",
        "size",
        "touched",
        "uid",
        "version",
        "where",
    )

    def __init__(self, node_id: str, kind: Kind, ino: int, name: str, parent: Node | None) -> None:
        self.id = node_id
        self.kind = kind
        self.ino = ino
        self.row_ino = ino
        self.name = name
        self.parent = parent
        self.version = UNCOMMITTED
        self.size = 0
        self.mode = 0
        self.uid: int | None = None
        self.gid: int | None = None
        self.mtime_ns = 0
        self.ctime_ns = 0
        self.changed_ns = 0
        self.era = 0
        self.atime_ns: int | None = None
        self.session = ""
        self.children: dict[str, Node] = {}
        self.loaded = False
        self.touched: set[str] | None = None
        self.doubted = False
        self.owner: object | None = None
        self.gone = False
        self.removed_by: object | None = None
        self.revived = False
        self.where: str | None = None
        self.held: Attrs | None = None
        self.inodes: list[Any] = []

    @property
    def path(self) -> str:
        """The absolute path, as far as this daemon knows."""
        parts: list[str] = []
        node = self
        while node.parent is not None:
            parts.append(node.name)
            node = node.parent
        base = node.where or ""
        if not parts:
            return base or "/"
        parts.append(base)
        return "/".join(reversed(parts))

    def is_above(self, other: Node) -> bool:
        """Whether the other is somewhere below it."""
        node = other.parent
        while node is not None and node is not self:
            node = node.parent
        return node is self

    @property
    def committed(self) -> bool:
        return self.version != UNCOMMITTED

    def is_before(self, version: int, changed_ns: int) -> bool:
        """Whether another state of the row is not older than the one that is known."""
        return (self.version, self.changed_ns) <= (version, changed_ns)

    def moved(self, row: NodeRow) -> None:
        """Take what a rename leaves behind."""
        self.changed_ns = max(self.changed_ns, row.ctime_ns)
        self.ctime_ns = max(self.ctime_ns, row.ctime_ns)

    def update(self, row: NodeRow) -> None:
        """Take the metadata of a row that is not older."""
        self.id = row.id
        self.version = row.version
        self.size = row.size
        self.mode = row.mode
        self.uid = row.uid
        self.gid = row.gid
        if row.kind is not Kind.DIR or row.mtime_ns > self.mtime_ns:
            self.mtime_ns = row.mtime_ns
        self.changed_ns = row.ctime_ns
        self.ctime_ns = max(self.ctime_ns, row.ctime_ns) if row.kind is Kind.DIR else row.ctime_ns
        self.session = row.session
        self.show_held()

    def show_held(self) -> None:
        """Have attributes that are not stored yet win over those of a row."""
        if self.held is not None:
            self.take_attrs(self.held)

    def entries_changed(self, at_ns: int) -> None:
        """This daemon made or removed an entry of this directory: later than any time that was set on purpose."""
        self.mtime_ns = self.ctime_ns = at_ns
        if self.held is not None:
            self.held = self.held._replace(mtime_ns=None)

    def take_attrs(self, attrs: Attrs) -> None:
        """Take attributes that were set, a directory's mtime also backwards."""
        if attrs.mode is not None:
            self.mode = attrs.mode
        if attrs.uid is not None:
            self.uid = attrs.uid
        if attrs.gid is not None:
            self.gid = attrs.gid
        if attrs.mtime_ns is not None:
            self.mtime_ns = attrs.mtime_ns

    def walk(self) -> Iterator[Node]:
        """This node and every loaded one below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Filled(NamedTuple):
    """What the loading of a directory says of nodes that someone may hold.

    Attributes:
        changed: their content.
        gone: they are not there any more.
        moved: from which directory and name; they are in this one now.
        taken: uncommitted files whose names others' rows have.
    """

    changed: list[Node]
    gone: list[Node]
    moved: list[tuple[Node, Node, str]]
    taken: list[tuple[Node, NodeRow]]


class Tree:
    """All known nodes of one namespace."""

    def __init__(self) -> None:
        # Raised when announcements were lost: the server that is there afterwards may be one that never had the
        # newest commits (a failover), so the first state of a row that comes then is taken whatever its version.
        self.era = 0
        self.went_back: list[Node] = []
        self.root = Node("", Kind.DIR, ROOT_INO, "", None)
        self.root.version = 1
        self.by_id: dict[str, Node] = {}
        self._deleted: OrderedDict[str, int] = OrderedDict()
        self._loaded: OrderedDict[Node, None] = OrderedDict()
        self._shrink_above = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def find(self, path: str) -> Node | None:
        """The node at a path, as far as it is known; None says nothing about Postgres."""
        node: Node | None = self.root
        for part in path.split("/")[1:] if path != "/" else ():
            if node is None:
                return None
            node = node.children.get(part)
        return node

    # -- Changing ----------------------------------------------------------------------------------

    def attach(self, node: Node, parent: Node, name: str) -> Node | None:
        """Put a node at a name, from wherever it was. Returns the node that it displaced, now an orphan."""
        self._unlink(node)
        displaced = parent.children.get(name)
        node.parent, node.name, node.where = parent, name, None
        parent.children[name] = node
        self.touch(node)
        if displaced is None or displaced is node:
            return None
        displaced.where, displaced.parent = displaced.path, None
        self._orphan(displaced)
        return displaced

    def touch(self, node: Node) -> None:
        """Note that a listing which is on its way may not show a node of its directory."""
        if node.parent is not None and node.parent.touched is not None:
            node.parent.touched.add(node.id)

    def add(self, node: Node, parent: Node, name: str) -> Node | None:
        """Attach a new node and index it."""
        displaced = self.attach(node, parent, name)
        self.by_id[node.id] = node
        return displaced

    def rekey(self, node: Node, node_id: str) -> None:
        """Give an incarnation another lineage: it replaced that lineage's content by rename."""
        if self.by_id.get(node.id) is node:
            del self.by_id[node.id]
        node.id = node_id
        self.by_id[node_id] = node
        self.touch(node)

    def detach(self, node: Node, version: int | None = None) -> None:
        """Remove a node from its directory: it is an orphan from now on.

        `version` is the number that its deletion took, where known.
        """
        where = node.path
        self._unlink(node)
        node.where, node.parent = where, None
        self._orphan(node)
        if version is not None:
            self.bury(node.id, version)

    def send_away(self, node: Node, path: str) -> None:
        """Move a node to a path whose directory is not known here. It stays whole for those who hold it, but
        what is below it is to be loaded again: announcements do not find it there."""
        for each in node.walk():
            if each.loaded:
                self.distrust(each)
        self._unlink(node)
        node.parent, node.where = None, path

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.children.get(node.name) is node:
            del parent.children[node.name]
            if parent.touched is not None:
                parent.touched.add(node.id)

    def _orphan(self, node: Node) -> None:
        for each in node.walk():
            each.gone = True
            if self.by_id.get(each.id) is each:
                del self.by_id[each.id]
            self._loaded.pop(each, None)

    def bury(self, node_id: str, version: int) -> None:
        """Remember that a lineage was deleted, so that a row or an announcement still under way cannot
        bring it back."""
        if self._deleted.get(node_id, -1) < version:
            self._deleted[node_id] = version
            self._deleted.move_to_end(node_id)
            while len(self._deleted) > _TOMBSTONES:
                self._deleted.popitem(last=False)

    def is_buried(self, node_id: str, version: int) -> bool:
        """Whether this state of a lineage is from before its deletion."""
        return self._deleted.get(node_id, -1) > version

    def accepts(self, node: Node, version: int, changed_ns: int) -> bool:
        """Whether a state of a row is not older than what is known, or is the first one after a loss."""
        return node.era != self.era or node.is_before(version, changed_ns)

    def says(self, node: Node, row: NodeRow) -> bool:
        """Whether a row is known already: an answer or a listing was faster."""
        known = (node.version, node.changed_ns, node.size, node.mode, node.uid, node.gid, node.mtime_ns, node.era)
        return known == (row.version, row.ctime_ns, row.size, row.mode, row.uid, row.gid, row.mtime_ns, self.era)

    def merge(self, row: NodeRow, parent: Node, name: str, *, listed: bool = False) -> Node | None:
        """Bring a committed row into a directory. Returns its node, or None when the row is out of date.

        Args:
            listed: it is of a listing that was asked for in this era; other rows may be from before it.

        A node of the same lineage and incarnation is updated unless it is newer. A new incarnation (a
        rename over it elsewhere) displaces the old node, which becomes an orphan.
        """
        if self.is_buried(row.id, row.version):
            return None
        node = self.by_id.get(row.id)
        first = listed and node is not None and node.era != self.era
        if node is not None and first and row.version < node.version:
            self.went_back.append(node)
        if node is not None and node.row_ino != row.ino:
            if row.version < node.version and not first:
                return None
            self.detach(node)
            node = None
        if node is None:
            node = Node(row.id, row.kind, row.ino, name, None)
            node.update(row)
            node.era = self.era
            self.add(node, parent, name)
        elif first or node.is_before(row.version, row.ctime_ns):
            node.update(row)
            node.era = self.era if listed else node.era
            if node.parent is not parent or node.name != name:
                self.attach(node, parent, name)
        return node

    def fill(self, directory: Node, rows: list[NodeRow]) -> Filled:
        """Take the result of loading a directory. What changed while it was on its way stays."""
        touched = directory.touched or set()
        names = set()
        filled = Filled([], [], [], [])
        for row in rows:
            name = row.path.rpartition("/")[2]
            names.add(name)
            present = directory.children.get(name)
            if row.id in touched:
                continue
            if present is not None and not present.committed:
                filled.taken.append((present, row))
                continue
            known = self.by_id.get(row.id)
            before = None if known is None else (known.version, known.parent, known.name)
            node = self.merge(row, directory, name, listed=True)
            if known is not None and before is not None and node is known:
                version, parent, old_name = before
                if known.version != version:
                    filled.changed.append(known)
                if parent is not None and (known.parent, known.name) != (parent, old_name):
                    filled.moved.append((known, parent, old_name))
            if present is not None and present.gone:
                filled.gone.append(present)
        for name, node in list(directory.children.items()):
            if name not in names and node.committed and node.id not in touched:
                self.detach(node)
                filled.gone.append(node)
        self.trust(directory)
        return filled

    # -- Forgetting --------------------------------------------------------------------------------

    def use(self, directory: Node) -> None:
        """Note that a loaded directory was used, for eviction."""
        if directory in self._loaded:
            self._loaded.move_to_end(directory)

    def trust(self, directory: Node) -> None:
        """Take a directory for complete: it was loaded, or has just been made."""
        directory.loaded = True
        self._loaded[directory] = None
        self._loaded.move_to_end(directory)

    def distrust(self, directory: Node) -> None:
        """Take a directory for incomplete, without forgetting anything."""
        directory.loaded = False
        directory.doubted = True
        self._loaded.pop(directory, None)

    def unload(self) -> None:
        """Take no directory for complete any more, nor any version for the newest. Identities that the kernel or a
        handle knows stay."""
        self.era += 1
        self._deleted.clear()
        for directory in list(self._loaded):
            self._forget(directory)

    def shrink(self, limit: int, keep: Node) -> list[Node]:
        """Forget the directories used longest ago while more than `limit` nodes are known. Never `keep`, which someone
        is about to read, nor one that is being loaded.

        Returns the files that are left in them: the kernel knows these, and is to be told to forget them. Its answers
        come later (`drop`), so the next pass waits until a little more is known.
        """
        if len(self.by_id) <= limit:
            self._shrink_above = 0
            return []
        if len(self.by_id) <= self._shrink_above:
            return []
        step = limit // _SHRINK_SHARE
        excess = len(self.by_id) - limit + step
        known: list[Node] = []
        for directory in list(self._loaded):
            if excess <= 0:
                break
            if directory is not keep and directory.touched is None:
                before = len(self.by_id)
                self._forget(directory)
                left = [node for node in directory.children.values() if node.committed and node.kind is not Kind.DIR]
                excess -= before - len(self.by_id) + len(left)
                known += left
        self._shrink_above = len(self.by_id) + step
        return known

    def drop(self, node: Node) -> None:
        """The kernel has forgotten a node: so does the tree, unless its directory is to be complete."""
        parent = node.parent
        if parent is not None and not parent.loaded and parent.touched is None:
            self._drop(node, parent)

    def _forget(self, directory: Node) -> None:
        directory.loaded = False
        self._loaded.pop(directory, None)
        for node in list(directory.children.values()):
            self._drop(node, directory)

    def _drop(self, node: Node, parent: Node) -> None:
        """Forget a node that nothing pins."""
        pinned = node.inodes or node.children or node.held is not None or not node.committed
        if not pinned and parent.children.get(node.name) is node:
            del parent.children[node.name]
            self._loaded.pop(node, None)
            if self.by_id.get(node.id) is node:
                del self.by_id[node.id]
