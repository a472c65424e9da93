"""Row-level security as the last line: queries that are wrong on purpose, and that no query of ours is.

Tenant A is set, or none; everything else in a statement points at tenant B. What B has is compared before and after.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from fusefs.db.queries import QUERIES
from tests import harness

TABLES = ("agent_files", "agent_file_versions", "agent_file_conflicts", "agent_namespaces", "agent_sessions")
DELETED_FROM = tuple(table for table in TABLES if table != "agent_namespaces")
"""A namespace goes with its agent only: its files go with it."""
SECRET = "only for tenant B"
SHARED_ID = "5f9b2f9e-0000-4000-8000-00000000000a"
"""A lineage of both tenants: their keys differ by the tenant alone."""

Rows = dict[str, list[tuple[object, ...]]]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Two tenants with the same paths, session and lineage; `params` names what belongs to whom."""

    a: harness.Namespace
    b: harness.Namespace
    login: str
    conflict: str
    owner: psycopg.Connection[tuple[object, ...]]

    @property
    def dsn(self) -> str:
        """A login as docs/internals/security.md asks for: a member of the daemon's role that owns nothing."""
        return make_conninfo(self.a.dsn, user=self.login)

    @property
    def params(self) -> dict[str, object]:
        return {
            "a": self.a.tenant_id,
            "a_agent": self.a.agent_id,
            "b": self.b.tenant_id,
            "b_agent": self.b.agent_id,
            "id": SHARED_ID,
            "conflict": self.conflict,
            "new": str(uuid.uuid4()),
        }

    def everything_of_b(self) -> Rows:
        return {
            table: self.owner.execute(
                f"select t::text from {table} t where tenant_id = %s order by 1".encode(), (self.b.tenant_id,)
            ).fetchall()
            for table in TABLES
        }


def _fill(namespace: harness.Namespace, text: str, conflict: str) -> None:
    ids = (namespace.tenant_id, namespace.agent_id)
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, id, path, content) values (%s, %s, %s, '/d/f', 'first')",
        (*ids, SHARED_ID),
    )
    namespace.execute("update agent_files set content = %s where tenant_id = %s and path = '/d/f'", (text, ids[0]))
    namespace.execute(
        "insert into agent_sessions (tenant_id, agent_id, session, principal) values (%s, %s, 's-1', 'agent')", ids
    )
    namespace.execute(
        "insert into agent_file_conflicts (tenant_id, agent_id, id, path, op, content, session, principal)"
        " values (%s, %s, %s, '/d/f', 'write', %s, 's-1', 'agent')",
        (*ids, conflict, text.encode()),
    )
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, 1000000, 1000000)", ids)


@pytest.fixture(scope="module")
def tenants(module_pg: str, pg_server: harness.PostgresServer) -> Iterator[Tenants]:
    a, b = harness.make_namespace(module_pg), harness.make_namespace(module_pg)
    owner = psycopg.connect(module_pg, autocommit=True)
    found = Tenants(a, b, f"app_{uuid.uuid4().hex[:12]}", str(uuid.uuid4()), owner)
    _fill(a, "for tenant A", found.conflict)
    _fill(b, SECRET, found.conflict)
    a.execute("analyze")
    name = sql.Identifier(found.login)
    pg_server.execute(sql.SQL("create role {} login in role fusefs_daemon").format(name))
    yield found
    owner.close()
    pg_server.execute(sql.SQL("drop role {}").format(name))


class Daemon:
    """A connection as the daemon's role."""

    def __init__(self, tenants: Tenants, tenant: str | None) -> None:
        self.conn = psycopg.connect(tenants.dsn, autocommit=True)
        self.conn.execute("set role fusefs_daemon")
        if tenant is not None:
            self.conn.execute("select set_config('fusefs.tenant', %s, false)", (tenant,))

    def run(self, statement: str, params: Mapping[str, object] | None = None) -> list[tuple[object, ...]]:
        cursor = self.conn.execute(statement.encode(), params)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def as_a(tenants: Tenants) -> Iterator[Daemon]:
    """The daemon with tenant A set. Whatever a test does must leave tenant B as it was."""
    before = tenants.everything_of_b()
    assert all(before.values()), "a table without a row of tenant B proves nothing"
    daemon = Daemon(tenants, tenants.a.tenant_id)
    yield daemon
    daemon.conn.close()
    assert tenants.everything_of_b() == before


