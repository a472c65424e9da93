"""The files of one scope as eight operations and what adapters need beside them, without a mount (HF-01).

Decided here and only here: what a caller must say before it changes a file, how symlinks are followed, and that the
bytes of a refused write are kept. The doors above translate; what may be done where is decided in `rules.paths`.

No write is blind. The caller passes what it has seen of the file, or says that it wants a new one, or that it takes
whatever is there. A write is refused when somebody else changes the file at the same moment, whatever was said.

Paths are absolute in the namespace. What is read at `/large_tool_results/ID` is the caller's own session's result
(`paths.own_result`).

Threading: belongs to the trio thread of its database; any number of tasks may use one at once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from fusefs import telemetry
from fusefs.db.pool import Database
from fusefs.rules import matching, paths, text
from fusefs.rules.config import Limits
from fusefs.rules.errors import (
    BadText,
    Exists,
    FsError,
    IsADirectory,
    NotADirectory,
    NotFound,
    NotSupported,
    StaleVersion,
)
from fusefs.rules.model import Attrs, Commit, Kind, NodeRow
from fusefs.rules.paths import Op
from fusefs.rules.scope import Scope
from fusefs.store import files, search, versions

_MAX_LINKS = 40
"""Symlinks followed on the way to one file, as Linux does."""
_EDIT_ATTEMPTS = 50
"""Of edits that meet at one file one succeeds in each round, so as many may meet."""
_NEW_FILE_MODE = 0o644
_NEW_DIRECTORY_MODE = 0o755

_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a caller knows of a file: its lineage and the version whose content it saw."""

    id: str
    version: int


class Unseen(Enum):
    """What a caller decides about a file of which it has seen nothing."""

    ABSENT = "absent"
    """There must be none."""
    ANY = "any"
    """It is made, or whatever is there is replaced; the replaced content stays in the history."""


