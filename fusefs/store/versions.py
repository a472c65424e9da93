"""The history of files: listing it, reading an old version, restoring one, and dropping what has expired.

Decided here and only here: which contents of a lineage can still be read, how one is put together, and what the
retention removes. The rows themselves are written by a trigger (see the schema).

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusefs.db.pool import Database
from fusefs.db.queries import query
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import Corrupt, Exists, IsADirectory, NotADirectory, NotEmpty, NotFound, NotSupported
from fusefs.rules.model import Attrs, Commit, Kind
from fusefs.rules.paths import Op
from fusefs.rules.scope import Scope
from fusefs.store import files

_LIST_VERSIONS = query("list_versions")
_FIND_UNSEEN = query("find_unseen_version")
_LIST_DELETED = query("list_deleted")
_FETCH_SUPERSEDED = query("fetch_superseded")
_MEASURE_EXPIRED = query("measure_expired_versions")
_MEASURE_OVER_QUOTA = query("measure_over_quota")
_DROP_SUPERSEDED = query("drop_superseded")
_LIST_EXPIRED_RESULTS = query("list_expired_results")

_DROP_BATCH = 500
"""Rows a statement, so that each transaction is short and a progress bar moves."""

_READ_ATTEMPTS = 5
"""A version that is the newest when the history is read may be superseded before its content is."""


@dataclass(frozen=True, slots=True)
class Version:
    """One change of a file.

    Args:
        version: what the change made; a delete takes the next number.
        at: when, in seconds since 1970.
        old_state, old_size: what became of the content before; see the schema.
        current: the file is at this version now.
        readable: the content of this version can be read.
    """

    file_id: str
    version: int
    seq: int
    at: float
    op: str
    kind: Kind
    path: str
    old_path: str | None
    size: int
    mode: int
    principal: str
    session: str
    old_state: str
    old_size: int
    current: bool
    readable: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    """A path that exists no more, with the last version that it had. `at` in seconds since 1970."""

    path: str
    file_id: str
    version: int
    size: int
    at: float
    principal: str
    session: str
    readable: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """What a retention removes: a number of things, and their bytes."""

    count: int
    bytes: int


async def list_versions(db: Database, scope: Scope, path: str) -> list[Version]:
    """Every change of a path, across the lineages that were there, the newest first.

    Raises NotFound where there never was a file.
    """
    paths.check(scope, Op.READ, path)
    rows = await db.run(scope.tenant_id, _LIST_VERSIONS, scope.tenant_id, scope.agent_id, path)
    # A lineage may have been at a path that this session must not know of (HF-11).
    rows = [row for row in rows if paths.visible(scope, row[6])]
    if not rows:
        raise NotFound(path=path)
    current = {row[0]: row[14] for row in rows if row[14] is not None}
    found = [_version(row) for row in rows]
    readable = _readable(found, current)
    return [replace(one, readable=(one.file_id, one.version) in readable and _has_content(one)) for one in found]


async def has_unseen(db: Database, scope: Scope, node_id: str, version: int, since_ns: int | None) -> bool:
    """Whether the scope's session has only appended to what others wrote to a lineage after a time (ns since 1970),
    up to a version."""
    session = scope.session
    rows = await db.run(
        scope.tenant_id, _FIND_UNSEEN, scope.tenant_id, scope.agent_id, node_id, version, session, since_ns or 0
    )
    return bool(rows[0][0])


def _version(row: files.Row) -> Version:
    current = row[14] == row[1] and row[4] != "delete"
    values: list[Any] = [*row[:5], Kind(row[5]), *row[6:14], current, False]
    return Version(*values)


def _has_content(one: Version) -> bool:
    return one.op not in ("delete", "moved")


def _readable(found: list[Version], current: dict[str, int]) -> set[tuple[str, int]]:
    """The (lineage, version) pairs whose content exists: in the row itself, in the history row of the next
    version, or as the beginning of the next version's content."""
    after = {(one.file_id, one.version): one for one in found if one.old_state != "none"}
    readable = set()
    for one in sorted(found, key=lambda one: one.version, reverse=True):
        step = after.get((one.file_id, one.version + 1))
        held = current.get(one.file_id) == one.version
        if step is not None:
            held = step.old_state in ("text", "bytes") or (
                step.old_state == "prefix" and (one.file_id, one.version + 1) in readable
            )
        if held:
            readable.add((one.file_id, one.version))
    return readable