# Reading

WRONG_READS = [
    "select t::text from {table} t",
    "select t::text from {table} t where tenant_id = %(b)s",
    "select t::text from {table} t where agent_id = %(b_agent)s",
    "select t::text from {table} t where tenant_id <> %(a)s",
    "select t::text from {table} t where tenant_id is distinct from %(a)s",
    "select t::text from {table} t where (tenant_id = %(a)s or true)",
    "select o::text from {table} t join {table} o on o.tenant_id <> t.tenant_id",
    "select t::text from tenants n left join {table} t on t.tenant_id = n.id where n.id = %(b)s and t.tenant_id = n.id",
    "select t::text from agents g join lateral (select * from {table} where agent_id = g.id) t on true",
    "with w as materialized (select * from {table}) select w::text from w",
    "select t::text from {table} t for update",
    "select count(*)::text from {table} t where tenant_id = %(b)s having count(*) > 0",
    "copy {table} to stdout",
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("statement", WRONG_READS)
def test_wrong_reads_find_nothing_of_another_tenant(as_a: Daemon, tenants: Tenants, table: str, statement: str) -> None:
    text = statement.format(table=table)
    if text.startswith("copy"):
        with as_a.conn.cursor().copy(text.encode()) as copy:
            seen = b"".join(bytes(part) for part in copy).decode()
        assert tenants.a.tenant_id in seen
    else:
        seen = str(as_a.run(text, tenants.params))
    assert tenants.b.tenant_id not in seen
    assert tenants.b.agent_id not in seen
    assert SECRET not in seen


@pytest.mark.parametrize("table", TABLES)
def test_the_reads_would_find_it_without_row_level_security(tenants: Tenants, table: str) -> None:
    """What keeps the test above honest: as the owner the same statements read tenant B."""
    for statement in WRONG_READS[:-1]:
        found = tenants.owner.execute(statement.format(table=table).encode(), tenants.params).fetchall()
        assert tenants.b.tenant_id in str(found) or "count" in statement, statement


def test_own_rows_are_there(as_a: Daemon, tenants: Tenants) -> None:
    for table in TABLES:
        found = as_a.run(f"select distinct tenant_id::text from {table}")
        assert found == [(tenants.a.tenant_id,)], table


def test_statistics_hold_nothing_of_others(as_a: Daemon) -> None:
    """pg_stats keeps the most common values of a table, of all tenants."""
    assert as_a.run("select tablename from pg_stats where tablename = any(%(tables)s)", {"tables": list(TABLES)}) == []
    with pytest.raises(errors.InsufficientPrivilege):
        as_a.run("select * from pg_statistic")


# Writing

WRONG_WRITES = [
    *(f"update {table} set agent_id = agent_id where tenant_id = %(b)s returning 1" for table in TABLES),
    *(f"delete from {table} where tenant_id = %(b)s returning 1" for table in DELETED_FROM),
    *(f"delete from {table} where agent_id = %(b_agent)s returning 1" for table in DELETED_FROM),
    "update agent_files set content = 'x' where id = %(id)s and tenant_id <> %(a)s returning 1",
    "update agent_files f set content = 'x' from agents g where f.agent_id = g.id and g.tenant_id = %(b)s returning 1",
    "update agent_namespaces set quota_bytes = 0 where tenant_id <> %(a)s returning 1",
    "update agent_sessions set ended_at = now() where tenant_id = %(b)s returning 1",
    "delete from agent_file_conflicts where id = %(conflict)s and tenant_id = %(b)s returning 1",
    "delete from agent_file_versions using tenants t where tenant_id = t.id and t.id = %(b)s returning 1",
]

REFUSED_WRITES = [
    "insert into agent_files (tenant_id, agent_id, path, content) values (%(b)s, %(b_agent)s, '/planted', 'x')",
    ("insert into agent_files (tenant_id, agent_id, path, content) values (%(b)s, %(b_agent)s, '/d/f', 'x')"
    " on conflict (tenant_id, agent_id, path) do update set content = 'x'"),
    ("insert into agent_files (tenant_id, agent_id, id, path, content)"
    " values (%(b)s, %(b_agent)s, %(id)s, '/d/f', 'x') on conflict do nothing"),
    "insert into agent_sessions (tenant_id, agent_id, session, principal) values (%(b)s, %(b_agent)s, 's-2', 'agent')",
    ("insert into agent_sessions as s (tenant_id, agent_id, session, principal)"
    " values (%(b)s, %(b_agent)s, 's-1', 'agent')"
    " on conflict (tenant_id, agent_id, session) do update set ended_at = now()"),
    ("insert into agent_namespaces (tenant_id, agent_id, channel) values (%(b)s, %(b_agent)s, 'mine')"
    " on conflict (tenant_id, agent_id) do update set channel = 'mine'"),
    ("insert into agent_file_conflicts (tenant_id, agent_id, path, op, content, session, principal)"
    " values (%(b)s, %(b_agent)s, '/p', 'write', '', 's-1', 'agent')"),
    ("insert into agent_file_versions (tenant_id, agent_id, file_id, version, op, kind, path, size_bytes, mode,"
    " updated_by, updated_session, write_id)"
    " values (%(b)s, %(b_agent)s, %(id)s, 9, 'write', 'file', '/d/f', 0, 0, '', '', %(new)s)"),
    # Own rows cannot be given away.
    *(f"update {table} set tenant_id = %(b)s, agent_id = %(b_agent)s where tenant_id = %(a)s" for table in TABLES),
    # Not the daemon's at all.
    "delete from agent_namespaces where agent_id = %(a_agent)s",
    *(f"truncate {table}" for table in TABLES),
    *(f"alter table {table} disable row level security" for table in TABLES),
    "drop policy tenant_isolation on agent_files",
    "alter table agent_files disable trigger fusefs_after_update",
    "delete from agents where id = %(b_agent)s",
    "delete from tenants where id = %(b)s",
    "update agents set tenant_id = %(a)s where id = %(b_agent)s",
    "update tenants set slug = 'taken' where id = %(b)s",
    "insert into agents (tenant_id) values (%(a)s)",
    "select setval('fusefs_ino', 1024)",
    "create table planted ()",
]  # fmt: skip


@pytest.mark.parametrize("statement", WRONG_WRITES)
def test_wrong_writes_change_nothing(as_a: Daemon, tenants: Tenants, statement: str) -> None:
    assert as_a.run(statement, tenants.params) == []


@pytest.mark.parametrize("statement", WRONG_WRITES)
def test_the_writes_would_change_it_without_row_level_security(tenants: Tenants, statement: str) -> None:
    with psycopg.connect(tenants.a.dsn) as conn:
        # A directory that still has entries must not be what stops the statement.
        conn.execute("alter table agent_files disable trigger user")
        assert conn.execute(statement.encode(), tenants.params).fetchall()
        conn.rollback()


@pytest.mark.parametrize("statement", REFUSED_WRITES)
def test_writes_into_another_tenant_are_refused(as_a: Daemon, tenants: Tenants, statement: str) -> None:
    with pytest.raises(errors.InsufficientPrivilege):
        as_a.run(statement, tenants.params)


def test_a_row_that_mixes_two_tenants_stays_with_the_one_that_is_set(as_a: Daemon, tenants: Tenants) -> None:
    """A namespace's foreign key to its agent knows no tenant: such a row can be made, by its writer's mistake alone."""
    as_a.run(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%(a)s, %(b_agent)s, '/d/f', 'mixed')",
        tenants.params,
    )
    daemon_of_b = Daemon(tenants, tenants.b.tenant_id)
    found = daemon_of_b.run(
        "select content from agent_files where agent_id = %(b_agent)s and path = '/d/f'", tenants.params
    )
    daemon_of_b.conn.close()
    assert found == [(SECRET,)]
    tenants.owner.execute(
        "delete from agent_namespaces where tenant_id = %(a)s and agent_id = %(b_agent)s", tenants.params
    )
    as_a.run("delete from agent_file_versions where tenant_id = %(a)s and agent_id = %(b_agent)s", tenants.params)


