"""The database of a command: which one it is, and how an async function is run on it.

Decided here and only here: without --dsn the embedded Postgres is started and shared.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def opened(dsn: str, *, owner: bool = False, patient: bool = False, size: int = 2) -> AsyncIterator[Database]:
    """The database of a command, checked to fit this program.

    Args:
        owner: stay the login, which must own the tables: tenants and agents are not the daemon's to change.
            Else row-level security binds even an administrator's command.
        patient: no limit on the time of a statement, for what reads whole namespaces.
        size: connections at most.

    Raises SchemaMismatch where the database does not fit, and as `open_database`.
    """
    from fusefs.db import migrate
    from fusefs.db.connection import DAEMON_ROLE
    from fusefs.db.pool import open_database

    role = None if owner else DAEMON_ROLE
    timeout_s = 0.0 if patient else 30.0
    origin = f"cli-{os.getpid()}"
    async with open_database(dsn, origin=origin, size=size, statement_timeout_s=timeout_s, role=role) as db:
        await migrate.require_current_on(db)
        yield db


def run(
    dsn: str,
    work: Callable[[Database], Awaitable[T]],
    *,
    owner: bool = False,
    patient: bool = False,
    size: int = 2,
) -> T:
    """Run an async function on a database, which is `opened` for it.

    Raises what that and the function raise; trio's groups are unwrapped by `main`.
    """
    import trio

    async def on_database() -> T:
        async with opened(dsn, owner=owner, patient=patient, size=size) as db:
            return await work(db)

    return trio.run(on_database)
