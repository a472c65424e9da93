"""The files of one namespace as verbs: load, read, create, write, append, claim, delete, rename.

Decided here and only here: which statement a change is, what it expects of the row that it meets,
and which error a refusal is. The policy of `rules.paths` is applied here, before any statement, so
that every door inherits it. Each change carries a `write_id`: after a lost connection it is applied
exactly once.

Threading: stateless; every function may run at once with any other. The first arguments are always
the database and the scope.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusefs.db.failures import Retryable
from fusefs.db.group_commit import Attempt
from fusefs.db.pool import Database
from fusefs.db.queries import Query, query
from fusefs.db.values import Param
from fusefs.rules import events, paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, NotFound, StaleVersion, TooLarge
from fusefs.rules.model import KINDS, Attrs, Commit, Kind, NodeRow, Renamed
from fusefs.rules.paths import Op
from fusefs.rules.scope import Scope
from fusefs.telemetry import operation

_LOAD_DIRECTORY = query("load_directory")
_LOAD_DIRECTORIES = query("load_directories")
_FETCH_NODE = query("fetch_node")
_FETCH_FILE = query("fetch_file")
_FETCH_LINKS = query("fetch_links")
_FETCH_CONTENTS = query("fetch_contents")
_FETCH_STATE = query("fetch_state")
_COMMIT_CREATE = query("commit_create")
_COMMIT_REVIVE = query("commit_revive")
_COMMIT_WRITE = query("commit_write")
_COMMIT_APPEND = query("commit_append")
_CLAIM_NAME = query("claim_name")
_CLAIM_REVIVED = query("claim_revived")
_DELETE_NODE = query("delete_node")
_RENAME_NODE = query("rename_node")
_SET_ATTRS = query("set_attrs")
_FIND_WRITE = query("find_write")
_FIND_CLAIM = query("find_claim")
_NOBODY_CLAIMS_LATE = query("nobody_claims_late")
_RESERVE_INOS = query("reserve_inos")
_RECORD_CONFLICT = query("record_conflict")

Row = tuple[Any, ...]
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))


def _random_ids() -> Iterator[str]:
    """Random UUIDs, from 4 KiB of the system's randomness at a time: two system calls and two objects less
    for each commit."""
    while True:
        digits = os.urandom(4096).hex()
        for i in range(0, len(digits), 32):
            d = digits[i : i + 32]
            yield f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{_VARIANT[d[16]]}{d[17:20]}-{d[20:]}"


_ids = _random_ids()


def new_id() -> str:
    """A fresh lineage or write_id."""
    return next(_ids)


def text_or_bytes(content: bytes) -> tuple[str | None, bytes | None]:
    """The pair (content, content_bytes) of a row: text where Postgres can hold it as text."""
    if b"\0" in content:
        return None, content
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return None, content


def node_of(row: Row) -> NodeRow:
    """The metadata with which a row begins, in the order of `fetch_node`."""
    return NodeRow(
        id=row[0],
        path=row[1],
        kind=KINDS[row[2]],
        ino=row[3],
        version=row[4],
        size=row[5],
        mode=row[6],
        uid=row[7],
        gid=row[8],
        mtime_ns=row[9],
        ctime_ns=row[10],
        session=row[11],
    )


def _content(text: str, raw: bytes | None) -> bytes:
    return text.encode() if raw is None else raw


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory's own row (None for the root), its entries, and the targets of its symlinks by lineage."""

    directory: NodeRow | None
    entries: list[NodeRow]
    targets: dict[str, bytes]


async def load_directory(db: Database, scope: Scope, path: str) -> Listing:
    """Every entry of a directory, other sessions' included: a mount's mirror serves many sessions and
    filters with `paths.visible`. Raises NotFound where there is no row for the path."""
    with operation("ls", scope, path):
        rows = await db.run(scope.tenant_id, _LOAD_DIRECTORY, scope.tenant_id, scope.agent_id, path)
    return _listing(path, rows)


async def load_directories(
    db: Database, scope: Scope, path: str, more: Sequence[str], more_entries: int
) -> dict[str, Listing]:
    """A directory as by `load_directory`, and others that come along where they are still there and have at most
    `more_entries`, by path. Raises NotFound for the first only."""
    if not more:
        return {path: await load_directory(db, scope, path)}
    with operation("ls", scope, path):
        rows = await db.run(
            scope.tenant_id, _LOAD_DIRECTORIES, scope.tenant_id, scope.agent_id, path, [*more], more_entries + 1
        )
    by_directory: dict[str, list[Row]] = {}
    for row in rows:
        by_directory.setdefault(row[0], []).append(row[1:])
    found = {path: _listing(path, by_directory.get(path, []))}
    for each in more:
        with suppress(NotFound):
            listing = _listing(each, by_directory.get(each, []))
            if len(listing.entries) <= more_entries:
                found[each] = listing
    return found