# Functions

_RENAME = (
    "select * from fusefs_rename_v1(%(b)s, %(b_agent)s, %(id)s, '/d/f', '/d/g', null, null, '', 'x', 's-1', %(new)s,"
    " 4096, 64)"
)
WITHOUT_EFFECT = [
    "select 1 from fusefs_touch_v1(%(b)s, %(b_agent)s, array[%(id)s]::uuid[], array[1::bigint << 62]) where false",
    (
        "select 1 from fusefs_set_attrs_v1(%(b)s, %(b_agent)s, array[%(id)s]::uuid[], array[0], array[null::bigint],"
        " array[null::bigint], array[1::bigint], true)"
    ),
    "select 1 from fusefs_set_quotas_v1(%(b)s, %(b_agent)s, 0, 0) where false",
    "select 1 from fusefs_move_v1(%(b)s, %(b_agent)s, 'file', '/d/f', '/d/g') where false",
    "select 1 from fusefs_check_depth_v1(%(b)s, %(b_agent)s, 'dir', '/d', '/e', 1, 1) where false",
    "select 1 from fusefs_follow_v1(%(b)s, %(b_agent)s, 'mine', false, true) as how where how is not null",
    (
        "select 1 from fusefs_announce_v1(%(b)s, %(b_agent)s, 'delete', '/d/f', null, %(id)s, 'file', 5000, 9, 0, 0,"
        " null, null, 0, now(), 's-1', 0, -100) as told where told"
    ),
]
REFUSED_CALLS = [
    (_RENAME, "FS001"),
    (_RENAME.replace("''", "'exchange'", 1), "FS001"),
    ("select fusefs_make_parents_v1(%(b)s, %(b_agent)s, '/planted/d')", "42501"),
    ("select fusefs_lock_parent_v1(%(b)s, %(b_agent)s, '/planted/d/f')", "42501"),
]  # fmt: skip


