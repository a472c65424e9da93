"""Results kept in the database, by whoever has a connection to it: the harness itself.

Decided here and only here: that results are written as `system`, and that a name which is taken is found out by the
insert itself.

Threading: stateless; any number of results may be stored at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fusefs.db.pool import Database
from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, NotFound, StaleVersion
from fusefs.rules.model import Attrs, Kind
from fusefs.rules.scope import Principal, Scope
from fusefs.store import files, versions


@dataclass(frozen=True, slots=True)
class DatabaseResults:
    """A `ResultStore` over the database.

    Args:
        scope: of the session; whoever its principal is, results are the harness's own to write.
        root: where a shell finds the namespace, where that is known.
    """

    db: Database
    scope: Scope
    limits: Limits
    root: str | None = None

    @property
    def session(self) -> str:
        return self.scope.session

    @property
    def max_file_bytes(self) -> int:
        return self.limits.max_file_bytes

    async def make_file(self, path: str, data: bytes) -> None:
        try:
            await self._create(path, data)
        except NotFound:
            await versions.make_parents(self.db, self._system, self.limits, path)
            await self._create(path, data)

    async def make_directory(self, path: str) -> None:
        scope = self._system
        await versions.make_parents(self.db, scope, self.limits, path)
        (ino,) = await files.reserve_inos(self.db, scope.tenant_id, 1)
        attrs = Attrs(mode=0o755, mtime_ns=time.time_ns())
        await files.claim(self.db, scope, self.limits, path, Kind.DIR, ino=ino, attrs=attrs)

    async def _create(self, path: str, data: bytes) -> None:
        scope = self._system
        (ino,) = await files.reserve_inos(self.db, scope.tenant_id, 1)
        attrs = Attrs(mode=0o644, mtime_ns=time.time_ns())
        try:
            await files.create(self.db, scope, self.limits, path, data, ino=ino, attrs=attrs)
        except StaleVersion as exc:
            raise Exists(path=path) from exc

    @property
    def _system(self) -> Scope:
        return replace(self.scope, principal=Principal.SYSTEM, all_sessions=False)
