"""Contents by (lineage, version): immutable, so never invalidated, only evicted.

Decided here and only here: how much is kept, and which siblings are fetched together.

Threading: one trio thread; only `Reader.fetch` awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from itertools import chain

import trio
from cachetools import LRUCache

from fusefs import telemetry
from fusefs.core.tree import Node
from fusefs.rules.model import Kind

Key = tuple[str, int]
_OVERHEAD = 200
"""Bytes of one entry beside its content, so that many empty files count too."""
_BATCH_FILES = 128
_BATCH_BYTES = 2 * 1024 * 1024


class Contents:
    """An LRU of contents, bounded in bytes, shared by all namespaces of a daemon."""

    def __init__(self, max_bytes: int) -> None:
        self._cache: LRUCache[Key, bytes] = LRUCache(max_bytes, getsizeof=lambda content: len(content) + _OVERHEAD)

    def get(self, node_id: str, version: int) -> bytes | None:
        return self._cache.get((node_id, version))

    def put(self, node_id: str, version: int, content: bytes) -> None:
        if len(content) + _OVERHEAD <= self._cache.maxsize:
            self._cache[node_id, version] = content

    def clear(self) -> None:
        """Forget everything: a (lineage, version) may stand for other bytes from now on."""
        self._cache.clear()

    @property
    def bytes(self) -> int:
        return int(self._cache.currsize)


class Reader:
    """Fetches contents of one namespace; a directory read file by file is fetched in batches."""

    def __init__(
        self, contents: Contents, fetch: Callable[[list[str]], Awaitable[dict[str, tuple[int, bytes]]]]
    ) -> None:
        self._contents = contents
        self._fetch = fetch
        self._under_way: dict[str, trio.Event] = {}
        self._sweep_of: Node | None = None
        self._sweep: Iterator[Node] | None = None
        self._missed_in: Node | None = None

    async def fetch(self, node: Node) -> tuple[int, bytes] | None:
        """Version and content as Postgres has them now; None when the row is gone. Siblings that are
        likely to be read next come along."""
        event = self._under_way.get(node.id)
        if event is not None:
            await event.wait()
            content = self._contents.get(node.id, node.version)
            if content is not None:
                return node.version, content
        wanted = [node.id, *self._next_siblings(node)]
        event = trio.Event()
        for each in wanted:
            self._under_way[each] = event
        try:
            found = await self._fetch(wanted)
        finally:
            for each in wanted:
                if self._under_way.get(each) is event:
                    del self._under_way[each]
            event.set()
        for node_id, (version, content) in found.items():
            self._contents.put(node_id, version, content)
        telemetry.counters.cache_misses["content"] += 1
        return found.get(node.id)

    def _next_siblings(self, node: Node) -> list[str]:
        """The second miss in one directory starts a sweep over it; so does the first miss in another
        directory while a sweep is on, as grep -r makes: that one goes on into the directories beside it."""
        parent = node.parent
        if parent is None or node.size > _BATCH_BYTES:
            return []
        if self._sweep_of is not parent:
            sweeping = self._sweep_of is not None
            again = self._missed_in is parent
            self._missed_in = parent
            if not (sweeping or again):
                return []
            self._sweep_of = parent
            self._sweep = chain([*parent.children.values()], _beside(parent) if sweeping else ())
            for each in self._sweep:
                if each is node:
                    break
        batch: list[str] = []
        size = 0
        assert self._sweep is not None
        for each in self._sweep:
            if each.kind is not Kind.FILE or not each.committed or each.gone or each is node:
                continue
            if each.size > _BATCH_BYTES // 4 or self._contents.get(each.id, each.version) is not None:
                continue
            if size + each.size > _BATCH_BYTES or len(batch) >= _BATCH_FILES:
                self._sweep = chain([each], self._sweep)
                break
            batch.append(each.id)
            size += each.size
        return batch


def _beside(directory: Node) -> Iterator[Node]:
    """What is in the directories that follow one in its own, as far as they are known."""
    above = directory.parent
    if above is not None:
        following = iter([*above.children.values()])
        for each in following:
            if each is directory:
                break
        for each in following:
            yield from [*each.children.values()]