async def read_version(db: Database, scope: Scope, path: str, version: int, lineage: str | None = None) -> bytes:
    """The content of a version of a path.

    Args:
        lineage: which file, where several had this version at the path; without it the one that is there
            now, else the newest.

    Raises NotFound when there is no such version, or its content was not kept.
    """
    for _ in range(_READ_ATTEMPTS):
        chosen, found = await _choose(db, scope, path, version, lineage)
        content = await _content_of(db, scope, chosen, found)
        if content is not None:
            return content
    raise Corrupt("the history changes faster than it can be read", path=path)


async def _choose(
    db: Database, scope: Scope, path: str, version: int, lineage: str | None
) -> tuple[Version, list[Version]]:
    found = await list_versions(db, scope, path)
    fitting = [one for one in found if one.version == version and lineage in (None, one.file_id) and _has_content(one)]
    living = {one.file_id for one in found if one.current}
    fitting.sort(key=lambda one: (one.file_id in living, one.readable), reverse=True)
    if not fitting:
        raise NotFound(f"there is no version {version}", path=path)
    if not fitting[0].readable:
        raise NotFound(
            f"the content of version {version} was not kept",
            path=path,
            hint="It was superseded through one open file within a minute, or removed by the retention.",
        )
    return fitting[0], [one for one in found if one.file_id == fitting[0].file_id]


async def _content_of(db: Database, scope: Scope, chosen: Version, found: list[Version]) -> bytes | None:
    """The content of a readable version; None when it was superseded or dropped meanwhile."""
    after = {one.version: one for one in found if one.old_state != "none"}
    version, cut = chosen.version, None
    while (step := after.get(version + 1)) is not None and step.old_state == "prefix":
        cut = step.old_size if cut is None else min(cut, step.old_size)
        version += 1
    if step is None:
        held = (await files.read(db, scope, [chosen.file_id])).get(chosen.file_id)
        if held is None or held[0] != version:
            return None
        return held[1][:cut]
    rows = await db.run(
        scope.tenant_id, _FETCH_SUPERSEDED, scope.tenant_id, scope.agent_id, chosen.file_id, version + 1
    )
    if not rows:
        return None
    text, raw = rows[0]
    content: bytes = raw if raw is not None else text.encode()
    return content[:cut]


async def restore(
    db: Database, scope: Scope, limits: Limits, path: str, version: int, lineage: str | None = None
) -> Commit:
    """Make an old version the newest one. The content that it replaces stays in the history.

    A deleted file is made anew, with its directories. Raises NotFound as `read_version` does, StaleVersion
    when the file is changed at the same moment, Denied where the principal may not write, NotSupported for what
    is not a regular file.
    """
    chosen, _ = await _choose(db, scope, path, version, lineage)
    content = await read_version(db, scope, path, version, chosen.file_id)
    if chosen.kind is not Kind.FILE:
        raise NotSupported(f"version {version} is a {chosen.kind.value}, not a file", path=path)
    return await put(db, scope, limits, path, content, mode=chosen.mode, op="restore")


async def put(db: Database, scope: Scope, limits: Limits, path: str, content: bytes, *, mode: int, op: str) -> Commit:
    """Write a file at a path as it is now: over the version that is there, or anew with its directories.

    Args:
        mode: of a file that is made anew.

    Raises StaleVersion when somebody else changes it at the same moment, IsADirectory, NotSupported.
    """
    now_ns = time.time_ns()
    try:
        node = await files.stat(db, scope, path)
    except NotFound:
        await make_parents(db, scope, limits, path)
        ino = (await files.reserve_inos(db, scope.tenant_id, 1))[0]
        return await files.create(db, scope, limits, path, content, ino=ino, attrs=Attrs(mode=mode, mtime_ns=now_ns))
    if node.kind is Kind.DIR:
        raise IsADirectory(path=path)
    if node.kind is not Kind.FILE:
        raise NotSupported(f"a {node.kind.value} is there now", path=path)
    attrs = Attrs(mtime_ns=now_ns)
    return await files.write(db, scope, limits, path, node.id, node.version, content, attrs=attrs, op=op)


