"""The database of a command: which one it is, and how an async function is run on it.

Decided here and only here: without --dsn the embedded Postgres is started and shared.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fusefs.db.pool import Database

T = TypeVar("T")


def resolve_dsn(dsn: str | None, data_dir: str | None, prepare: bool = False) -> str:
    """The DSN to use.

    Args:
        prepare: who asks for things to be made should not have to run `fusefs init` first: a database
            without our tables gets them, and the embedded one, which is ours alone, is brought up to date.

    Raises Unavailable when the embedded Postgres cannot be started, SchemaMismatch when it is newer than we.
    """
    from fusefs.db import embedded, migrate

    if dsn is not None:
        if prepare and not migrate.status(dsn).applied:
            migrate.up(dsn)
        return dsn

    found = embedded.ensure_running(Path(data_dir) if data_dir else None)
    if prepare:
        migrate.up(found)
    return found


def run(dsn: str, work: Callable[[Database], Awaitable[T]], *, owner: bool = False, patient: bool = False) -> T:
    """Run an async function on a database.

    Args:
        owner: stay the login, which must own the tables: tenants and agents are not the daemon's to change.
            Else row-level security binds even an administrator's command.
        patient: no limit on the time of a statement, for what reads whole namespaces.

    Raises SchemaMismatch where the database does not fit this program, and what the function raises; trio's
    groups are unwrapped by `main`.
    """
    import trio

    from fusefs.db import migrate
    from fusefs.db.connection import DAEMON_ROLE
    from fusefs.db.pool import open_database

    async def on_database() -> T:
        role = None if owner else DAEMON_ROLE
        timeout_s = 0.0 if patient else 30.0
        origin = f"cli-{os.getpid()}"
        async with open_database(dsn, origin=origin, size=2, statement_timeout_s=timeout_s, role=role) as db:
            await migrate.require_current_on(db)
            return await work(db)

    return trio.run(on_database)
