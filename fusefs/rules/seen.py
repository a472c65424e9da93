"""Which versions of which files a session has seen (HF-09).

Decided here and only here: what is kept of it, and for how many files. Who calls it, a mount or the tools, decides what
counts as seen; a listing, a search and a change of times never do. In memory: who starts anew has seen nothing.

Threading: belongs to one session's thread; no method awaits.
"""

from __future__ import annotations

from collections import OrderedDict

_LINEAGES = 100_000


class SeenVersions:
    """The newest version that a session has seen, by lineage, and the lineage that it saw at a path."""

    __slots__ = ("_at", "_versions")

    def __init__(self) -> None:
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._at: OrderedDict[str, str] = OrderedDict()

    def use(self, node_id: str, version: int) -> bool:
        """Whether the session has seen this version, or a newer one, and is given it again."""
        known = self._versions.get(node_id)
        if known is None:
            return False
        self._versions.move_to_end(node_id)
        return known >= version

    def note(self, path: str, node_id: str, version: int) -> None:
        """The session was given this version, or wrote it. An older one than it has seen changes nothing."""
        if not self.use(node_id, version):
            self.remember(path, node_id, version)

    def remember(self, path: str, node_id: str, version: int) -> None:
        """The session was given a version that it had not seen (`use`)."""
        self._versions[node_id] = version
        self._at[path] = node_id
        for each in (self._versions, self._at):
            while len(each) > _LINEAGES:
                each.popitem(last=False)

    def version(self, node_id: str) -> int | None:
        """The newest version seen of a lineage; None: nothing of it."""
        return self._versions.get(node_id)

    def lineage(self, path: str) -> str | None:
        """The lineage that was seen at a path last; None: nothing was, or the session itself took it away."""
        return self._at.get(path)

    def lower(self, node_id: str, version: int) -> None:
        """The lineage is at an older version than was seen: the numbers of the newer ones are given again."""
        if self._versions.get(node_id, -1) > version:
            self._versions[node_id] = version

    def leave(self, path: str) -> None:
        """Whatever was seen at a path is known not to be there."""
        self._at.pop(path, None)

    def clear(self) -> None:
        self._versions.clear()
        self._at.clear()