Expected = Seen | Unseen


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a directory. `target`: of a symlink, else None."""

    node: NodeRow
    target: str | None


@dataclass(frozen=True, slots=True)
class Content:
    """A whole file. `text` is None where the bytes are no UTF-8 text without NUL."""

    node: NodeRow
    text: str | None
    data: bytes

    @property
    def seen(self) -> Seen:
        return Seen(self.node.id, self.node.version)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Some lines of a file. `page` is None where the content is not text."""

    node: NodeRow
    page: text.Page | None

    @property
    def seen(self) -> Seen:
        return Seen(self.node.id, self.node.version)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A file after a write. `size` in bytes; `seen` is what the writer knows of it now."""

    path: str
    seen: Seen
    size: int
    created: bool


@dataclass(frozen=True, slots=True)
class EditResult:
    """A file after an edit: how many places were replaced, and in which line the first of them begins."""

    path: str
    seen: Seen
    size: int
    count: int
    line: int


Found = TypeVar("Found", NodeRow, files.Loaded)


class Backend:
    """The files that one scope may see.

    Args:
        db: an open database; the caller closes it.
    """

    def __init__(self, db: Database, scope: Scope, limits: Limits | None = None) -> None:
        self.db = db
        self.scope = scope
        self.limits = limits or Limits()

    def path(self, path: str) -> str:
        """The normal form of a path that a caller gave. Raises BadPath, BadName, PathTooLong."""
        return paths.normalise(path, self.limits)

    async def resolve(self, path: str) -> str:
        """The path that a path leads to, symlinks followed; nothing need be there. Raises as `path`,
        and NotSupported."""
        return await self._follow(self._readable(path))

    # -- Looking -----------------------------------------------------------------------------------

    async def ls(self, path: str) -> tuple[Listed, ...]:
        """The entries of a directory that the scope may see, by name. Raises NotFound, NotADirectory."""
        node = await self._node(path)
        if node.kind is not Kind.DIR:
            raise NotADirectory(path=node.path)
        listing = await files.load_directory(self.db, self.scope, node.path)
        targets = {node_id: raw.decode(errors="replace") for node_id, raw in listing.targets.items()}
        seen = [entry for entry in listing.entries if paths.visible(self.scope, entry.path)]
        return tuple(Listed(entry, targets.get(entry.id)) for entry in sorted(seen, key=lambda entry: entry.path))

    async def stat(self, path: str) -> NodeRow:
        """What is at a path; of a symlink the symlink itself. Raises NotFound."""
        path = self._readable(path)
        if path == "/":
            return _root()
        try:
            return await files.stat(self.db, self.scope, path)
        except NotFound:
            parent, name = paths.split(path)
            real = await self._follow(parent)
            if real == parent:
                raise
            return await files.stat(self.db, self.scope, paths.join(real, name))

    async def read(self, path: str, *, offset: int = 1, limit: int = text.DEFAULT_LIMIT, column: int = 1) -> ReadResult:
        """Some lines of a file; see `rules.text.read_page` for the arguments.

        Raises NotFound, IsADirectory, NotSupported for what is no file.
        """
        loaded = await self._load(path)
        page = text.read_page(loaded.text, offset=offset, limit=limit, column=column) if loaded.raw is None else None
        return ReadResult(loaded.node, page)

    async def read_bytes(self, path: str) -> Content:
        """A whole file. Raises NotFound, IsADirectory, NotSupported for what is no file."""
        loaded = await self._load(path)
        return Content(loaded.node, loaded.text if loaded.raw is None else None, loaded.content)

    async def glob(self, pattern: str, path: str = "/", *, limit: int = search.MAX_MATCHES) -> search.Files:
        """The files below a directory whose paths match; see `store.search.glob`."""
        return await search.glob(self.db, self.scope, pattern, (await self._node(path)).path, limit)

    async def grep(
        self,
        pattern: str,
        path: str = "/",
        *,
        include: str | None = None,
        literal: bool = False,
        limit: int = search.MAX_MATCHES,
    ) -> search.Matches:
        """The lines below a path that match; see `store.search.grep`."""
        root = (await self._node(path)).path
        return await search.grep(self.db, self.scope, pattern, root, include=include, literal=literal, limit=limit)

    # -- Changing ----------------------------------------------------------------------------------

    async def write(self, path: str, content: str | bytes, expected: Expected) -> WriteResult:
        """Write a whole file; directories above it are made.

        Args:
            expected: what the caller has seen, or its decision about a file of which it has seen nothing.

        Raises StaleVersion when the file is not at the version expected, or is changed at the same moment: the bytes
        are kept as a conflict. Exists for ABSENT. IsADirectory, NotSupported, Denied, TooLarge, OverQuota.
        """
        data = _encoded(content)
        path = self.path(path)
        files.check_size(self.limits, path, len(data))
        try:
            return await self._write(path, data, expected)
        except StaleVersion as error:
            await self._keep(error, path, expected.id if isinstance(expected, Seen) else None, data)
            raise

    async def edit(
        self, path: str, old: str, new: str, *, replace_all: bool = False, expected: Seen | None = None
    ) -> EditResult:
        """Replace an exact text in a file (`rules.matching.replace`).

        Args:
            expected: what the caller has seen of the file. Without it the edit is made on whatever is there, and made
                again where somebody else was faster: it names the text that it replaces, so nothing is lost.

        Raises NoMatch, NotUnique, StaleVersion, NotSupported for what is no text, and what `write` raises.
        """
        for attempt in range(_EDIT_ATTEMPTS):
            try:
                return await self._edit_once(path, old, new, replace_all=replace_all, expected=expected)
            except StaleVersion:
                if expected is not None or attempt == _EDIT_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def delete(self, path: str, *, recursive: bool = False) -> int:
        """Delete a file, or a directory; the contents stay in the history. Returns how many rows went.

        Args:
            recursive: with what is in the directory.

        Raises NotFound, NotEmpty, Denied; what was deleted before a refusal stays deleted.
        """
        node = await self.stat(path)
        if node.path == "/":
            raise NotSupported("the root cannot be deleted", path="/")
        count = 0
        if node.kind is Kind.DIR and recursive:
            for entry in (await files.load_directory(self.db, self.scope, node.path)).entries:
                if paths.visible(self.scope, entry.path):
                    count += await self.delete(entry.path, recursive=True)
        await files.delete(self.db, self.scope, node.path, node.id)
        return count + 1

    async def rename(self, source: str, target: str) -> NodeRow:
        """Move a file or directory to a name that is free; directories above it are made. Raises NotFound, Exists."""
        node = await self.stat(source)
        to = self.path(target)
        await versions.make_parents(self.db, self.scope, self.limits, to)
        done = await files.rename(
            self.db, self.scope, self.limits, (node.id, node.path), (None, to), expected=None, mode="noreplace"
        )
        return await self.stat(to) if done is None else done.row

    async def mkdir(self, path: str) -> None:
        """Make a directory and those above it. Raises Exists, NotADirectory, Denied."""
        path = self.path(path)
        await versions.make_parents(self.db, self.scope, self.limits, path)
        (ino,) = await files.reserve_inos(self.db, self.scope.tenant_id, 1)
        attrs = Attrs(mode=_NEW_DIRECTORY_MODE, mtime_ns=time.time_ns())
        await files.claim(self.db, self.scope, self.limits, path, Kind.DIR, ino=ino, attrs=attrs)

    # -- Inside ------------------------------------------------------------------------------------

    async def _edit_once(
        self, path: str, old: str, new: str, *, replace_all: bool, expected: Seen | None
    ) -> EditResult:
        path = self.path(path)
        with telemetry.operation("edit", self.scope, path):
            loaded = await self._load(path)
            node = loaded.node
            paths.check(self.scope, Op.WRITE, node.path)
            if expected is not None and expected != Seen(node.id, node.version):
                raise files.superseded(node.path, expected.version, node.version)
            if loaded.raw is not None:
                raise NotSupported("the file is not text and cannot be edited as such", path=node.path)
            try:
                done = matching.replace(loaded.text, old, new, replace_all=replace_all)
            except FsError as error:
                error.path = node.path
                raise
            data = _encoded(done.text)
            try:
                written = await self._replace(node.path, data, Seen(node.id, node.version), node.size)
            except StaleVersion as error:
                if expected is not None:
                    await self._keep(error, node.path, node.id, data)
                raise
        return EditResult(node.path, written.seen, written.size, done.count, done.line)

    async def _write(self, path: str, data: bytes, expected: Expected) -> WriteResult:
        try:
            node = await self._node(path)
        except NotFound:
            return await self._create(await self._follow(path), data, expected)
        if expected is Unseen.ABSENT:
            raise Exists(path=node.path)
        _require_file(node)
        seen = expected if isinstance(expected, Seen) else Seen(node.id, node.version)
        return await self._replace(node.path, data, seen, node.size)

    async def _create(self, path: str, data: bytes, expected: Expected) -> WriteResult:
        if isinstance(expected, Seen):
            raise files.superseded(path, expected.version, None)
        paths.check(self.scope, Op.CREATE, path)
        await versions.make_parents(self.db, self.scope, self.limits, path)
        (ino,) = await files.reserve_inos(self.db, self.scope.tenant_id, 1)
        attrs = Attrs(mode=_NEW_FILE_MODE, mtime_ns=time.time_ns())
        try:
            done = await files.create(self.db, self.scope, self.limits, path, data, ino=ino, attrs=attrs)
        except StaleVersion:
            if expected is Unseen.ABSENT:
                raise Exists(path=path) from None
            raise
        return _written(path, done, created=True)

    async def _replace(self, path: str, data: bytes, seen: Seen, base_size: int) -> WriteResult:
        done = await files.write(
            self.db,
            self.scope,
            self.limits,
            path,
            seen.id,
            seen.version,
            data,
            attrs=Attrs(mtime_ns=time.time_ns()),
            stay=True,
            base_size=base_size,
        )
        return _written(path, done, created=False)

    async def _keep(self, error: StaleVersion, path: str, node_id: str | None, data: bytes) -> None:
        """Keep the bytes of a lost race as a conflict (BY-01), and say where in the error."""
        telemetry.counters.conflicts += 1
        try:
            conflict_id = await files.record_conflict(
                self.db,
                self.scope,
                path,
                node_id=node_id,
                expected=error.expected,
                actual=error.actual,
                op="write",
                content=data,
            )
        except FsError as failure:
            _log.warning("fs.conflict_not_kept", **self.scope.log_context(), path=path, reason=type(failure).__name__)
            error.given_hint += " What you wrote was not kept: write it again."
        else:
            error.given_hint += f" What you wrote is kept as conflict {conflict_id}."

    def _readable(self, path: str) -> str:
        return paths.own_result(self.scope, self.path(path))

    async def _node(self, path: str) -> NodeRow:
        """What is at a path, symlinks followed. Raises NotFound."""
        return await self._at(self._readable(path), self._stat)

    async def _load(self, path: str) -> files.Loaded:
        """A file with its content, symlinks followed. Raises NotFound, IsADirectory, NotSupported."""
        loaded = await self._at(self._readable(path), self._fetch)
        _require_file(loaded.node)
        return loaded

    async def _stat(self, path: str) -> NodeRow:
        return _root() if path == "/" else await files.stat(self.db, self.scope, path)

    async def _fetch(self, path: str) -> files.Loaded:
        if path == "/":
            raise IsADirectory(path="/")
        return await files.load(self.db, self.scope, path)

    async def _at(self, path: str, fetch: Callable[[str], Awaitable[Found]]) -> Found:
        """What is where a path leads to; one trip where no symlink is on the way."""
        try:
            found = await fetch(path)
            if found.kind is not Kind.SYMLINK:
                return found
        except NotFound:
            if path == (real := await self._follow(path)):
                raise
        else:
            real = await self._follow(path)
        return await fetch(real)

    async def _follow(self, path: str) -> str:
        """The path without symlinks that a path leads to; nothing need be there.

        Raises NotSupported for an absolute target, which means something only where the directory is mounted, and for
        one that leads out of the namespace or in circles.
        """
        for _ in range(_MAX_LINKS):
            candidates = [each for each in _prefixes(path) if paths.visible(self.scope, each)]
            links = await files.links(self.db, self.scope, candidates) if candidates else {}
            if not links:
                return path
            link, target = next(iter(links.items()))
            if target.startswith("/"):
                raise NotSupported("the symlink leads to an absolute path, which only a mount could follow", path=link)
            path = self._resolve(link, paths.split(link)[0] + "/" + target + path[len(link) :])
        raise NotSupported("too many symlinks on the way", path=path)

    def _resolve(self, link: str, joined: str) -> str:
        parts: list[str] = []
        for part in joined.split("/"):
            if part == "..":
                if not parts:
                    raise NotSupported("the symlink leads out of the namespace", path=link)
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        return paths.normalise("/" + "/".join(parts), self.limits)


def _prefixes(path: str) -> list[str]:
    """A path and the directories above it, without the root."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]


def _encoded(content: str | bytes) -> bytes:
    """Raises BadText for text that is not valid Unicode."""
    if isinstance(content, bytes):
        return content
    try:
        return content.encode()
    except UnicodeEncodeError:
        raise BadText() from None


def _require_file(node: NodeRow) -> None:
    if node.kind is Kind.DIR:
        raise IsADirectory(path=node.path)
    if node.kind is not Kind.FILE:
        raise NotSupported(f"a {node.kind.value}, not a file", path=node.path)


def _root() -> NodeRow:
    """The root, which has no row."""
    return NodeRow("", "/", Kind.DIR, 1, 1, 0, _NEW_DIRECTORY_MODE, None, None, 0, 0, "")


def _written(path: str, done: Commit, *, created: bool) -> WriteResult:
    return WriteResult(path, Seen(done.id, done.version), done.size, created)