def _listing(path: str, rows: list[Row]) -> Listing:
    own: NodeRow | None = None
    entries = []
    targets = {}
    for row in rows:
        node = node_of(row)
        if node.path == path:
            own = node
            continue
        entries.append(node)
        if row[12] is not None:
            targets[node.id] = _content(row[12], row[13])
    if own is None and path != "/":
        raise NotFound(path=path)
    return Listing(own, entries, targets)


async def stat(db: Database, scope: Scope, path: str) -> NodeRow:
    """One path's metadata. Raises NotFound."""
    paths.check(scope, Op.READ, path)
    rows = await db.run(scope.tenant_id, _FETCH_NODE, scope.tenant_id, scope.agent_id, path)
    if not rows:
        raise NotFound(path=path)
    return node_of(rows[0])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A row with its content: `text`, or `raw` where that is no text."""

    node: NodeRow
    text: str
    raw: bytes | None

    @property
    def kind(self) -> Kind:
        return self.node.kind

    @property
    def content(self) -> bytes:
        return _content(self.text, self.raw)


async def load(db: Database, scope: Scope, path: str) -> Loaded:
    """What is at a path, with its content, in one query; of a symlink the target. Raises NotFound."""
    paths.check(scope, Op.READ, path)
    with operation("read", scope, path) as op:
        rows = await db.run(scope.tenant_id, _FETCH_FILE, scope.tenant_id, scope.agent_id, path)
        if not rows:
            raise NotFound(path=path)
        (row,) = rows
        op.bytes(row[5])
    return Loaded(node_of(row), row[12], row[13])


async def links(db: Database, scope: Scope, candidates: Sequence[str]) -> dict[str, str]:
    """Those of some paths that are symlinks, the shortest first, with their targets; of targets that are no text
    nothing is known."""
    rows = await db.run(scope.tenant_id, _FETCH_LINKS, scope.tenant_id, scope.agent_id, list(candidates))
    return {row[0]: row[1] for row in rows if row[2] is None}


async def where(db: Database, scope: Scope, node_id: str) -> str | None:
    """The path at which a lineage is now; None where it is gone. For a caller that knew it at another path."""
    rows = await db.run(scope.tenant_id, _FETCH_STATE, scope.tenant_id, scope.agent_id, node_id)
    return str(rows[0][0]) if rows else None


async def exists(db: Database, scope: Scope, path: str) -> bool:
    """Whether there is a row at a path that the scope may know of."""
    try:
        await stat(db, scope, path)
    except NotFound:
        return False
    return True


async def read(db: Database, scope: Scope, ids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    """Version and content of each lineage that still exists, in one query.

    The caller has checked the paths: lineages are not guessable, and a mount reads siblings together.
    """
    with operation("read", scope) as op:
        rows = await db.run(scope.tenant_id, _FETCH_CONTENTS, scope.tenant_id, scope.agent_id, list(ids))
        found = {row[0]: (row[1], _content(row[2], row[3])) for row in rows}
        op.bytes(sum(len(content) for _, content in found.values()))
    return found


def check_size(limits: Limits, path: str, size: int) -> None:
    """Refuse a file over the limit (HF-03). Raises TooLarge."""
    if size > limits.max_file_bytes:
        raise TooLarge(f"{size} bytes, the limit is {limits.max_file_bytes}", path=path)


async def create(
    db: Database,
    scope: Scope,
    limits: Limits,
    path: str,
    content: bytes,
    *,
    ino: int,
    node_id: str | None = None,
    kind: Kind = Kind.FILE,
    attrs: Attrs,
    handle: int | None = None,
    revive: bool = False,
    attempt: Attempt | None = None,
) -> Commit:
    """Insert a row with its content.

    Args:
        attempt: the change, where its outcome may have to be found out later (`settle`).
        node_id: the lineage; a fresh one without it.
        revive: `node_id` is the lineage that this session deleted here a moment ago; go on with it.
        attrs: mode and mtime_ns must be given.

    Raises StaleVersion where the name exists by now, NotFound where the directory is gone.
    """
    paths.check(scope, Op.CREATE, path)
    paths.check_path(path, limits)
    check_size(limits, path, len(content))
    node_id = node_id or new_id()
    attempt = attempt or new_attempt()
    text, raw = text_or_bytes(content)

    with operation("write", scope, path) as op:
        rows = await _commit(
            db,
            scope,
            path,
            attempt,
            attrs,
            _COMMIT_REVIVE if revive else _COMMIT_CREATE,
            (
                scope.tenant_id,
                scope.agent_id,
                node_id,
                path,
                text,
                raw,
                kind.value,
                ino,
                *attrs,
                scope.principal.value,
                scope.session,
                attempt.write_id,
                handle,
            ),
        )
        if not rows:
            current = await _version_at(db, scope, path)
            raise StaleVersion(path=path, expected=None, actual=current)
        op.written(len(content), len(content))
    done = Commit(*rows[0])
    _tell(db, scope, path, kind, done)
    return done


async def write(
    db: Database,
    scope: Scope,
    limits: Limits,
    path: str,
    node_id: str,
    expected: int,
    content: bytes,
    *,
    attrs: Attrs,
    handle: int | None = None,
    op: str = "write",
    policy: Op = Op.WRITE,
    attempt: Attempt | None = None,
    stay: bool = False,
    base_size: int | None = None,
) -> Commit:
    """Replace a lineage's content where it is still at version `expected` (HF-09).

    Args:
        attempt: see `create`.
        stay: it must also still be at `path`. An open file is written wherever it was moved; who knows only its path
            must not follow it to where others rules hold.
        base_size: bytes of the version expected, where that is known.
        op: what the history calls it (`write`, `restore`).
        policy: Op.CREATE where the caller's own handle made the file and still writes it.

    Raises StaleVersion with both versions where it is not, or is gone.
    """
    paths.check(scope, policy, path)
    check_size(limits, path, len(content))
    attempt = attempt or new_attempt()
    text, raw = text_or_bytes(content)

    with operation("write", scope, path) as span:
        rows = await _commit(
            db,
            scope,
            path,
            attempt,
            attrs,
            _COMMIT_WRITE,
            (
                scope.tenant_id,
                scope.agent_id,
                node_id,
                expected,
                text,
                raw,
                attrs.mtime_ns,
                attrs.mode,
                attrs.uid,
                attrs.gid,
                scope.principal.value,
                scope.session,
                attempt.write_id,
                op,
                handle,
                path if stay else None,
            ),
        )
        if not rows:
            actual = await (_version_at(db, scope, path) if stay else _version_of(db, scope, node_id))
            raise superseded(path, expected, actual)
        span.written(len(content), None if base_size is None else len(content) - base_size)
    done = Commit(*rows[0])
    _tell(db, scope, path, Kind.FILE, done)
    return done


def superseded(path: str, expected: int, actual: int | None) -> StaleVersion:
    """The refusal of a write that built on an older version, or on a file that another has taken the place of."""
    if actual == expected:
        return StaleVersion.of_another(path, actual)
    return StaleVersion(path=path, expected=expected, actual=actual)


async def append(
    db: Database,
    scope: Scope,
    limits: Limits,
    path: str,
    node_id: str,
    data: bytes,
    *,
    attrs: Attrs,
    handle: int | None = None,
    policy: Op = Op.WRITE,
    attempt: Attempt | None = None,
) -> Commit:
    """Add bytes to the end of a lineage, whatever its version (BY-03).

    Raises StaleVersion where the lineage is gone, TooLarge where the sum is over the limit.
    """
    paths.check(scope, policy, path)
    attempt = attempt or new_attempt()
    text, _ = text_or_bytes(data)

    with operation("append", scope, path) as op:
        rows = await _commit(
            db,
            scope,
            path,
            attempt,
            attrs,
            _COMMIT_APPEND,
            (
                scope.tenant_id,
                scope.agent_id,
                node_id,
                data,
                text,
                limits.max_file_bytes,
                attrs.mtime_ns,
                attrs.mode,
                attrs.uid,
                attrs.gid,
                scope.principal.value,
                scope.session,
                attempt.write_id,
                handle,
            ),
        )
        if not rows:
            state = await db.run(scope.tenant_id, _FETCH_STATE, scope.tenant_id, scope.agent_id, node_id)
            if state:
                check_size(limits, path, state[0][2] + len(data))
            raise StaleVersion("deleted while you appended to it", path=path)
        op.written(len(data), len(data))
    done = Commit(*rows[0])
    _tell(db, scope, path, Kind.FILE, done)
    return done


async def claim(
    db: Database,
    scope: Scope,
    limits: Limits,
    path: str,
    kind: Kind,
    *,
    ino: int,
    attrs: Attrs,
    revive: str | None = None,
    heard: bool = True,
) -> NodeRow:
    """Take a name before answering: a directory, or an O_EXCL file at version 0.

    Args:
        revive: the lineage that this session deleted here a moment ago; go on with it.
        heard: the mount hears what others announce; one that does not may meet a mount that believes itself alone, and
            has the name without a row (docs/internals/concurrency.md, Claims).

    Raises Exists, NotFound where the directory is gone, NotADirectory; Unavailable where it cannot be known who has the
    name.
    """
    paths.check(scope, Op.MKDIR if kind is Kind.DIR else Op.CREATE, path)
    paths.check_path(path, limits)
    node_id, write_id = revive or new_id(), new_id()

    async def confirm() -> list[Row] | None:
        found = await db.run(scope.tenant_id, _FIND_CLAIM, scope.tenant_id, scope.agent_id, node_id, write_id)
        return found or None

    statement = _CLAIM_NAME if revive is None else _CLAIM_REVIVED
    params = (
        scope.tenant_id,
        scope.agent_id,
        node_id,
        path,
        kind.value,
        ino,
        *attrs,
        scope.principal.value,
        scope.session,
        write_id,
        None,  # no handle has written it yet
    )
    with operation("claim", scope, path):
        if heard:
            rows = await db.write(scope.tenant_id, statement, params, confirm)
        else:
            # Sent again as often as it is lost: it is applied once, since its own row is in its way then.
            rows = await db.repeat(lambda: _claim_unheard(db, scope, statement, params)) or await confirm() or []
        if not rows:
            raise Exists(path=path)
    return node_of(rows[0])


async def _claim_unheard(db: Database, scope: Scope, statement: Query, params: Sequence[Param]) -> list[Row]:
    """Raises Retryable also where another such claim is under way."""
    async with db.transaction(scope.tenant_id) as tx:
        if await tx.run(_NOBODY_CLAIMS_LATE, scope.tenant_id, scope.agent_id) != [(True,)]:
            raise Retryable("another mount may have the name, and cannot be asked")
        return await tx.run(statement, *params)


async def delete(db: Database, scope: Scope, path: str, node_id: str) -> int:
    """Delete one lineage; its content stays in the history. Returns the version that the delete took.

    Raises NotFound where it is not at the path any more, NotEmpty for a directory with entries.
    """
    paths.check(scope, Op.DELETE, path)
    write_id = new_id()

    async def confirm() -> list[Row] | None:
        done = await _find_write(db, scope, write_id)
        return [(done[0][1], done[0][2])] if done else None

    with operation("delete", scope, path) as op:
        rows = await db.write(
            scope.tenant_id,
            _DELETE_NODE,
            (scope.tenant_id, scope.agent_id, node_id, path, scope.principal.value, scope.session, write_id),
            confirm,
        )
        if not rows:
            raise NotFound(path=path)
        op.changed(-rows[0][1])
    return int(rows[0][0])


async def rename(
    db: Database,
    scope: Scope,
    limits: Limits,
    source: tuple[str, str],
    target: tuple[str | None, str],
    *,
    expected: int | None,
    mode: str,
) -> Renamed | None:
    """rename(2). Returns what it left behind; None where its answer was lost and it turned out to be done, so that what
    is there now may be others' work.

    Args:
        source: lineage and path.
        target: lineage believed to be at the target path, or None, and the path.
        expected: the version of the target that the caller built on; None: any.
        mode: '', 'noreplace' or 'exchange'.

    Raises NotFound, Exists (also without 'noreplace', where another file than was believed is at the target and
    nothing is expected of it), NotADirectory, IsADirectory, NotEmpty, BadPath, PathTooLong, StaleVersion.
    """
    for _, path in (source, target):
        paths.check(scope, Op.RENAME, path)
    paths.check_path(target[1], limits)
    write_id = new_id()

    async def confirm() -> list[Row] | None:
        return [] if await _find_write(db, scope, write_id) else None

    with operation("rename", scope, target[1]) as op:
        rows = await db.write(
            scope.tenant_id,
            _RENAME_NODE,
            (
                scope.tenant_id,
                scope.agent_id,
                source[0],
                source[1],
                target[1],
                target[0],
                expected,
                mode,
                scope.principal.value,
                scope.session,
                write_id,
                limits.max_path_bytes,
                limits.max_path_depth,
            ),
            confirm,
        )
        op.changed(0, source=source[1])
    if not rows:
        return None
    node = node_of(rows[0])
    if mode != "exchange":
        _tell(db, scope, node.path, node.kind, node)
    return Renamed(node, rows[0][12])


class AttrsChange(NamedTuple):
    """New attributes of a lineage, and the path at which whoever sets them knows it."""

    path: str
    node_id: str
    attrs: Attrs


async def set_attrs(
    db: Database, scope: Scope, changes: Sequence[AttrsChange], *, wait: bool = True
) -> dict[str, tuple[NodeRow, bool]]:
    """Store mode, owner and mtime; what is None stays.

    Args:
        wait: for rows that another transaction has locked. Who sets many does not: a deadlock with a directory's move
            would be the rule.

    Returns the rows as they are then, by lineage, each with whether it is locked and was left; what is gone is missing.
    """
    for change in changes:
        paths.check(scope, Op.SETATTR, change.path)
    with operation("setattr", scope, changes[0].path if len(changes) == 1 else None):
        rows = await db.run(
            scope.tenant_id,
            _SET_ATTRS,
            scope.tenant_id,
            scope.agent_id,
            [change.node_id for change in changes],
            [change.attrs.mode for change in changes],
            [change.attrs.uid for change in changes],
            [change.attrs.gid for change in changes],
            [change.attrs.mtime_ns for change in changes],
            wait,
        )
    return {row[0]: (node_of(row), row[12]) for row in rows}


async def record_conflict(
    db: Database,
    scope: Scope,
    path: str,
    *,
    node_id: str | None,
    expected: int | None,
    actual: int | None,
    op: str,
    content: bytes,
    conflict_id: str | None = None,
) -> str:
    """Keep the bytes of a lost race (BY-01). Returns the conflict's id; one that is there already stays."""
    conflict_id = conflict_id or new_id()
    await db.run(
        scope.tenant_id,
        _RECORD_CONFLICT,
        scope.tenant_id,
        scope.agent_id,
        conflict_id,
        node_id,
        path,
        expected,
        actual,
        op,
        content,
        scope.session,
        scope.principal.value,
    )
    if db.on_event is not None:
        db.on_event(events.lost(scope, path, actual, len(content)))
    return conflict_id


