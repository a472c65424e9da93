"""docs/reference/table.md: its columns are the table's, and its worked example does what it says."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests import harness

PAGE = (harness.ROOT / "docs" / "reference" / "table.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```sql\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture
def role(pg_server: harness.PostgresServer, pg: str) -> Iterator[str]:
    """A login made as the page says, under a name of its own; roles belong to the whole server."""
    name = f"app_{uuid.uuid4().hex[:8]}"
    (script,) = re.findall(r"^```sql role\n(.*?)^```", PAGE, flags=re.M | re.S)
    with psycopg.connect(pg, autocommit=True) as conn:
        conn.execute(script.replace("app", name).encode())
    yield name
    with psycopg.connect(pg_server.dsn(), autocommit=True) as conn:
        conn.execute(f"drop role {name}".encode())


def run(conn: psycopg.Connection[tuple[object, ...]], script: str) -> list[list[tuple[object, ...]]]:
    """Run a script; the rows of each of its statements that has some."""
    found = []
    cursor = conn.execute(script.encode())
    while True:
        if cursor.description:
            found.append(cursor.fetchall())
        if not cursor.nextset():
            return found


def test_the_columns_are_those_of_the_table(pg: str) -> None:
    tables = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, flags=re.M)
    with psycopg.connect(pg) as conn:
        rows = conn.execute(
            "select column_name, udt_name from information_schema.columns where table_name = 'agent_files'"
        ).fetchall()
    types = {"int4": "int", "int8": "bigint"}
    assert sorted(tables) == sorted((name, types.get(udt, udt)) for name, udt in rows)


def test_the_worked_example(pg: str, role: str) -> None:
    namespace = harness.make_namespace(pg, "acme", "coder")
    insert, update, listing = SCRIPTS
    with psycopg.connect(make_conninfo(pg, user=role), autocommit=True) as conn:
        assert run(conn, "select count(*) from agent_files") == [[(0,)]]  # without the setting
        run(conn, insert)
        assert run(conn, update)[1:] == [[("Revenue rose.", 1)], [(2,)]]
        assert run(conn, update)[1:] == [[("Revenue rose by 3 %.", 2)], []]  # somebody was faster
        assert run(conn, listing)[1:] == [
            [("/reports/2024", "dir", 0)],
            [("/reports/2024", 1), ("/reports/2024/q1.md", 2)],
        ]
    rows = namespace.execute(
        "select path, kind, version, updated_by from agent_files where starts_with(path, '/reports')"
    )
    by = f"sql:{role}"
    assert sorted(rows) == [
        ("/reports", "dir", 1, by),
        ("/reports/2024", "dir", 1, by),
        ("/reports/2024/q1.md", "file", 2, by),
    ]
    history = namespace.execute("select version, op, old_state, old_content from agent_file_versions order by seq")
    assert history == [(1, "create", "none", None), (2, "write", "text", "Revenue rose.")]


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/f/below', '')", "FS003"),
        ("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/a/../b', '')", "FS010"),
        ("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/f', '')", "23505"),
        ("delete from agent_files where tenant_id = %s and agent_id = %s and path = '/d'", "FS005"),
        ("update agent_files set path = '/e' where tenant_id = %s and agent_id = %s and path = '/d'", "FS005"),
    ],
)
def test_what_the_triggers_refuse(namespace: harness.Namespace, statement: str, state: str) -> None:
    keys = (namespace.tenant_id, namespace.agent_id)
    for path in ("/f", "/d/g"):
        namespace.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, %s, 'x')", (*keys, path)
        )
    with pytest.raises(psycopg.Error) as caught:
        namespace.execute(statement, keys)
    assert caught.value.sqlstate == state


@pytest.mark.parametrize("column", ["kind = 'door'", "mode = 4096", "version = -1"])
def test_values_that_no_row_may_have(namespace: harness.Namespace, column: str) -> None:
    keys = (namespace.tenant_id, namespace.agent_id)
    namespace.execute("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/f', 'x')", keys)
    with pytest.raises(psycopg.errors.CheckViolation):
        namespace.execute(f"update agent_files set {column} where path = '/f'")


def test_the_parent_is_kept_by_trigger(namespace: harness.Namespace) -> None:
    keys = (namespace.tenant_id, namespace.agent_id)
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, parent, content) values"
        " (%s, %s, '/d/e/f', '/else', 'x'), (%s, %s, '/g', '/else', 'x'), (%s, %s, '/h', '/', 'x')",
        keys * 3,
    )
    namespace.execute("update agent_files set parent = '/else' where path = '/h'")
    namespace.execute("update agent_files set parent = null where path = '/h'")
    namespace.execute("update agent_files set path = '/d/g', parent = '/else' where path = '/g'")
    found = namespace.execute("select path, parent from agent_files where path ~ '^/[dh]' order by path")
    assert found == [("/d", "/"), ("/d/e", "/d"), ("/d/e/f", "/d/e"), ("/d/g", "/d"), ("/h", "/")]


def test_files_go_with_their_namespace_into_the_history(namespace: harness.Namespace) -> None:
    """An administrator's doing only; with an agent the history goes too."""
    keys = (namespace.tenant_id, namespace.agent_id)
    namespace.execute("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/d/f', 'x')", keys)
    namespace.execute("delete from agent_namespaces where tenant_id = %s and agent_id = %s", keys)
    assert namespace.execute("select path from agent_files") == []
    found = namespace.execute(
        "select op, path, old_content from agent_file_versions where op = 'delete' and path ~ '^/d' order by path"
    )
    assert found == [("delete", "/d", None), ("delete", "/d/f", "x")]
    namespace.execute("insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/d/f', 'y')", keys)
    namespace.execute("delete from agents where id = %s", keys[1:])
    for table in ("agent_files", "agent_file_versions", "agent_namespaces"):
        assert namespace.execute(f"select count(*) from {table}") == [(0,)]