def test_every_function_with_a_tenant_is_tried(tenants: Tenants) -> None:
    found = tenants.a.execute(
        "select proname from pg_proc where proname like 'fusefs\\_%%\\_v1' and 'p_tenant' = any(proargnames)"
    )
    tried = re.findall(r"fusefs_\w+_v1", " ".join([*WITHOUT_EFFECT, *(call for call, _ in REFUSED_CALLS)]))
    assert {name for (name,) in found} == set(tried)


@pytest.mark.parametrize("call", WITHOUT_EFFECT)
def test_functions_with_another_tenants_ids_do_nothing(as_a: Daemon, tenants: Tenants, call: str) -> None:
    assert as_a.run(call, tenants.params) == []


@pytest.mark.parametrize(("call", "state"), REFUSED_CALLS)
def test_functions_with_another_tenants_ids_are_refused(as_a: Daemon, tenants: Tenants, call: str, state: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        as_a.run(call, tenants.params)
    assert caught.value.sqlstate == state


# The setting


@pytest.mark.parametrize("setting", [None, ""])
def test_without_a_tenant_there_are_no_rows(tenants: Tenants, setting: str | None) -> None:
    daemon = Daemon(tenants, setting)
    for table in TABLES:
        assert daemon.run(f"select t::text from {table} t") == []
    for table in DELETED_FROM:
        assert daemon.run(f"delete from {table} returning 1") == []
    for statement in REFUSED_WRITES[:2]:
        with pytest.raises(errors.InsufficientPrivilege):
            daemon.run(statement, tenants.params)
    daemon.conn.close()


@pytest.mark.parametrize("setting", ["nonsense", "%", "*", "' or true --", "null", "{}", " ", "0", "a" * 5000])
def test_a_malformed_tenant_is_an_error_not_a_door(tenants: Tenants, setting: str) -> None:
    daemon = Daemon(tenants, setting)
    for table in TABLES:
        with pytest.raises(errors.InvalidTextRepresentation):
            daemon.run(f"select t::text from {table} t")
    for table in DELETED_FROM:
        with pytest.raises(errors.InvalidTextRepresentation):
            daemon.run(f"delete from {table}")
    daemon.conn.close()


def test_a_tenant_that_does_not_exist_has_nothing(tenants: Tenants) -> None:
    daemon = Daemon(tenants, str(uuid.uuid4()))
    assert [daemon.run(f"select t::text from {table} t") for table in TABLES] == [[]] * len(TABLES)
    daemon.conn.close()


def test_row_level_security_cannot_be_switched_off(as_a: Daemon) -> None:
    """The setting makes a statement fail that would be filtered; it never lets rows through."""
    as_a.run("set row_security = off")
    for table in TABLES:
        with pytest.raises(errors.InsufficientPrivilege, match="row-level security"):
            as_a.run(f"select * from {table}")


# The role


def test_the_role_has_no_way_around(tenants: Tenants) -> None:
    ((*flags,),) = tenants.a.execute(
        "select rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication, rolcanlogin, rolinherit"
        " from pg_roles where rolname = 'fusefs_daemon'"
    )
    assert not any(flags)
    assert (
        tenants.a.execute("select 1 from pg_shdepend where refobjid = 'fusefs_daemon'::regrole and deptype = 'o'") == []
    )
    assert tenants.a.execute("select roleid from pg_auth_members where member = 'fusefs_daemon'::regrole") == []
    unprotected = tenants.a.execute(
        "select c.relname from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id'"
        " where c.relkind in ('r', 'p') and c.relnamespace = current_schema()::regnamespace and not c.relrowsecurity"
    )
    assert unprotected == [("agents",)], "a table with tenants and without row-level security"


@pytest.mark.parametrize(
    "statement",
    [
        "set role {owner}",
        "set session authorization {owner}",
        "select * from pg_authid",
        "select passwd from pg_shadow",
        "select pg_read_file('/etc/passwd')",
        "copy agent_files to program 'cat'",
        "copy (select 1) to '/tmp/planted'",
        "alter role fusefs_daemon bypassrls",
        "alter role current_user superuser",
        "grant {owner} to fusefs_daemon",
        "create role planted",
        "create policy planted on agent_files using (true)",
    ],
)
def test_the_role_cannot_become_more(as_a: Daemon, statement: str) -> None:
    ((owner,),) = as_a.run("select tableowner from pg_tables where tablename = 'agent_files'")
    with pytest.raises(psycopg.Error) as caught:
        as_a.run(statement.format(owner=owner))
    assert caught.value.sqlstate == "42501"


def test_the_login_behind_the_role_is_bound_too(tenants: Tenants, as_a: Daemon) -> None:
    """RESET ROLE leads back to the login, which inherits what the role may, and its policies with it."""
    as_a.run("reset role")
    assert as_a.run("select current_user") == [(tenants.login,)]
    for table in TABLES:
        found = as_a.run(f"select distinct tenant_id::text from {table}")
        assert found == [(tenants.a.tenant_id,)], table
    with pytest.raises(errors.InsufficientPrivilege):
        as_a.run("delete from agents")


def test_a_program_that_deletes_agents_gets_no_rights_of_the_owner(
    tenants: Tenants, pg_server: harness.PostgresServer
) -> None:
    """`fusefs_purge_history` runs with the owner's rights. Its table must not be one that the caller made: temporary
    tables are found first where the search path does not say otherwise."""
    name = f"program_{uuid.uuid4().hex[:12]}"
    victim = harness.make_namespace(tenants.a.dsn)
    victim.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/f', 'x')",
        (victim.tenant_id, victim.agent_id),
    )
    pg_server.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    with psycopg.connect(tenants.a.dsn, autocommit=True) as owner:
        owner.execute(f"grant select, delete on agents to {name}".encode())
        with psycopg.connect(make_conninfo(tenants.a.dsn, user=name), autocommit=True) as conn:
            conn.execute("create temporary table agent_file_versions (tenant_id uuid, agent_id uuid)")
            conn.execute("create temporary table ran_as (who text)")
            conn.execute("grant insert on ran_as to public")
            conn.execute(
                "create function pg_temp.planted() returns trigger language plpgsql as"
                " $$ begin insert into pg_temp.ran_as values (current_user); return old; end $$"
            )
            conn.execute(
                "create trigger planted before delete on pg_temp.agent_file_versions"
                " for each row execute function pg_temp.planted()"
            )
            conn.execute("insert into pg_temp.agent_file_versions values (%s, %s)", (victim.tenant_id, victim.agent_id))
            conn.execute("delete from agents where id = %s", (victim.agent_id,))
            assert conn.execute("select who from pg_temp.ran_as").fetchall() == []
        owner.execute(f"drop owned by {name}".encode())
        owner.execute(f"drop role {name}".encode())
    assert victim.execute("select 1 from agent_file_versions where agent_id = %s", (victim.agent_id,)) == []


