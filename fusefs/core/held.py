"""Attributes that are answered before they are stored.

Decided here and only here: what becomes of a mode, an owner or a time that chmod, chown or utimensat set while nobody
else follows the namespace (`Namespace.alone`). tar sets two of them for each directory, git one for each object that
it copies, and each would be a statement and its answer. So they are held for a moment (`Mounted.store_held`) and
stored many in one statement; what depends on them asks for `store` first: a commit of the file, a rename over it,
fsync, and whoever comes to follow.

What cannot be stored stays held. Only the end of the daemon loses it, as the end of a machine loses what no fsync asked
for; the log says how much.

Threading: one trio thread. `add` does not await.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from fusefs.core.attributes import now_ns
from fusefs.core.tree import Node
from fusefs.db.pool import Database
from fusefs.rules.model import NO_ATTRS, Attrs, NodeRow
from fusefs.rules.scope import Scope
from fusefs.store import files

_BATCH = 500
"""Rows of one statement: some 10 ms of Postgres, during which it locks them."""


class Held:
    """What one namespace holds.

    Args:
        stored: takes the row of a node whose attributes are stored.
        wake: called when there is something to store.
    """

    def __init__(
        self, db: Database, scope: Scope, stored: Callable[[Node, NodeRow], None], wake: Callable[[], None]
    ) -> None:
        self._db = db
        self._scope = scope
        self._stored = stored
        self._wake = wake
        self._nodes: dict[Node, None] = {}
        self._storing = trio.Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node, attrs: Attrs) -> None:
        """Hold what was set of a node, beside what is held of it already."""
        node.held = (NO_ATTRS if node.held is None else node.held).then(attrs)
        node.ctime_ns = max(node.ctime_ns, now_ns())
        self._nodes[node] = None
        self._wake()

    async def store(self) -> None:
        """Return when all that was held is in Postgres, or its row is gone. Raises FsError; the rest stays held."""
        if not self._nodes and not self._storing.locked():
            return
        async with self._storing:
            due = list(self._nodes)
            for at in range(0, len(due), _BATCH):
                await self._store(due[at : at + _BATCH])

    async def drop(self, node: Node) -> None:
        """Hold nothing of a node any more: it is about to be deleted."""
        self._nodes.pop(node, None)
        async with self._storing:  # a statement that is under way must not meet a lineage that goes on
            node.held = None

    async def _store(self, nodes: list[Node]) -> None:
        sent: dict[str, Node] = {}
        changes = []
        for node in nodes:
            del self._nodes[node]
            if node.gone or node.held is None:
                node.held = None
                continue
            sent[node.id] = node
            changes.append(files.AttrsChange(node.path, node.id, node.held))
        if not changes:
            return
        try:
            rows = await files.set_attrs(self._db, self._scope, changes)
        except BaseException:
            for node in sent.values():
                self._nodes[node] = None
            raise
        for node_id, node in sent.items():
            if node not in self._nodes:  # else set again meanwhile
                node.held = None
            row = rows.get(node_id)
            if row is not None and node.id == node_id and not node.gone:
                self._stored(node, row)
