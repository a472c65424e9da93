"""What a mount must know of a namespace as a whole: its channel, quota, root and sessions.

Decided here and only here: how a namespace and a session are opened, and what the quota counts.

Threading: the functions are stateless. `Usage` belongs to one trio thread.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass

from fusefs.db.pool import Database
from fusefs.db.queries import query
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, OverQuota, UnknownScope
from fusefs.rules.model import Attrs, Kind
from fusefs.rules.scope import Principal, Scope, new_session
from fusefs.store import files

_OPEN_NAMESPACE = query("open_namespace")
_MEASURE_USAGE = query("measure_usage")
_FETCH_QUOTA = query("fetch_quota")
_OPEN_SESSION = query("open_session")
_END_SESSION = query("end_session")
_LIST_SESSIONS = query("list_sessions")
_SET_ROOT_ATTRS = query("set_root_attrs")
_TOUCH_DIRECTORIES = query("touch_directories")
_ASK_S = 1.0


@dataclass(frozen=True, slots=True)
class Namespace:
    """The row of `agent_namespaces`. `uid` and `gid` None: whoever mounts."""

    channel: str
    quota_bytes: int | None
    mode: int
    uid: int | None
    gid: int | None
    mtime_ns: int


async def open_namespace(db: Database, tenant_id: str, agent_id: str) -> Namespace:
    """The namespace's row, made on first use. Raises UnknownScope."""
    rows = await db.run(tenant_id, _OPEN_NAMESPACE, tenant_id, agent_id)
    if not rows:
        raise UnknownScope("no such agent")
    return Namespace(*rows[0])


async def prepare(db: Database, tenant_id: str, agent_id: str) -> Namespace:
    """Open a namespace and make its reserved directories where they are missing (the agent may be another
    program's), so that an agent who writes there meets the refusal that explains, not ENOENT.

    Raises UnknownScope.
    """
    opened = await open_namespace(db, tenant_id, agent_id)
    scope = Scope(tenant_id, agent_id, new_session(), Principal.SYSTEM)
    for path in paths.RESERVED:
        if not await files.exists(db, scope, path):
            (ino,) = await files.reserve_inos(db, tenant_id, 1)
            attrs = Attrs(mode=0o755, mtime_ns=time.time_ns())
            with suppress(Exists):
                await files.claim(db, scope, Limits(), path, Kind.DIR, ino=ino, attrs=attrs)
    return opened


async def open_session(db: Database, scope: Scope) -> int | None:
    """Note that a session is open. Returns when it began, in ns, if it was known before; else None."""
    rows = await db.run(
        scope.tenant_id, _OPEN_SESSION, scope.tenant_id, scope.agent_id, scope.session, scope.principal.value
    )
    began_ns, known = rows[0]
    return began_ns if known else None


async def end_session(db: Database, scope: Scope) -> None:
    await db.run(scope.tenant_id, _END_SESSION, scope.tenant_id, scope.agent_id, scope.session)


async def list_sessions(db: Database, tenant_id: str, agent_id: str) -> list[str]:
    """The sessions of an agent that have not ended."""
    return [row[0] for row in await db.run(tenant_id, _LIST_SESSIONS, tenant_id, agent_id)]


async def set_root_attrs(db: Database, scope: Scope, attrs: Attrs) -> None:
    await db.run(
        scope.tenant_id,
        _SET_ROOT_ATTRS,
        scope.tenant_id,
        scope.agent_id,
        *attrs,
    )


async def touch_directories(db: Database, tenant_id: str, agent_id: str, mtimes: dict[str, int]) -> None:
    """Raise the mtime (ns) of directories by lineage. Kept out of the commits: a shared row would make
    all creates of one directory wait for each other. In the order of ids: two daemons do not deadlock."""
    ids = sorted(mtimes)
    await db.run(tenant_id, _TOUCH_DIRECTORIES, tenant_id, agent_id, ids, [mtimes[each] for each in ids])


class Usage:
    """Files and bytes of a namespace, for statfs and for an early refusal.

    Kept by each change and each announcement, and therefore late by an announcement; the quota itself is kept
    by Postgres, which charges each change (`fusefs_announce_v1`).
    """

    __slots__ = ("_asked_at_s", "bytes", "files", "quota_bytes")

    def __init__(self, quota_bytes: int | None) -> None:
        self.quota_bytes = quota_bytes
        self.files = 0
        self.bytes = 0
        self._asked_at_s = -math.inf

    async def measure(self, db: Database, tenant_id: str, agent_id: str) -> None:
        """Count everything: O(files)."""
        rows = await db.run(tenant_id, _MEASURE_USAGE, tenant_id, agent_id)
        self.files, self.bytes = rows[0]

    async def ask(self, db: Database, tenant_id: str, agent_id: str) -> None:
        """Bring the quota, and what is used of it, up to date; at most once a second."""
        now_s = time.monotonic()
        if now_s - self._asked_at_s < _ASK_S:
            return
        self._asked_at_s = now_s
        rows = await db.run(tenant_id, _FETCH_QUOTA, tenant_id, agent_id)
        if rows:
            self.quota_bytes, used = rows[0]
            if self.quota_bytes is not None:
                self.bytes = used

    def is_over(self, growth: int) -> bool:
        """Whether a growth in bytes would exceed the quota, as far as is known. Shrinking never does."""
        return self.quota_bytes is not None and growth > 0 and self.bytes + growth > self.quota_bytes

    def check(self, path: str, growth: int) -> None:
        """Raises OverQuota where `is_over`."""
        if self.is_over(growth):
            raise OverQuota(f"{self.bytes + growth} bytes, the quota is {self.quota_bytes}", path=path)

    def add(self, files: int, size_bytes: int) -> None:
        self.files += files
        self.bytes += size_bytes
