"""Rescued writes: what one is, and how it is put back (DESIGN section 8).

Decided here and only here: that putting back is checked like the write that it was, by the rights of whoever
made it; that what had reached Postgres after all is not written twice; and that a file which moved on gets a
conflict, never a new content.

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fusefs.db.pool import Database
from fusefs.rules.config import Limits
from fusefs.rules.errors import NotFound, StaleVersion
from fusefs.rules.model import Attrs
from fusefs.rules.scope import Scope
from fusefs.store import files, versions


@dataclass(frozen=True, slots=True)
class Rescued:
    """A write that Postgres did not take.

    Attributes:
        path: as the writer knew it.
        node_id: the lineage; None for a file that was new.
        expected: the version that the writer built on; None for a new file and for an append.
        append: the bytes are to be added to whatever is there.
        write_id: of an attempt of which nobody knows whether Postgres applied it; else None.
        taken: how many of the bytes that attempt had.
        attrs: mode, owner and times to store with them; None leaves each alone.
    """

    path: str
    node_id: str | None
    expected: int | None
    append: bool
    write_id: str | None
    taken: int
    attrs: Attrs


class Fate(Enum):
    """What became of a rescued write."""

    WRITTEN = "written"
    THERE_ALREADY = "there already"
    CONFLICT = "conflict"


async def put_back(db: Database, scope: Scope, limits: Limits, rescued: Rescued, content: bytes) -> tuple[Fate, str]:
    """Write rescued bytes where they belong. Returns what became of them and, for a conflict, its id.

    Args:
        scope: of the session whose write it was.

    Raises Denied, TooLarge, Unavailable; the caller keeps the rescued bytes then.
    """
    node_id, expected = rescued.node_id, rescued.expected
    if rescued.write_id is not None:
        applied = await files.find_write(db, scope, rescued.write_id)
        if applied is not None:
            node_id, expected = applied.id, applied.version
            if rescued.append:
                content = content[rescued.taken :]
            elif await _holds(db, scope, rescued.path, applied.id, applied.version, content):
                content = b""
            if not content:
                return Fate.THERE_ALREADY, ""
    try:
        await _write(db, scope, limits, rescued, node_id, expected, content)
    except (StaleVersion, NotFound) as lost:
        conflict_id = await files.record_conflict(
            db,
            scope,
            rescued.path,
            node_id=node_id,
            expected=expected,
            actual=lost.actual if isinstance(lost, StaleVersion) else None,
            op="append" if rescued.append else "write",
            content=content,
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
) -> None:
    if node_id is None:
        (ino,) = await files.reserve_inos(db, scope.tenant_id, 1)
        await files.create(db, scope, limits, rescued.path, content, ino=ino, attrs=rescued.attrs)
    elif rescued.append:
        await files.append(db, scope, limits, rescued.path, node_id, content, attrs=rescued.attrs)
    elif expected is None:
        raise StaleVersion(path=rescued.path)  # it had lost its race already
    else:
        await files.write(db, scope, limits, rescued.path, node_id, expected, content, attrs=rescued.attrs)


async def _holds(db: Database, scope: Scope, path: str, node_id: str, version: int, content: bytes) -> bool:
    """Whether a version of a lineage has this content."""
    try:
        return await versions.read_version(db, scope, path, version, node_id) == content
    except NotFound:
        return False
