"""A whole namespace out and in again, one node at a time.

Decided here and only here: what an export holds, in which order, and when an import may replace what is there.
The form of the archive (tar) is the command line's.

An export is as consistent as `tar` of a live directory: each file is whole and of one moment, all of them are
not of the same one.

Threading: stateless functions; an `Importer` belongs to one task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from fusefs.db.pool import Database
from fusefs.db.queries import query
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, NotFound
from fusefs.rules.model import Attrs, Kind
from fusefs.rules.scope import Scope
from fusefs.store import files, versions

_LIST_NODES = query("list_nodes")
_FETCH_NODES = query("fetch_nodes")

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_NODES = 200
_INO_BLOCK = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """One node with its content: the bytes of a file, the target of a symlink, nothing of others.

    `uid` and `gid` None: whoever mounts. `mtime_ns` in nanoseconds since 1970.
    """

    path: str
    kind: Kind
    mode: int
    uid: int | None
    gid: int | None
    mtime_ns: int
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Size:
    """How much an export will hold."""

    nodes: int
    bytes: int


async def measure(db: Database, scope: Scope) -> Size:
    nodes = await _nodes(db, scope)
    return Size(len(nodes), sum(size for _, size in nodes))


async def _nodes(db: Database, scope: Scope) -> list[tuple[str, int]]:
    rows = await db.run(scope.tenant_id, _LIST_NODES, scope.tenant_id, scope.agent_id)
    return [(row[0], row[5]) for row in rows if paths.visible(scope, row[1])]


async def export(db: Database, scope: Scope) -> AsyncIterator[Entry]:
    """Every node that the scope may see, directories before what is in them; 8 MiB in memory at a time."""
    batch: list[str] = []
    held = 0
    for node_id, size in await _nodes(db, scope):
        if batch and (held + size > _BATCH_BYTES or len(batch) == _BATCH_NODES):
            for entry in await _fetch(db, scope, batch):
                yield entry
            batch, held = [], 0
        batch.append(node_id)
        held += size
    for entry in await _fetch(db, scope, batch) if batch else []:
        yield entry


async def _fetch(db: Database, scope: Scope, ids: list[str]) -> list[Entry]:
    rows = await db.run(scope.tenant_id, _FETCH_NODES, scope.tenant_id, scope.agent_id, ids)
    return [
        Entry(
            path=row[1],
            kind=Kind(row[2]),
            mode=row[3],
            uid=row[4],
            gid=row[5],
            mtime_ns=row[6],
            content=row[7].encode() if row[8] is None else row[8],
        )
        for row in rows
        if paths.visible(scope, row[1])
    ]


class Importer:
    """Puts entries into a namespace.

    Args:
        replace: whether a file with other content may be replaced. The version replaced stays in the history.
    """

    def __init__(self, db: Database, scope: Scope, limits: Limits, *, replace: bool) -> None:
        self._db = db
        self._scope = scope
        self._limits = limits
        self._replace = replace
        self._inos: list[int] = []
        self._directories: set[str] = {"/"}

    async def put(self, entry: Entry) -> bool:
        """Put one node. Returns False when it is there already, the same in kind and content.

        Directories above it are made. Raises Exists where something else is there and `replace` was not asked
        for, StaleVersion where it is changed at the same moment, TooLarge, OverQuota, BadPath, PathTooLong.
        """
        path = paths.normalise(entry.path, self._limits)
        if path == "/":
            return False
        attrs = Attrs(mode=entry.mode, uid=entry.uid, gid=entry.gid, mtime_ns=entry.mtime_ns)
        await self._make_parents(path)
        try:
            node = await files.stat(self._db, self._scope, path)
        except NotFound:
            await self._make(path, entry, attrs)
            return True
        if node.kind is entry.kind and await self._same(node.id, entry):
            if not await files.set_attrs(self._db, self._scope, [files.AttrsChange(path, node.id, attrs)]):
                raise NotFound(path=path)
            if entry.kind is Kind.DIR:
                self._directories.add(path)
            return False
        if not self._replace:
            raise Exists(
                "it exists already, with other content",
                path=path,
                hint="Pass --replace to replace files; what they hold now stays in their history.",
            )
        if Kind.DIR in (node.kind, entry.kind):
            raise Exists(f"a {node.kind.value} is there, the archive has a {entry.kind.value}", path=path)
        if node.kind is Kind.FILE and entry.kind is Kind.FILE:
            await files.write(
                self._db, self._scope, self._limits, path, node.id, node.version, entry.content, attrs=attrs
            )
        else:
            await files.delete(self._db, self._scope, path, node.id)
            await self._make(path, entry, attrs)
        return True

    async def read(self, path: str) -> bytes:
        """The content of a file of the namespace, for a hard link in the archive. Raises NotFound."""
        node = await files.stat(self._db, self._scope, paths.normalise(path, self._limits))
        found = await files.read(self._db, self._scope, [node.id])
        if node.kind is not Kind.FILE or node.id not in found:
            raise NotFound(path=path)
        return found[node.id][1]

    async def _make(self, path: str, entry: Entry, attrs: Attrs) -> None:
        if not self._inos:
            self._inos = await files.reserve_inos(self._db, self._scope.tenant_id, _INO_BLOCK)
        ino = self._inos.pop()
        if entry.kind is Kind.DIR:
            await files.claim(self._db, self._scope, self._limits, path, Kind.DIR, ino=ino, attrs=attrs)
            self._directories.add(path)
        else:
            await files.create(
                self._db, self._scope, self._limits, path, entry.content, ino=ino, kind=entry.kind, attrs=attrs
            )

    async def _make_parents(self, path: str) -> None:
        parent = paths.split(path)[0]
        if parent not in self._directories:
            await versions.make_parents(self._db, self._scope, self._limits, path)
            self._directories.add(parent)

    async def _same(self, node_id: str, entry: Entry) -> bool:
        if entry.kind not in (Kind.FILE, Kind.SYMLINK):
            return True
        found = (await files.read(self._db, self._scope, [node_id])).get(node_id)
        return found is not None and found[1] == entry.content
