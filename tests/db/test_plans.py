"""What the hot statements read, as the daemon's role: rows that they need, never the namespace.

Before the first ANALYZE the planner guesses, and two indexes that begin with the same column look equal to
it (see `agent_files_parent_idx`). So the tables here are never analysed, or only while they are almost empty, as they
are when a daemon plans its statements on a new database and keeps the plans.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from fusefs.db.queries import query
from tests import harness
from tests.db.conftest import execute

FILES = 3000
READS_AT_MOST = 60
"""Rows that one statement and its triggers may look at; the largest reads a directory of ten."""


@dataclass
class Grown:
    """A namespace with many files in one directory and ten in another."""

    conn: psycopg.Connection[Any]
    tenant: uuid.UUID = field(default_factory=uuid.uuid4)
    agent: uuid.UUID = field(default_factory=uuid.uuid4)

    def id_of(self, path: str) -> uuid.UUID:
        row = self.conn.execute("select id from agent_files where path = %s", (path,)).fetchone()
        assert row is not None, path
        return uuid.UUID(str(row[0]))

    def rows_read(self, name: str, *params: object, of: str = "r") -> int:
        """Run a statement of ours, undo it, and count the rows that it and its triggers read: of tables (`of` is r), or
        of contents that are kept apart (t)."""
        text = re.sub(r"\$(\d+)", lambda found: f"%(p{found[1]})s", query(name).text)
        values = {f"p{number}": value for number, value in enumerate((self.tenant, self.agent, *params), 1)}
        with self.conn.transaction(force_rollback=True):
            before = self._read_so_far(of)
            self.conn.execute(text.encode(), values, prepare=True)
            return self._read_so_far(of) - before

    def _read_so_far(self, of: str) -> int:
        row = self.conn.execute(
            "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint"
            " from pg_stat_xact_all_tables join pg_class on pg_class.oid = relid"
            " where relkind = %s and schemaname in ('public', 'pg_toast')",
            (of,),
        ).fetchone()
        assert row is not None
        return int(row[0])


def plan_all(space: Grown) -> None:
    """Have the connection plan, and keep, the statements of all tests here."""
    test_look_ups_by_path(space, "/few")
    test_files_by_path(space, ["/few"])
    test_look_ups_by_id(space)
    test_commits(space)
    test_deletes(space)
    for statement in ("commit_create", "commit_revive"):
        test_creates(space, statement)
    for revive in (False, True):
        test_claims(space, "file", revive)
    test_renames(space, "/many/f7", "/few/f1", "")


@pytest.fixture(scope="module", params=["custom", "generic", "early", "early analysed"])
def grown(request: pytest.FixtureRequest, pg_server: harness.PostgresServer, pg_template: str) -> Iterator[Grown]:
    name = f"plans_{uuid.uuid4().hex[:16]}"
    dsn = pg_server.create_database(name, pg_template)
    with psycopg.connect(dsn, autocommit=True) as conn:
        space = Grown(conn)
        for table in ("agent_files", "agent_file_versions"):
            conn.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())
        conn.execute("insert into tenants (id) values (%s)", (space.tenant,))
        conn.execute("insert into agents (id, tenant_id) values (%s, %s)", (space.agent, space.tenant))
        conn.execute("select set_config('fusefs.tenant', %s, false)", (str(space.tenant),))
        conn.execute("set role fusefs_daemon")
        conn.execute("set enable_seqscan = off")
        conn.execute(
            f"set plan_cache_mode = force_{'custom' if request.param == 'custom' else 'generic'}_plan".encode()
        )
        insert = (
            "insert into agent_files (tenant_id, agent_id, path, content)"
            " select %s, %s, %s || '/f' || i, 'text' from generate_series(%s::int, %s::int) i"
        )
        conn.execute(insert, (space.tenant, space.agent, "/many", 1, 10))
        conn.execute(insert, (space.tenant, space.agent, "/few", 1, 10))
        if request.param == "early analysed":
            execute(dsn, "vacuum analyze")
        if request.param.startswith("early"):
            plan_all(space)
        conn.execute(insert, (space.tenant, space.agent, "/many", 11, FILES))
        yield space
    pg_server.drop_database(name)


def by(write_id: uuid.UUID | None = None) -> tuple[object, ...]:
    return "agent", "s1", write_id or uuid.uuid4()


def attrs() -> tuple[object, ...]:
    return 0o644, None, None, 1


@pytest.mark.parametrize("path", ["/few", "/many/f7"])
def test_look_ups_by_path(grown: Grown, path: str) -> None:
    assert grown.rows_read("load_directory", path) <= READS_AT_MOST
    assert grown.rows_read("fetch_node", path) <= READS_AT_MOST


@pytest.mark.parametrize("links", [["/few", "/few/f1"], []])
def test_files_by_path(grown: Grown, links: list[str]) -> None:
    assert grown.rows_read("fetch_file", "/many/f7") <= READS_AT_MOST
    assert grown.rows_read("fetch_links", links) <= READS_AT_MOST


def test_searches_read_what_is_below_their_path(grown: Grown) -> None:
    here = ("/few/", "/few0", ["large_tool_results"], ["s1"])
    assert grown.rows_read("list_files", *here, None, 100) <= READS_AT_MOST
    assert grown.rows_read("list_files", *here, "^/few/[^/]*$", 100) <= READS_AT_MOST
    assert grown.rows_read("grep_text", *here, None, "text", 0, 100) <= READS_AT_MOST
    assert grown.rows_read("grep_pattern", *here, None, "te?xt", 0, 100, "(?n)te?xt", "(te?xt)") <= READS_AT_MOST


def test_a_search_of_everything_ends_at_its_limit(grown: Grown) -> None:
    everywhere = ("/", "0", [], [])
    assert grown.rows_read("list_files", *everywhere, None, 10) <= READS_AT_MOST
    assert grown.rows_read("grep_text", *everywhere, None, "text", 0, 10) <= READS_AT_MOST


def test_look_ups_by_id(grown: Grown) -> None:
    ids = [grown.id_of(f"/many/f{number}") for number in range(1, 6)]
    assert grown.rows_read("fetch_contents", ids) <= READS_AT_MOST
    assert grown.rows_read("fetch_nodes", ids) <= READS_AT_MOST
    assert grown.rows_read("fetch_state", ids[0]) <= READS_AT_MOST
    assert grown.rows_read("find_write", uuid.uuid4()) <= READS_AT_MOST
    assert grown.rows_read("find_claim", ids[0], uuid.uuid4()) <= READS_AT_MOST


@pytest.mark.parametrize("statement", ["commit_create", "commit_revive"])
def test_creates(grown: Grown, statement: str) -> None:
    params = (uuid.uuid4(), "/many/new", "text", None, "file", 2000, *attrs(), *by(), 7)
    assert grown.rows_read(statement, *params) <= READS_AT_MOST


@pytest.mark.parametrize(("kind", "revive"), [("file", False), ("file", True), ("dir", False)])
def test_claims(grown: Grown, kind: str, revive: bool) -> None:
    params = (uuid.uuid4(), "/many/new", kind, 2000, *attrs(), *by(), 7)
    assert grown.rows_read("claim_revived" if revive else "claim_name", *params) <= READS_AT_MOST


def test_commits(grown: Grown) -> None:
    node = grown.id_of("/many/f7")
    written = (1, None, None, None)
    assert grown.rows_read("commit_write", node, 1, "more", None, *written, *by(), "write", 7, None) <= READS_AT_MOST
    assert grown.rows_read("commit_append", node, b"more", "more", 1000, *written, *by(), 7) <= READS_AT_MOST
    assert grown.rows_read("set_attrs", [node], [0o600], [None], [None], [None], False) <= READS_AT_MOST
    directories = [grown.id_of("/many"), grown.id_of("/few")]
    assert grown.rows_read("touch_directories", directories, [1 << 62, 1 << 62]) <= READS_AT_MOST


@pytest.mark.parametrize(
    ("source", "target", "mode"),
    [
        ("/many/f7", "/many/new", ""),
        ("/many/f7", "/few/f1", ""),
        ("/many/f7", "/few/f1", "exchange"),
        ("/few", "/z", ""),
    ],
)
def test_renames(grown: Grown, source: str, target: str, mode: str) -> None:
    over = grown.id_of(target) if target == "/few/f1" else None
    params = (grown.id_of(source), source, target, over, None, mode, *by(), 1024, 64)
    assert grown.rows_read("rename_node", *params) <= READS_AT_MOST


@pytest.mark.parametrize("path", ["/large/f", "/large"])
def test_a_rename_reads_no_content(grown: Grown, path: str) -> None:
    text = "".join(str(uuid.uuid4()) for _ in range(3000))
    with grown.conn.transaction(force_rollback=True):
        grown.conn.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/large/f', %s)",
            (grown.tenant, grown.agent, text),
        )
        params = (grown.id_of(path), path, f"{path}-moved", None, None, "", *by(), 1024, 64)
        assert grown.rows_read("rename_node", *params, of="t") == 0
        assert grown.rows_read("fetch_contents", [grown.id_of("/large/f")], of="t") > 0


def test_deletes(grown: Grown) -> None:
    assert grown.rows_read("delete_node", grown.id_of("/many/f7"), "/many/f7", *by()) <= READS_AT_MOST
