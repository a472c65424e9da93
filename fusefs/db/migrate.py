"""Migrations: the numbered steps of the schema, each with its way back.

Decided here and only here: which steps a database has, which it lacks, and when it fits this program.
A step is `sql/migrations/NNNN_name.up.sql` with `.down.sql` beside it; the table `fusefs_migrations`
says which were applied, with the SHA-256 of each. One session at a time changes a database, held apart
by an advisory lock; each step is one transaction.

Threading: blocking, outside trio; only `require_current_on` is for trio.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psycopg

from fusefs.db.connection import DAEMON_ROLE, Row, connect_sync
from fusefs.db.failures import from_state
from fusefs.db.pool import Database
from fusefs.db.queries import Query
from fusefs.rules.errors import BadConfig, SchemaMismatch, Unavailable

MIN_SERVER = 140000
_FOLDER = Path(__file__).parent / "sql" / "migrations"
_FILE = re.compile(r"(\d{4})_([a-z0-9_]+)\.up\.sql")
_LOCK = 0x66757365_66730001
"""Key of the advisory lock: "fusefs" in ASCII, and 1."""
_LOCK_WAIT = "60s"
_UNKNOWN_HINT = "Use the version of fusefs that this database was last migrated with, or a newer one."
_CHANGED_HINT = (
    "Use the fusefs that applied it; or move the files, with its `fusefs export` and this one's `fusefs import` into "
    "a new database."
)

_LIST = Query("list_migrations", "select number, name, checksum from fusefs_migrations order by number")
# Everybody may read it: a daemon checks as its own role, before it knows a tenant.
_CREATE = """
create table if not exists fusefs_migrations (
  number int primary key,
  name text not null,
  checksum text not null,
  applied_at timestamptz not null default now()
);
grant select on fusefs_migrations to public;
"""

_ABLE = """
select current_setting('server_encoding'), current_user::text, to_regrole(%s) is not null or rolsuper or rolcreaterole
from pg_roles where rolname = current_user
"""

_KEYS = """
select a.attname, format_type(a.atttypid, null),
  exists (select from pg_index i where i.indrelid = a.attrelid and i.indisunique and i.indpred is null
    and i.indnkeyatts = 1 and i.indkey[0] = a.attnum)
