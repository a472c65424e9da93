"""Which versions of which files one session has seen through its tools.

Decided here and only here: what a write of a session's tools expects of the file (HF-09). What was read or written
counts as seen; a listing, a search and a change of times do not. In memory and bounded: who has seen nothing decides
anew.

Threading: one trio thread; only `write` awaits.
"""

from __future__ import annotations

from cachetools import LRUCache

from fusefs.rules.errors import NotFound
from fusefs.rules.model import NodeRow
from fusefs.services.backend import Backend, Seen, Unseen, WriteResult

_FILES = 10_000


class SeenVersions:
    """What one session has seen, by lineage and by path."""

    def __init__(self) -> None:
        self._versions: LRUCache[str, int] = LRUCache(_FILES)
        self._at: LRUCache[str, str] = LRUCache(_FILES)

    def note(self, path: str, seen: Seen) -> None:
        """The session was given this version, or wrote it."""
        self._versions[seen.id] = max(seen.version, self._versions.get(seen.id, 0))
        self._at[path] = seen.id

    def forget(self, path: str) -> None:
        """The session was told that nothing is at a path any more."""
        self._at.pop(path, None)

    def at(self, path: str) -> Seen | None:
        """What the session saw at a path; None: nothing."""
        node_id = self._at.get(path)
        return None if node_id is None else Seen(node_id, self._versions.get(node_id, 0))

    async def write(self, backend: Backend, path: str, content: str | bytes) -> WriteResult:
        """Write a whole file as the session may: over what it has seen, over what it has seen nothing of, or anew.

        Args:
            path: in its normal form.

        Raises what `Backend.write` raises.
        """
        try:
            node = await backend.stat(path)
        except NotFound:
            node = None
        done = await backend.write(path, content, self.expected(path, node))
        self.note(path, done.seen)
        return done

    def expected(self, path: str, node: NodeRow | None) -> Seen | Unseen:
        """What a write of the session expects at a path.

        Args:
            node: what is there now; None: nothing.
        """
        seen = self.at(path)
        if seen is None and node is not None and node.id in self._versions:
            seen = Seen(node.id, self._versions[node.id])
        if seen is not None:
            return seen
        return Unseen.ABSENT if node is None else Unseen.ANY
