"""Migrations: up, down, and what is refused."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fusefs.db import migrate
from fusefs.db.migrate import Migration
from fusefs.db.pool import open_database
from fusefs.rules.errors import BadConfig, FsError, SchemaMismatch, Unavailable
from tests import harness
from tests.db.conftest import execute

_OBJECTS = """
select 'column', table_name || '.' || column_name || ' ' || data_type || ' ' || coalesce(column_default, '-')
  || ' ' || is_nullable from information_schema.columns where table_schema = 'public'
union all select 'index', indexdef from pg_indexes where schemaname = 'public'
union all select 'function', p.oid::regprocedure || md5(prosrc) from pg_proc p
  where pronamespace = 'public'::regnamespace
union all select 'trigger', pg_get_triggerdef(oid) from pg_trigger where not tgisinternal
union all select 'constraint', conrelid::regclass || ' ' || pg_get_constraintdef(oid) from pg_constraint
  where connamespace = 'public'::regnamespace
union all select 'policy', polrelid::regclass || ' ' || polname || ' ' || pg_get_expr(polqual, polrelid) from pg_policy
union all select 'sequence', sequence_name from information_schema.sequences where sequence_schema = 'public'
order by 1, 2
"""


def test_up_down_and_up_again_end_at_the_same_schema(empty: str) -> None:
    assert not migrate.status(empty).current
    steps: list[str] = []
    done = migrate.up(empty, lambda step: steps.append(str(step)))
    assert steps == [str(step) for step in done] == [str(step) for step in migrate.migrations()]
    assert steps[0].startswith("0001_")
    assert migrate.status(empty).current
    migrate.require_current(empty)
    first = execute(empty, _OBJECTS)
    assert any("agent_files" in str(row[1]) for row in first)

    assert migrate.up(empty) == (), "nothing is left to do"
    assert [str(step) for step in migrate.down(empty, 0)] == steps[::-1]
    left = {str(row[1]).split(".")[0] for row in execute(empty, _OBJECTS) if row[0] == "column"}
    assert left == {"tenants", "agents", "fusefs_migrations"}
    assert len(migrate.up(empty)) == len(steps)
    assert execute(empty, _OBJECTS) == first


def test_each_step_can_be_taken_back_alone(empty: str) -> None:
    migrate.up(empty)
    for number in range(len(migrate.migrations()), 0, -1):
        assert [step.number for step in migrate.down(empty, number - 1)] == [number]
    assert migrate.status(empty).applied == ()


def test_two_at_once_do_it_once(empty: str) -> None:
    results: list[int | BaseException] = []

    def up() -> None:
        try:
            results.append(len(migrate.up(empty)))
        except FsError as exc:
            results.append(exc)

    threads = [threading.Thread(target=up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=str) == [0, 0, len(migrate.migrations())]


def test_a_step_that_fails_leaves_nothing(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        Migration(1, "good", "create table good_one (a int);", "drop table good_one;", "x"),
        Migration(2, "bad", "create table bad_one (a int); select 1 / 0;", "drop table bad_one;", "y"),
    )
    monkeypatch.setattr(migrate, "migrations", lambda: steps)
    with pytest.raises(FsError, match="DivisionByZero"):
        migrate.up(empty)
    found = migrate.status(empty)
    assert [str(done) for done in found.applied] == ["0001_good"]
    assert execute(empty, "select to_regclass('good_one') is not null, to_regclass('bad_one') is null") == [
        (True, True)
    ]
    with pytest.raises(SchemaMismatch, match="lacks the migration 0002_bad"):
        migrate.require_current(empty)


def test_a_changed_step_is_refused(pg: str) -> None:
    execute(pg, "update fusefs_migrations set checksum = 'other' where number = 1")
    for refused in (migrate.up, migrate.require_current, lambda dsn: migrate.down(dsn, 0)):
        with pytest.raises(SchemaMismatch, match=r"0001_\w+ was changed after") as caught:
            refused(pg)
        assert "`fusefs export`" in caught.value.given_hint


def test_a_newer_database_is_refused(pg: str) -> None:
    execute(pg, "insert into fusefs_migrations (number, name, checksum) values (9000, 'future', 'x')")
    for refused in (migrate.up, migrate.require_current):
        with pytest.raises(SchemaMismatch, match="9000_future, which this version of fusefs does not know") as caught:
            refused(pg)
        assert "a newer one" in caught.value.given_hint


def test_a_number_that_is_no_step(pg: str) -> None:
    with pytest.raises(BadConfig, match="no migration 77"):
        migrate.down(pg, 77)


def test_an_old_server_is_refused(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "MIN_SERVER", 990000)
    with pytest.raises(SchemaMismatch, match="14 is the oldest"):
        migrate.up(empty)


@pytest.fixture
def plain_login(empty: str) -> Iterator[str]:
    """The DSN of a login that owns the database and may nothing else."""
    name = f"owner_{uuid.uuid4().hex[:8]}"
    database = conninfo_to_dict(empty)["dbname"]
    execute(empty, f"create role {name} login")
    execute(empty, f"alter database {database} owner to {name}")
    yield make_conninfo(empty, user=name)
    execute(empty, f"alter database {database} owner to postgres")
    execute(empty, f"drop owned by {name}")
    execute(empty, f"drop role {name}")


def test_the_databases_owner_is_enough(pg_template: str, plain_login: str) -> None:
    assert pg_template, "its making made the role, which all databases of the server share"
    assert migrate.up(plain_login)


def test_a_login_that_may_not_make_the_role(plain_login: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "DAEMON_ROLE", "fusefs_nobody")
    with pytest.raises(SchemaMismatch, match=r"no role fusefs_nobody, and owner_.* may not make it") as caught:
        migrate.up(plain_login)
    assert "GRANT fusefs_nobody TO" in caught.value.given_hint


def test_a_database_in_another_encoding(pg_server: harness.PostgresServer) -> None:
    name = f"latin_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(pg_server.dsn(), autocommit=True) as conn:
        conn.execute(f"create database {name} template template0 encoding 'SQL_ASCII' locale 'C'".encode())
    try:
        with pytest.raises(SchemaMismatch, match="encoded in SQL_ASCII, not in UTF8"):
            migrate.up(pg_server.dsn(name))
    finally:
        pg_server.drop_database(name)


def test_fitting_tables_of_another_program_are_adopted(empty: str) -> None:
    execute(empty, "create table tenants (id uuid primary key, name text not null)")
    execute(empty, "create table agents (id uuid primary key, tenant_id uuid not null references tenants, model text)")
    execute(empty, "insert into tenants values (gen_random_uuid(), 'theirs')")
    migrate.up(empty)
    assert execute(empty, "select name, slug from tenants") == [("theirs", None)]
    migrate.down(empty, 0)
    assert execute(empty, "select name from tenants") == [("theirs",)]


@pytest.mark.parametrize(
    ("statements", "text"),
    [
        (["create table tenants (id bigint primary key)"], "tenants.id is bigint, not uuid"),
        (["create table tenants (id uuid)"], "tenants.id is neither the primary key nor unique"),
        (["create table tenants (key uuid primary key)"], "tenants.id is missing"),
        (["create table agents (id uuid primary key)"], "agents.tenant_id is missing"),
        (
            ["create table agents (id uuid, tenant_id text, slug int, primary key (tenant_id, id))"],
            "agents.tenant_id is text, not uuid; agents.id is neither the primary key nor unique by itself",
        ),
    ],
)
def test_tables_that_do_not_fit_are_named(empty: str, statements: list[str], text: str) -> None:
    for statement in statements:
        execute(empty, statement)
    with pytest.raises(SchemaMismatch) as caught:
        migrate.up(empty)
    assert text in str(caught.value)
    assert execute(empty, "select to_regclass('agent_files')") == [(None,)]


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(Unavailable, match="Connection refused") as caught:
        migrate.status("postgresql://u:pw-secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


async def test_a_daemon_checks_through_its_pool(pg: str, empty: str) -> None:
    async with open_database(pg, origin="o") as db:
        await migrate.require_current_on(db)
        assert db.trips == 1
    async with open_database(empty, origin="o") as db:
        with pytest.raises(SchemaMismatch, match="holds no schema of fusefs") as caught:
            await migrate.require_current_on(db)
    assert caught.value.given_hint == "Run `fusefs init`."