from pg_attribute a
where a.attrelid = to_regclass(%s) and a.attnum > 0 and not a.attisdropped
  and a.attname in ('id', 'tenant_id', 'slug')
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step; `checksum` is that of the way up."""

    number: int
    name: str
    up: str
    down: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.number:04d}_{self.name}"


@dataclass(frozen=True, slots=True)
class Applied:
    """A step that the database has."""

    number: int
    name: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.number:04d}_{self.name}"


@dataclass(frozen=True, slots=True)
class Status:
    """What a database has (`applied`), lacks (`pending`), and what does not fit (`problems`, sentences; `hint`
    says what to do about the first)."""

    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]
    problems: tuple[str, ...]
    hint: str

    @property
    def current(self) -> bool:
        return not self.pending and not self.problems


OnStep = Callable[[Migration], None]


@cache
def migrations() -> tuple[Migration, ...]:
    """The steps that this program knows, in order."""
    found = []
    for path in sorted(_FOLDER.glob("*.up.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path.name} is not of the form NNNN_name.up.sql")
        up = path.read_text(encoding="utf-8")
        down = path.with_name(path.name.replace(".up.sql", ".down.sql")).read_text(encoding="utf-8")
        checksum = hashlib.sha256(up.encode()).hexdigest()
        found.append(Migration(int(match[1]), match[2], up, down, checksum))
    if [step.number for step in found] != list(range(1, len(found) + 1)):
        raise ValueError("the migrations are not numbered from 0001 without gaps")
    return tuple(found)


def status(dsn: str) -> Status:
    """Compare a database with this program; changes nothing. Raises Unavailable."""
    with _connected(dsn) as conn:
        return _status(conn)


def up(dsn: str, on_step: OnStep | None = None) -> tuple[Migration, ...]:
    """Apply what is pending, and return it. `on_step` is called before each step.

    Raises SchemaMismatch for a server before 14, a database of a newer program, a step that was changed
    after it was applied, tables `tenants` and `agents` of another program that do not fit, a database that is
    not UTF8, or a login that may not make the daemon's role where it is missing.
    """
    with _locked(dsn) as conn:
        conn.execute(_CREATE)
        found = _status(conn)
        if found.problems:
            raise SchemaMismatch(found.problems[0], hint=found.hint)
        if not found.applied:
            _check_able(conn)
            _check_adopted(conn)
        for step in found.pending:
            if on_step is not None:
                on_step(step)
            with conn.transaction():
                conn.execute(step.up.encode())
                conn.execute(
                    "insert into fusefs_migrations (number, name, checksum) values (%s, %s, %s)",
                    (step.number, step.name, step.checksum),
                )
        return found.pending


def down(dsn: str, to: int, on_step: OnStep | None = None) -> tuple[Migration, ...]:
    """Take back every step above number `to` (0: all), the newest first, and return them.

    Raises BadConfig for a number that is no step, SchemaMismatch where a step's way back is not known.
    """
    known = {step.number: step for step in migrations()}
    if to != 0 and to not in known:
        raise BadConfig(f"there is no migration {to}", hint="`fusefs migrate status` lists them.")
    with _locked(dsn) as conn:
        found = _status(conn)
        if found.problems:
            raise SchemaMismatch(found.problems[0], hint=found.hint)
        steps = tuple(known[applied.number] for applied in reversed(found.applied) if applied.number > to)
        for step in steps:
            if on_step is not None:
                on_step(step)
            with conn.transaction():
                conn.execute(step.down.encode())
                conn.execute("delete from fusefs_migrations where number = %s", (step.number,))
        return steps


def require_current(dsn: str) -> None:
    """Refuse a database that does not fit this program. Raises SchemaMismatch or Unavailable."""
    _refuse(status(dsn))


async def require_current_on(database: Database) -> None:
    """The same through an open pool, in one round trip."""
    try:
        rows = await database.run(None, _LIST)
    except SchemaMismatch as exc:
        # Nothing but the whole table can be missing for that statement.
        raise _no_schema() from exc
    _refuse(_compare(rows))


def _refuse(found: Status) -> None:
    if found.problems:
        raise SchemaMismatch(found.problems[0], hint=found.hint)
    if found.pending and not found.applied:
        raise _no_schema()
    if found.pending:
        raise SchemaMismatch(f"the database lacks the migration {found.pending[0]}", hint="Run `fusefs migrate up`.")


def _no_schema() -> SchemaMismatch:
    return SchemaMismatch("the database holds no schema of fusefs", hint="Run `fusefs init`.")


def _status(conn: psycopg.Connection[Row]) -> Status:
    there = conn.execute("select to_regclass('fusefs_migrations') is not null").fetchone()
    return _compare(conn.execute(_LIST.text.encode()).fetchall() if there is not None and there[0] else [])


def _compare(rows: Sequence[Row]) -> Status:
    applied = tuple(Applied(*row) for row in rows)
    known = {step.number: step for step in migrations()}
    problems = []
    for done in applied:
        step = known.get(done.number)
        if step is None:
            text = f"the database has the migration {done}, which this version of fusefs does not know"
            problems.append((text, _UNKNOWN_HINT))
        elif step.checksum != done.checksum:
            problems.append((f"the migration {done} was changed after it was applied to this database", _CHANGED_HINT))
    have = {done.number for done in applied}
    pending = tuple(step for step in migrations() if step.number not in have)
    return Status(applied, pending, tuple(text for text, _ in problems), problems[0][1] if problems else "")


def _check_able(conn: psycopg.Connection[Row]) -> None:
    """Refuse a database, or a login, that the first step would fail with in words that help nobody."""
    row = conn.execute(_ABLE, (DAEMON_ROLE,)).fetchone()
    encoding, login, able = row if row is not None else ("", "", False)
    if encoding != "UTF8":
        raise SchemaMismatch(
            f"the database is encoded in {encoding}, not in UTF8",
            hint="Make another one with `CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0`.",
        )
    if not able:
        raise SchemaMismatch(
            f"the server has no role {DAEMON_ROLE}, and {login} may not make it",
            hint=f"An administrator must run `CREATE ROLE {DAEMON_ROLE} NOLOGIN NOINHERIT; "
            f'GRANT {DAEMON_ROLE} TO "{login}"` first.',
        )


def _check_adopted(conn: psycopg.Connection[Row]) -> None:
    """Refuse `tenants` and `agents` of another program where the keys that ours refer to do not fit."""
    wrong = []
    for table, wanted in (("tenants", ("id",)), ("agents", ("id", "tenant_id"))):
        columns = {name: (kind, unique) for name, kind, unique in conn.execute(_KEYS, (table,)).fetchall()}
        there = conn.execute("select to_regclass(%s) is not null", (table,)).fetchone()
        if there is None or not there[0]:
            continue
        for column in wanted:
            if column not in columns:
                wrong.append(f"{table}.{column} is missing")
            elif columns[column][0] != "uuid":
                wrong.append(f"{table}.{column} is {columns[column][0]}, not uuid")
        if "id" in columns and not columns["id"][1]:
            wrong.append(f"{table}.id is neither the primary key nor unique by itself")
        if "slug" in columns and columns["slug"][0] not in ("text", "character varying"):
            wrong.append(f"{table}.slug is {columns['slug'][0]}, not text")
    if wrong:
        raise SchemaMismatch(
            f"the tables of another program do not fit: {'; '.join(wrong)}",
            hint="Change these columns, or give fusefs a database of its own.",
        )


@contextmanager
def _connected(dsn: str) -> Iterator[psycopg.Connection[Row]]:
    """A connection whose errors are ours; closed at the end."""
    with connect_sync(dsn) as conn:
        try:
            if conn.info.server_version < MIN_SERVER:
                raise SchemaMismatch(
                    f"the server is Postgres {conn.info.server_version // 10000}, and 14 is the oldest that works",
                    hint="Use a newer server.",
                )
            yield conn
        except psycopg.Error as exc:
            if exc.sqlstate is None:
                raise Unavailable("the connection to Postgres was lost") from exc
            raise from_state(exc.sqlstate, exc.diag.message_primary or "") from exc


@contextmanager
def _locked(dsn: str) -> Iterator[psycopg.Connection[Row]]:
    with _connected(dsn) as conn:
        conn.execute("select set_config('lock_timeout', %s, false)", (_LOCK_WAIT,))
        conn.execute("select pg_advisory_lock(%s)", (_LOCK,))
        yield conn  # the end of the session releases the lock