def test_the_purge_of_a_history_cannot_be_borrowed(as_a: Daemon, tenants: Tenants) -> None:
    """It runs past row-level security: as the trigger of a table of the caller's own it would purge anybody's."""
    as_a.run("create temporary table mine (tenant_id uuid, id uuid)")
    with pytest.raises(errors.InsufficientPrivilege):
        as_a.run("create trigger borrowed after delete on mine for each row execute function fusefs_purge_history_v1()")
    as_a.run("insert into mine values (%(b)s, %(b_agent)s)", tenants.params)
    as_a.run("delete from mine")


def test_one_function_runs_as_the_owner(tenants: Tenants) -> None:
    """What does so must be looked at: a search path that ends with pg_temp, and nobody's to call."""
    found = tenants.a.execute(
        "select proname, proconfig, has_function_privilege('fusefs_daemon', oid, 'execute') from pg_proc"
        " where prosecdef and pronamespace = current_schema()::regnamespace"
    )
    assert found == [("fusefs_purge_history_v1", ["search_path=public, pg_temp"], False)]


# The limits that docs/internals/security.md states


def test_whoever_has_the_daemons_login_chooses_the_tenant(tenants: Tenants) -> None:
    """The tenant is a setting of the connection: it guards against mistakes, not against who has the login."""
    daemon = Daemon(tenants, tenants.b.tenant_id)
    assert daemon.run("select content from agent_files where path = '/d/f'") == [(SECRET,)]
    daemon.conn.close()


