"""Attributes that are answered before they are stored.

Decided here and only here: what becomes of a mode, an owner or a time that chmod, chown or utimensat set while nobody
else follows the namespace (`Namespace.alone`). tar sets two of them for each directory, git one for each object that
it copies, and each would be a statement and its answer. So they are held for a moment (`Mounted.store_held`) and
stored many in one statement; what depends on them asks for `store` first: a commit of the file, fsync, and whoever
comes to follow. A lineage that ends or changes hands does so under `still`.

The statement waits for no lock: it holds those of other rows, and a directory's move takes them in another order. What
another program has locked, and what Postgres does not take, stays held. Only the end of the daemon loses it, as the end
of a machine loses what no fsync asked for; the log says how much.

Threading: one trio thread. `add` does not await.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from fusefs.core.attributes import now_ns
from fusefs.core.filesystem import Guard
from fusefs.core.tree import Node
from fusefs.db.pool import Database
from fusefs.rules.errors import FsError, Unavailable
from fusefs.rules.model import NO_ATTRS, Attrs, NodeRow
from fusefs.rules.scope import Scope
from fusefs.store import files

_BATCH = 500
"""Rows of one statement: some 40 ms of Postgres, during which it locks them."""
_PAUSE_S = 0.02
_PATIENCE_S = 5.0
"""How long who waits for `store` waits for another program's lock, and how often it looks."""
_TRIES = 5
"""Rounds that a node is sent whose row is not there: it may be about to turn out to be another's (a rename over)."""


class Held:
    """What one namespace holds.

    Args:
        stored: takes the row of a node whose attributes are stored; None: it is gone.
        wake: called when there is something to store.
    """

    def __init__(
        self, db: Database, scope: Scope, stored: Callable[[Node, NodeRow | None], None], wake: Callable[[], None]
    ) -> None:
        self._db = db
        self._scope = scope
        self._stored = stored
        self._wake = wake
        # Of each node that is not on its way: how often it was sent and not found.
        self._nodes: dict[Node, int] = {}
        self._sent: dict[Node, str] = {}
        self._storing = Guard()
        # Of the last round: what stays, since its row is locked or was not found; when it began, if it failed, and how.
        self._left: set[Node] = set()
        self._failed: tuple[float, FsError] | None = None

    def __len__(self) -> int:
        return len(self._nodes.keys() | self._sent.keys())

    def add(self, node: Node, attrs: Attrs) -> None:
        """Hold what was set of a node, beside what is held of it already."""
        node.held = (NO_ATTRS if node.held is None else node.held).then(attrs)
        node.show_held()
        node.ctime_ns = max(node.ctime_ns, now_ns())
        self._nodes[node] = 0
        self._wake()

    def still(self) -> AbstractAsyncContextManager[None]:
        """Nothing is on its way to Postgres, or is sent, meanwhile."""
        return self._storing

    async def store(self, node: Node | None = None) -> None:
        """Return when all that is held now, or all of one node, is in Postgres, or its row is gone.

        Raises FsError, with the rest held still: Unavailable where another program has a row locked for long.
        """
        if node is not None and node.held is None:
            return
        due = {node} if node is not None else {*self._nodes, *self._sent}
        began = trio.current_time()
        while due:
            await self.store_once(began)
            due &= self._left  # what was set again meanwhile is none of the caller's business
            if due and trio.current_time() > began + _PATIENCE_S:
                raise Unavailable("another program has the row locked")
            if due:
                await trio.sleep(_PAUSE_S)

    async def store_once(self, asked_at: float) -> bool:
        """Send all that is held. Returns whether something stays (`store` waits for that). Raises FsError.

        Args:
            asked_at: in trio's time. A failure of what was sent since then counts: not everyone who waits tries anew.
        """
        async with self._storing:
            if self._failed is not None and self._failed[0] >= asked_at:
                raise copy.copy(self._failed[1])
            began, self._failed, self._left = trio.current_time(), None, set()
            due = list(self._nodes)
            try:
                for at in range(0, len(due), _BATCH):
                    await self._send(due[at : at + _BATCH])
            except FsError as error:
                self._failed = began, error
                raise
            return bool(self._left)

    async def _send(self, nodes: list[Node]) -> None:
        tries = {node: self._nodes.pop(node) for node in nodes}
        changes = []
        for node in nodes:
            if node.gone or node.held is None or node.held == NO_ATTRS:
                node.held = None
            else:
                self._sent[node] = node.id
                changes.append(files.AttrsChange(node.path, node.id, node.held))
        if not changes:
            return
        try:
            rows = await files.set_attrs(self._db, self._scope, changes, wait=False)
        except BaseException:
            for node in self._sent:
                self._nodes.setdefault(node, tries[node])
            self._sent.clear()
            raise
        sent, self._sent = self._sent, {}
        for node, node_id in sent.items():
            row, locked = rows.get(node_id, (None, False))
            missed = row is None and not node.gone
            if locked or (missed and tries[node] < _TRIES):
                self._nodes.setdefault(node, tries[node] + missed)
                self._left.add(node)
                continue
            if node not in self._nodes:  # else set again meanwhile
                node.held = None
            if node.id == node_id and not node.gone:
                self._stored(node, row)