async def reserve_inos(db: Database, tenant_id: str, count: int) -> list[int]:
    """Numbers for incarnations that the caller will make."""
    return [row[0] for row in await db.run(tenant_id, _RESERVE_INOS, count)]


def new_attempt(*, announced: bool = True) -> Attempt:
    """A change that is about to be made; `announced`: see `Attempt`."""
    return Attempt(new_id(), announced=announced)


async def _commit(
    db: Database, scope: Scope, path: str, attempt: Attempt, attrs: Attrs, statement: Query, params: Sequence[Param]
) -> list[Row]:
    """Change content exactly once."""
    return await db.write(
        scope.tenant_id,
        statement,
        params,
        lambda: _confirm_write(db, scope, attempt.write_id, attrs.mtime_ns or 0),
        attempt,
        (scope.agent_id, path),
    )


def _tell(db: Database, scope: Scope, path: str, kind: Kind, done: Commit | NodeRow) -> None:
    """Say that the content at a path is new, to whoever wants to know. A change that was lost on its way and found to
    be applied later is not told."""
    if db.on_event is not None and kind is Kind.FILE:
        db.on_event(events.written(scope, path, done.version, done.size))


async def settle(db: Database, scope: Scope, attempt: Attempt, mtime_ns: int) -> Commit | None:
    """What became of a create, write or append of which nobody knows; None: it was not applied and cannot be
    any more. Raises Unsettled when nobody can tell even now."""
    rows = await db.settle(attempt, lambda: _confirm_write(db, scope, attempt.write_id, mtime_ns))
    return Commit(*rows[0]) if rows else None


async def find_write(db: Database, scope: Scope, write_id: str) -> Commit | None:
    """The change with a write_id, if it was applied. Its times are not known."""
    rows = await _confirm_write(db, scope, write_id, 0)
    return Commit(*rows[0]) if rows else None


async def _find_write(db: Database, scope: Scope, write_id: str) -> list[Row]:
    return await db.run(scope.tenant_id, _FIND_WRITE, scope.tenant_id, scope.agent_id, write_id)


async def _confirm_write(db: Database, scope: Scope, write_id: str, mtime_ns: int) -> list[Row] | None:
    done = await _find_write(db, scope, write_id)
    return [(*done[0][:3], mtime_ns, done[0][3])] if done else None


async def _version_at(db: Database, scope: Scope, path: str) -> int | None:
    rows = await db.run(scope.tenant_id, _FETCH_NODE, scope.tenant_id, scope.agent_id, path)
    return rows[0][4] if rows else None


async def _version_of(db: Database, scope: Scope, node_id: str) -> int | None:
    rows = await db.run(scope.tenant_id, _FETCH_STATE, scope.tenant_id, scope.agent_id, node_id)
    return rows[0][1] if rows else None
