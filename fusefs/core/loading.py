"""Loading directories into the mirror of a namespace.

Decided here and only here: when a listing counts (the directory is still the one that was meant, and nothing became
doubtful meanwhile), and which directories come along with one that is asked for.

Threading: one trio thread. While a directory is being loaded what changes in it is noted (`Node.touched`) and wins over
the listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import trio

from fusefs.core.tree import Node, Tree
from fusefs.db.pool import Database
from fusefs.rules.errors import NotFound, StaleVersion
from fusefs.rules.model import Kind
from fusefs.rules.scope import Scope
from fusefs.store import files

_ATTEMPTS = 8
_WALK = 2
_AHEAD = 32
_AHEAD_ENTRIES = 200
"""Directories that come along, and how many entries each may have: 1 MB at most, and 2 ms of Postgres."""
_ROOMY = 10 * _AHEAD * _AHEAD_ENTRIES
"""A mirror that may know fewer nodes than this loads nothing ahead: it would push out what is about to be read."""
_SCANNED = 20_000
"""Entries of a directory that are looked through for the next ones; in a larger one nothing is loaded ahead."""


class Mirrored(Protocol):
    """Whose directories are loaded: a `Namespace`."""

    db: Database
    scope: Scope
    tree: Tree
    live: bool
    era: int

    async def barrier(self) -> None: ...


class Loader:
    """Loads the directories of one namespace.

    Args:
        fill: takes a listing into the mirror.
    """

    def __init__(self, ns: Mirrored, fill: Callable[[Node, files.Listing], None], max_nodes: int) -> None:
        self._ns = ns
        self._fill = fill
        self._looks_ahead = max_nodes >= _ROOMY
        self._loading: dict[Node, trio.Event] = {}
        self._last: Node | None = None
        self._neighbours = 0

    async def load(self, directory: Node) -> None:
        """Make a directory's children complete. One query; callers at once share it.

        The directory may be moved or deleted while the query is under way: the listing brings its own
        row along, and another row than the one meant is asked for again.
        """
        ns = self._ns
        attempts = 0
        above = False
        while not directory.loaded:
            if directory.gone:
                return
            if (event := self._loading.get(directory)) is not None:
                await event.wait()
                continue
            if not above and directory.parent is not None and not directory.parent.loaded and ns.live:
                # What is above may have moved while nobody listened.
                above = True
                await self.load(directory.parent)
                continue  # another caller may have begun meanwhile
            attempts += not directory.doubted
            if attempts > _ATTEMPTS:
                raise StaleVersion("the directory is being moved about", path=directory.path)
            if await self._load_once(directory):
                return

    async def _load_once(self, directory: Node) -> bool:
        """Ask once. Returns whether the answer counted. Raises NotFound where the directory is not there any more."""
        ns = self._ns
        event = trio.Event()
        ahead = self._next_directories(directory)
        asked = {each: each.path for each in (directory, *ahead)}
        path, era = asked[directory], ns.era
        for each in asked:
            self._loading[each] = event
            each.touched, each.doubted = set(), False
        try:
            found = await files.load_directories(ns.db, ns.scope, path, [asked[each] for each in ahead], _AHEAD_ENTRIES)
            # The one that was asked for comes last: what is filled after it might push it out.
            for each in (*ahead, directory):
                listing = found.get(asked[each])
                counts = listing is not None and self._counts(each, asked[each], era, listing)
                if listing is not None and counts:
                    self._fill(each, listing)
            if not counts:
                await ns.barrier()
            return counts
        except NotFound:
            await ns.barrier()
            if not directory.gone and directory.path == path and era == ns.era:
                ns.tree.detach(directory)
                raise
            return False
        finally:
            for each in asked:
                each.touched = None
                del self._loading[each]
            event.set()

    def _counts(self, directory: Node, path: str, era: int, listing: files.Listing) -> bool:
        """Whether a listing is still of the directory that was meant, and nothing became doubtful meanwhile."""
        own = listing.directory
        same = directory.path == path and era == self._ns.era and (own is None or own.id == directory.id)
        return same and not directory.doubted

    def _next_directories(self, directory: Node) -> list[Node]:
        """What a walk such as find's is likely to list next. It begins with the third of three neighbours, and goes on
        while each directory is below or above the one before, or has a neighbour that is."""
        last, self._last = self._last, directory
        parent = directory.parent
        if last is None or parent is None or not self._ns.live:
            self._neighbours = 0
            return []
        if last.parent is parent:
            self._neighbours += 1
        elif last is not parent and not (parent.parent or parent).is_above(last):
            self._neighbours = 0
        if self._neighbours < _WALK or not self._looks_ahead or len(parent.children) > _SCANNED:
            return []
        return [*islice(self._unloaded_near(directory, parent), _AHEAD)]

    def _unloaded_near(self, directory: Node, parent: Node) -> Iterator[Node]:
        """Those beside it, then those in the directories beside the one above."""
        above = parent.parent
        beside = [] if above is None or len(above.children) > _SCANNED else above.children.values()
        for uncle in (parent, *beside):
            if uncle.loaded and len(uncle.children) <= _SCANNED:
                yield from (each for each in uncle.children.values() if each is not directory and self._is_due(each))

    def _is_due(self, node: Node) -> bool:
        return node.kind is Kind.DIR and node.committed and not node.loaded and node not in self._loading
