"""A session's changes through tools and adapters: each says what the session has seen of the file (HF-09).

Decided here and only here: what a write expects at a path of which the session has seen nothing, or another file than
is there. What is kept of the versions seen is `rules.seen`'s.

Threading: one trio thread.
"""

from __future__ import annotations

from fusefs.rules.errors import NotFound
from fusefs.rules.seen import SeenVersions
from fusefs.services.backend import Backend, Expected, Seen, Unseen, WriteResult


class SeenFiles:
    """What one session has seen through its calls. Paths are given in their normal form."""

    def __init__(self) -> None:
        self._seen = SeenVersions()

    def note(self, path: str, seen: Seen) -> None:
        """The session was given this version, or wrote it."""
        self._seen.note(path, seen.id, seen.version)

    def forget(self, path: str) -> None:
        """The session was told that nothing is at a path any more."""
        self._seen.leave(path)

    def at(self, path: str) -> Seen | None:
        """What the session saw at a path; None: nothing."""
        node_id = self._seen.lineage(path)
        return None if node_id is None else Seen(node_id, self._seen.version(node_id) or 0)

    async def write(self, backend: Backend, path: str, content: str | bytes) -> WriteResult:
        """Write a whole file: over what the session has seen, over what it has seen nothing of, or anew.

        Raises what `Backend.write` raises.
        """
        done = await backend.write(path, content, self.at(path) or await self._decide(backend, path))
        self.note(path, done.seen)
        return done

    async def _decide(self, backend: Backend, path: str) -> Expected:
        """At a path at which the session has seen nothing; it may know the file from another."""
        try:
            node = await backend.stat(path)
        except NotFound:
            return Unseen.ABSENT
        version = self._seen.version(node.id)
        return Unseen.ANY if version is None else Seen(node.id, version)