def test_a_restrictive_policy_keeps_a_program_at_its_tenant(
    tenants: Tenants, pg_server: harness.PostgresServer
) -> None:
    """As the page says to make a login for a program of one tenant: what it sets then is of no use to it. It is no
    member of the daemon's role, since the policy does not bind that."""
    name = f"program_{uuid.uuid4().hex[:12]}"
    pg_server.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    statements = [
        f"grant select, insert, update, delete on {', '.join(TABLES)} to {name}",
        f"grant select on tenants, agents to {name}",
        f"grant usage on sequence fusefs_ino to {name}",
        *(
            f"create policy only_a on {table} as restrictive to {name} using (tenant_id = '{tenants.a.tenant_id}')"
            for table in TABLES
        ),
    ]
    for statement in statements:
        tenants.owner.execute(statement.encode())
    before = tenants.everything_of_b()
    with psycopg.connect(make_conninfo(tenants.a.dsn, user=name), autocommit=True) as conn:
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute("set role fusefs_daemon")
        for tenant, found in ((tenants.a.tenant_id, [("for tenant A",)]), (tenants.b.tenant_id, [])):
            conn.execute("select set_config('fusefs.tenant', %s, false)", (tenant,))
            assert conn.execute("select content from agent_files where path = '/d/f'").fetchall() == found
            for statement in WRONG_WRITES:
                assert conn.execute(statement.encode(), tenants.params).fetchall() == []
            for statement in REFUSED_WRITES[:8]:
                with pytest.raises(errors.InsufficientPrivilege):
                    conn.execute(statement.encode(), tenants.params)
        conn.execute("select set_config('fusefs.tenant', %s, false)", (tenants.a.tenant_id,))
        conn.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%(a)s, %(a_agent)s, '/own', 'x')",
            tenants.params,
        )
    tenants.owner.execute(f"drop owned by {name}".encode())
    tenants.owner.execute(f"drop role {name}".encode())
    assert tenants.everything_of_b() == before


