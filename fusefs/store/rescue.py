"""Rescued writes: what one is, and how it is put back (DESIGN section 8).

Decided here and only here: that putting back is checked like the write that it was, by the rights of whoever
made it; that it happens once, also when what was lost had reached Postgres after all; and that a file which
moved on gets a conflict, never a new content.

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum

from fusefs.db.connection import Backend
from fusefs.db.group_commit import Attempt
from fusefs.db.pool import Database
from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, NotFound, StaleVersion
from fusefs.rules.model import CLAIMED, Attrs
from fusefs.rules.paths import Op
from fusefs.rules.scope import Scope
from fusefs.store import files, versions


@dataclass(frozen=True, slots=True)
class Rescued:
    """A write that Postgres did not take.

    Attributes:
        path: as the writer knew it.
        node_id: the lineage; None for a file that was new.
        expected: the version that the writer built on; None for a new file, for an append, and for a race that
            was lost already.
        attrs: mode, owner and times to store with them; None leaves each alone.
        append: the bytes are to be added to whatever is there; of a new file, if others made it meanwhile.
        created: the writer's own handle made the file.
        write_id: of an attempt of which nobody knows whether Postgres applied it; else None.
        backend: pid and start (us) of the server's process that may apply it yet.
        taken: how many of the bytes that attempt had.
    """

    path: str
    node_id: str | None
    expected: int | None
    attrs: Attrs
    append: bool = False
    created: bool = False
    write_id: str | None = None
    backend: tuple[int, int] | None = None
    taken: int = 0


class Fate(Enum):
    """What became of a rescued write."""

    WRITTEN = "written"
    THERE_ALREADY = "there already"
    CONFLICT = "conflict"


async def put_back(
    db: Database, scope: Scope, limits: Limits, rescued: Rescued, content: bytes, kept_id: str
) -> tuple[Fate, str]:
    """Write rescued bytes where they belong, once, however often and by how many it is tried. Returns what became
    of them and, for a conflict, its id.

    Args:
        scope: of the session whose write it was.
        kept_id: a UUID; what is written carries ids that are made of it.

    Raises Denied, TooLarge, Unavailable; the caller keeps the rescued bytes then.
    """
    if rescued.backend is not None:
        await db.end(Backend(*rescued.backend))
    attempt = Attempt(str(uuid.uuid5(uuid.UUID(kept_id), "write")))
    if await files.find_write(db, scope, attempt.write_id) is not None:
        return Fate.THERE_ALREADY, ""
    node_id, expected = rescued.node_id, rescued.expected
    applied = None if rescued.write_id is None else await files.find_write(db, scope, rescued.write_id)
    if applied is not None:
        node_id, expected = applied.id, applied.version
        if rescued.append:
            content = content[rescued.taken :]
        elif await _holds(db, scope, rescued.path, applied.id, applied.version, content):
            content = b""
        if not content:
            return Fate.THERE_ALREADY, ""
    try:
        await _write(db, scope, limits, rescued, node_id, expected, content, attempt)
    except (Exists, StaleVersion, NotFound) as lost:
        if await files.find_write(db, scope, attempt.write_id) is not None:
            return Fate.THERE_ALREADY, ""  # somebody put the same write back at the same time
        if isinstance(lost, Exists):
            raise
        conflict_id = await files.record_conflict(
            db,
            scope,
            rescued.path,
            node_id=node_id,
            expected=expected,
            actual=lost.actual if isinstance(lost, StaleVersion) else None,
            op="append" if rescued.append else "write",
            content=content,
            conflict_id=str(uuid.uuid5(uuid.UUID(kept_id), "conflict")),
        )
        return Fate.CONFLICT, conflict_id
    return Fate.WRITTEN, ""


async def _write(
    db: Database,
    scope: Scope,
    limits: Limits,
    rescued: Rescued,
    node_id: str | None,
    expected: int | None,
    content: bytes,
    attempt: Attempt,
) -> None:
    path, attrs = rescued.path, rescued.attrs
    policy = Op.CREATE if rescued.created else Op.WRITE
    if expected == CLAIMED and not await files.exists(db, scope, path):
        # A claim commits asynchronously: a crash of the server may take it back. Nothing stands in the way.
        node_id = None
    if node_id is None:
        (ino,) = await files.reserve_inos(db, scope.tenant_id, 1)
        try:
            await files.create(db, scope, limits, path, content, ino=ino, attrs=attrs, attempt=attempt)
            return
        except StaleVersion:
            if not rescued.append:
                raise
        # Two sessions began the same log: both survive, as they do in a mount.
        node_id = (await files.stat(db, scope, path)).id
        attrs = Attrs(mtime_ns=attrs.mtime_ns)
    if rescued.append:
        await files.append(db, scope, limits, path, node_id, content, attrs=attrs, policy=policy, attempt=attempt)
    elif expected is None:
        raise StaleVersion(path=path)  # it had lost its race already
    else:
        await files.write(
            db, scope, limits, path, node_id, expected, content, attrs=attrs, policy=policy, attempt=attempt
        )


async def _holds(db: Database, scope: Scope, path: str, node_id: str, version: int, content: bytes) -> bool:
    """Whether a version of a lineage has this content."""
    try:
        return await versions.read_version(db, scope, path, version, node_id) == content
    except NotFound:
        return False