async def make_parents(db: Database, scope: Scope, limits: Limits, path: str) -> None:
    """Make the directories above a path that do not exist. Raises NotADirectory."""
    missing = []
    parent = paths.split(path)[0]
    while parent != "/":
        try:
            node = await files.stat(db, scope, parent)
            if node.kind is not Kind.DIR:
                raise NotADirectory(path=parent)
            break
        except NotFound:
            missing.append(parent)
            parent = paths.split(parent)[0]
    inos = await files.reserve_inos(db, scope.tenant_id, len(missing)) if missing else []
    attrs = Attrs(mode=0o755, mtime_ns=time.time_ns())
    for directory, ino in zip(reversed(missing), inos, strict=True):
        try:
            await files.claim(db, scope, limits, directory, Kind.DIR, ino=ino, attrs=attrs)
        except Exists:
            # Somebody else made it at the same time.
            continue


async def list_deleted(db: Database, scope: Scope, directory: str) -> list[Deleted]:
    """The paths below a directory that were deleted and are not there now, by path."""
    paths.check(scope, Op.READ, directory)
    prefix = directory if directory.endswith("/") else directory + "/"
    rows = await db.run(scope.tenant_id, _LIST_DELETED, scope.tenant_id, scope.agent_id, prefix)
    found = [[*row[:7], row[7] in ("text", "bytes")] for row in rows if paths.visible(scope, row[0])]
    return [Deleted(*values) for values in found]


async def measure_expired(db: Database, scope: Scope, age_s: float) -> Expired:
    """The contents that were superseded more than `age_s` seconds ago."""
    rows = await db.run(scope.tenant_id, _MEASURE_EXPIRED, scope.tenant_id, scope.agent_id, age_s)
    return Expired(*rows[0])


def drop_expired(db: Database, scope: Scope, age_s: float) -> AsyncIterator[Expired]:
    """Drop those contents, the oldest first; yields what each batch removed. The rows of the history stay."""
    return _drop(db, scope, age_s, None)


async def measure_over_quota(db: Database, scope: Scope, age_s: float, coming: Sequence[int]) -> Expired:
    """The contents that the history's quota has no room for, once those older than `age_s` seconds are dropped.

    Args:
        coming: sizes of files that are about to be deleted, in that order; their contents come into the history.
    """
    rows = await db.run(scope.tenant_id, _MEASURE_OVER_QUOTA, scope.tenant_id, scope.agent_id, age_s, list(coming))
    return Expired(*rows[0][:2])


async def drop_over_quota(db: Database, scope: Scope) -> AsyncIterator[Expired]:
    """Drop the oldest contents until the history is within its quota; yields what each batch removed.

    What is written meanwhile is for the next time.
    """
    rows = await db.run(scope.tenant_id, _MEASURE_OVER_QUOTA, scope.tenant_id, scope.agent_id, None, [])
    last = rows[0][2]
    if last is not None:
        async for dropped in _drop(db, scope, None, last):
            yield dropped


async def _drop(db: Database, scope: Scope, age_s: float | None, last_seq: int | None) -> AsyncIterator[Expired]:
    while True:
        rows = await db.run(
            scope.tenant_id, _DROP_SUPERSEDED, scope.tenant_id, scope.agent_id, age_s, last_seq, _DROP_BATCH
        )
        dropped = Expired(*rows[0])
        if dropped.count == 0:
            return
        yield dropped


async def list_expired_results(db: Database, scope: Scope, age_s: float) -> list[tuple[str, str, Kind, int]]:
    """Large tool results of sessions that ended more than `age_s` seconds ago, as (lineage, path, kind, bytes),
    directories after what is in them."""
    rows = await db.run(scope.tenant_id, _LIST_EXPIRED_RESULTS, scope.tenant_id, scope.agent_id, age_s)
    return [(row[0], row[1], Kind(row[2]), row[3]) for row in rows]


async def delete_expired_result(db: Database, scope: Scope, path: str, node_id: str) -> bool:
    """Delete one of them. False when it is gone already, or is a directory that got a new entry."""
    try:
        await files.delete(db, scope, path, node_id)
    except (NotFound, NotEmpty):
        return False
    return True
