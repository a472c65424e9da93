"""The bytes of lost races: listing, reading, accepting and dropping them (BY-01).

Decided here and only here: what accepting one means: the loser's bytes become the newest version of the path,
over whatever is there now, and the winner's stay in the history.

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fusefs.db.pool import Database
from fusefs.db.queries import query
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import NotFound
from fusefs.rules.model import Attrs, Commit
from fusefs.rules.scope import Scope
from fusefs.store import files, versions
from fusefs.store.tenants import as_uuid

_LIST_CONFLICTS = query("list_conflicts")
_FETCH_CONFLICT = query("fetch_conflict")
_DELETE_CONFLICT = query("delete_conflict")


@dataclass(frozen=True, slots=True)
class Conflict:
    """A lost race. `expected` None: the loser thought that there was no file; `actual` None: there was none.
    `at` in seconds since 1970, `size` in bytes."""

    id: str
    file_id: str | None
    path: str
    expected: int | None
    actual: int | None
    op: str
    size: int
    session: str
    principal: str
    at: float


async def list_conflicts(db: Database, scope: Scope, path: str | None = None) -> list[Conflict]:
    """The lost races of a namespace, or of one path, the newest first."""
    rows = await db.run(scope.tenant_id, _LIST_CONFLICTS, scope.tenant_id, scope.agent_id, path)
    return [Conflict(*row) for row in rows if paths.visible(scope, row[2])]


async def read_conflict(db: Database, scope: Scope, conflict_id: str) -> tuple[Conflict, bytes]:
    """One lost race and its bytes. Raises NotFound."""
    known = as_uuid(conflict_id)
    if known is None:
        raise NotFound(f"there is no conflict {conflict_id}")
    rows = await db.run(scope.tenant_id, _FETCH_CONFLICT, scope.tenant_id, scope.agent_id, known)
    if not rows or not paths.visible(scope, rows[0][2]):
        raise NotFound(f"there is no conflict {conflict_id}")
    return Conflict(*rows[0][:10]), rows[0][10]


async def accept(db: Database, scope: Scope, limits: Limits, conflict_id: str) -> tuple[Conflict, Commit]:
    """Write the loser's bytes over the version that is at its path now, and forget the conflict. Bytes that
    were to be appended are appended.

    Raises NotFound, StaleVersion when the file changes at the same moment, Denied where the principal may not
    write. The conflict is forgotten only after the bytes are safe.
    """
    conflict, content = await read_conflict(db, scope, conflict_id)
    if conflict.op == "append":
        commit = await _append(db, scope, limits, conflict.path, content)
    else:
        commit = await versions.put(db, scope, limits, conflict.path, content, mode=0o644, op="write")
    await drop(db, scope, conflict_id)
    return conflict, commit


async def _append(db: Database, scope: Scope, limits: Limits, path: str, data: bytes) -> Commit:
    try:
        node = await files.stat(db, scope, path)
    except NotFound:
        return await versions.put(db, scope, limits, path, data, mode=0o644, op="write")
    return await files.append(db, scope, limits, path, node.id, data, attrs=Attrs(mtime_ns=time.time_ns()))


async def drop(db: Database, scope: Scope, conflict_id: str) -> Conflict:
    """Forget a conflict and its bytes. Raises NotFound."""
    conflict, _ = await read_conflict(db, scope, conflict_id)
    await db.run(scope.tenant_id, _DELETE_CONFLICT, scope.tenant_id, scope.agent_id, conflict.id)
    return conflict
