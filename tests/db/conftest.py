"""A database without our schema, for what does not depend on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
import trio

from tests import harness

_SCHEMA = """
do $$ begin create role fusefs_daemon nologin noinherit; exception when duplicate_object then null; end $$;
alter default privileges grant all on tables to fusefs_daemon;
create table notes (
  write_id text primary key,
  tenant text not null default coalesce(nullif(current_setting('fusefs.tenant', true), ''), '(none)'),
  origin text default current_setting('fusefs.origin', true),
  content text not null
);
create table accounts (id int primary key, amount int not null);
insert into accounts values (1, 100), (2, 100);
create function refuse(p_state text, p_text text) returns int language plpgsql as $$
begin
  raise exception '%', p_text using errcode = p_state, detail = 'SECRET-DETAIL';
end $$;
"""


@pytest.fixture(scope="module")
def module_plain(pg_server: harness.PostgresServer) -> Iterator[str]:
    name = f"plain_{uuid.uuid4().hex[:16]}"
    dsn = pg_server.create_database(name)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(_SCHEMA.encode())
    yield dsn
    pg_server.drop_database(name)


@pytest.fixture
def plain(module_plain: str) -> str:
    """The DSN of a database with `notes` (empty), `accounts` and `refuse`."""
    execute(module_plain, "delete from notes")
    return module_plain


@pytest.fixture
def empty(pg_server: harness.PostgresServer) -> Iterator[str]:
    """The DSN of a database with nothing in it."""
    name = f"empty_{uuid.uuid4().hex[:16]}"
    yield pg_server.create_database(name)
    pg_server.drop_database(name)


def execute(dsn: str, statement: str, *params: object) -> list[tuple[object, ...]]:
    """Run one statement on a connection of its own."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(statement.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


async def wait_active(dsn: str, pid: object) -> None:
    """Until the server runs a statement for that backend."""
    with trio.fail_after(10):
        while execute(dsn, "select state from pg_stat_activity where pid = %s", pid) != [("active",)]:
            await trio.lowlevel.checkpoint()