def test_a_program_that_writes_can_deceive_the_triggers(as_a: Daemon, tenants: Tenants) -> None:
    """They keep the history of programs that mean well: who may write can name somebody else, leave no content, and
    have a quota charged wrongly."""
    as_a.run(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%(a)s, %(a_agent)s, '/t', 'x')",
        tenants.params,
    )
    as_a.run("select set_config('fusefs.by', 'admin', false), set_config('fusefs.delete_op', 'moved', false)")
    as_a.run("delete from agent_files where tenant_id = %(a)s and path = '/t'", tenants.params)
    found = as_a.run("select updated_by, old_state from agent_file_versions where path = '/t' and op = 'moved'")
    assert found == [("admin", "none")]
    # Setting a quota counts anew.
    as_a.run("select fusefs_set_quotas_v1(%(a)s, %(a_agent)s, 1000000, null)", tenants.params)


# Our own queries

WITH_TENANT = {*TABLES, "agents"}
NEITHER = {
    "list_tenants": "an administrator's list; tenants are visible to every daemon",
    "find_tenant": "a tenant by its name",
    "insert_tenant": "as the owner",
    "delete_tenant": "as the owner, by the tenant's own id",
    "prepare_search": "a time and an expression, before a search",
    "reserve_inos": "numbers of one sequence for all",
}
ONLY_TENANT = {
    "list_agents": "the agents of a tenant",
    "find_agents": "an agent by its name; the tenant may be open, and row-level security does not guard agents",
    "insert_agent": "the agent is made",
}


def tables_of(statement: str) -> set[str]:
    """The tables that a statement names; common table expressions are not tables."""
    names = set(re.findall(r"\b(?:from|join|into|update|using)\s+([a-z_]+)\b", statement))
    return names & {*WITH_TENANT, "tenants"}


def binds(statement: str, column: str, number: int) -> bool:
    """Whether a column is compared with, or inserted from, its parameter."""
    compared = rf"\b(?:\w+\.)?{column} (?:=|is not distinct from) \${number}::uuid"
    inserted = rf"insert into \w+(?: as \w+)? \((?:\w+, )*{column}\b"
    called = r"from fusefs_\w+_v1\(\$1::uuid, \$2::uuid|select fusefs_\w+_v1\(\$1::uuid, \$2::uuid"
    if re.search(compared, statement) or re.search(called, statement):
        return True
    return bool(re.search(inserted, statement)) and f"${number}::uuid" in statement


def unbound(statement: str) -> list[str]:
    """Tables of a statement that no condition ties to the tenant, as `alias.tenant_id` or directly."""
    problems = []
    for piece in re.split(r"\bunion(?: all)?\b|\bselect\b", statement):
        used = tables_of(piece) & set(TABLES)
        if used and not re.search(r"tenant_id\s*(?:=|,)|tenant_id$", piece):
            problems += sorted(used)
    return problems


@pytest.mark.parametrize("query", [*QUERIES.values()], ids=lambda query: query.name)
def test_every_query_names_tenant_and_agent(query: object) -> None:
    name, statement = query.name, query.text  # type: ignore[attr-defined]
    if name in NEITHER:
        assert not tables_of(statement) & set(TABLES)
        return
    assert tables_of(statement) & WITH_TENANT or "fusefs_" in statement, "a query of nothing that has a tenant"
    assert binds(statement, "tenant_id", 1), "the tenant is not named"
    assert not unbound(statement), "a part of the query does not name the tenant"
    if name in ONLY_TENANT:
        assert not tables_of(statement) & set(TABLES)
        return
    assert binds(statement, "agent_id", 2) or binds(statement, "id", 2), "the agent is not named"


def test_the_exceptions_exist() -> None:
    assert {*NEITHER, *ONLY_TENANT} <= set(QUERIES)


@pytest.mark.parametrize(
    "statement",
    [
        "select id from agent_files where agent_id = $2::uuid and path = $3",
        "delete from agent_file_conflicts where id = $1::uuid",
        "insert into agent_sessions (agent_id, session) values ($2::uuid, $1)",
        "update agent_files set content = $3 where id = $1::uuid",
        "select 1 from agent_files f where f.tenant_id = $2::uuid",
    ],
)
def test_a_query_without_a_tenant_would_be_found(statement: str) -> None:
    assert not binds(statement, "tenant_id", 1)


def test_a_part_of_a_query_without_a_tenant_would_be_found() -> None:
    first = "select id from agent_files where tenant_id = $1::uuid"
    assert unbound(f"{first} union all select id from agent_file_versions where path = $3") == ["agent_file_versions"]
    assert unbound(f"{first} union all {first}") == []
