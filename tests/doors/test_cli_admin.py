"""Tenants, agents, migrations, checks, usage and retention, on a real database."""

from __future__ import annotations

import psycopg
import pytest

from tests import harness
from tests.doors.command import Fusefs


def put(agent: harness.Namespace, path: str, content: str, session: str = "s-1") -> None:
    """Write a file as another program would: the triggers keep the rest."""
    agent.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, updated_session) values (%s, %s, %s, %s, %s)"
        " on conflict (tenant_id, agent_id, path) do update set content = excluded.content",
        (agent.tenant_id, agent.agent_id, path, content, session),
    )


# Tenants and agents


def test_tenants(fusefs: Fusefs) -> None:
    made = fusefs("tenant", "add", "acme", "--json").json
    assert fusefs("tenant", "list", "--json").json == [
        {"id": made["id"], "slug": "acme", "agents": 0, "created_at": pytest.approx(1.8e9, rel=0.5)}
    ]
    assert "acme" in fusefs("tenant", "list").text
    assert "there is a tenant acme already" in fusefs.fails(4, "tenant", "add", "acme")
    fusefs("tenant", "remove", made["id"], "--yes")
    assert fusefs("tenant", "list", "--json").json == []
    assert "there is no tenant acme" in fusefs.fails(3, "tenant", "remove", "acme", "--yes")


@pytest.mark.parametrize("slug", ["", "a/b", "-x", "a" * 65, "x.md", "5f9b2f9e-0000-4000-8000-000000000000", "é"])
def test_a_bad_slug_is_refused(fusefs: Fusefs, slug: str) -> None:
    assert "not a valid slug" in fusefs.fails(2, "tenant", "add", "--", slug)


def test_agents(fusefs: Fusefs) -> None:
    tenant = fusefs("tenant", "add", "acme", "--json").json
    made = fusefs("agent", "add", "coder", "--tenant", tenant["id"], "--quota", "1000", "--json").json
    assert made["tenant_id"] == tenant["id"]
    listed = fusefs("agent", "list", "--json").json
    assert [(one["tenant"], one["slug"], one["id"]) for one in listed] == [("acme", "coder", made["id"])]
    assert "there is an agent coder already" in fusefs.fails(4, "agent", "add", "coder", "--tenant", "acme")
    assert "no tenant was named" in fusefs.fails(10, "agent", "add", "x")
    assert "there is no tenant nope" in fusefs.fails(3, "agent", "list", "--tenant", "nope")
    fusefs("agent", "remove", made["id"].upper(), "--tenant", "acme", "--yes")
    assert fusefs("agent", "list", "--json").json == []


def test_a_new_agent_has_its_reserved_directories(fusefs: Fusefs, pg: str) -> None:
    fusefs("tenant", "add", "acme")
    made = fusefs("agent", "add", "coder", "--tenant", "acme", "--json").json
    rows = harness.Namespace(pg, made["tenant_id"], made["id"], "acme", "coder").execute(
        "select path, kind, mode from agent_files order by path"
    )
    assert rows == [("/memories", "dir", 0o755), ("/skills", "dir", 0o755)]


def test_removing_asks_and_says_what_goes(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "12345")
    put(agent, "/a", "123")
    text = fusefs.fails(2, "agent", "remove", agent.agent)
    assert f"{agent.tenant}/{agent.agent} with 1 file (3 B) and 2 changes of history (5 B)" in text
    assert "--yes" in text
    assert fusefs("agent", "list", "--json").json
    assert "1 file (3 B)" in fusefs("agent", "remove", agent.agent, "--yes").text
    assert agent.execute("select count(*) from agent_files") == [(0,)]
    assert agent.execute("select count(*) from agent_file_versions") == [(0,)]


def test_removing_leaves_the_neighbours(fusefs: Fusefs, agent: harness.Namespace, pg: str) -> None:
    other = harness.make_namespace(pg, agent.tenant, "other")
    put(agent, "/a", "x")
    put(other, "/a", "y")
    fusefs("agent", "remove", agent.agent, "--yes")
    rows = other.execute("select agent_id::text from agent_files where path = '/a'")
    assert rows == [(other.agent_id,)]


# The schema


def test_init_and_migrations(bare_fusefs: Fusefs, pg_server: harness.PostgresServer) -> None:
    dsn = pg_server.create_database("test_cli_init")
    try:
        args = ("--dsn", dsn)
        assert [one["state"] for one in bare_fusefs("migrate", "status", "--json", *args).json["migrations"]] == [
            "pending"
        ]
        assert "applied 0001_agent_files" in bare_fusefs("init", *args).text
        assert "up to date" in bare_fusefs("init", *args).text
        assert bare_fusefs("migrate", "status", "--json", *args).json["current"] is True
        assert "--yes" in bare_fusefs.fails(2, "migrate", "down", "--to", "0", *args)
        assert "taken back 0001" in bare_fusefs("migrate", "down", "--to", "0", "--yes", *args).text
        assert "nothing to take back" in bare_fusefs("migrate", "down", "--to", "0", "--yes", *args).text
        assert "applied 0001" in bare_fusefs("migrate", "up", *args).text
    finally:
        pg_server.drop_database("test_cli_init")


@pytest.mark.parametrize(
    "words",
    [
        *("tenant add a", "tenant list", "tenant remove a --yes", "agent add a --tenant t", "agent list"),
        *("agent remove a --tenant t --yes", "agent quota a --tenant t --quota 1", "check", "df", "gc"),
        *("versions /a --agent a", "restore /a --agent a --version 1", "conflicts list --agent a"),
        *("conflicts show x --agent a", "conflicts accept x --agent a", "conflicts drop x --agent a --yes"),
        *("export a", "import a"),
    ],
)
def test_a_database_without_the_schema(bare_fusefs: Fusefs, pg_server: harness.PostgresServer, words: str) -> None:
    # The server's own database has none.
    error = bare_fusefs.fails(13, *words.split(), "--dsn", pg_server.dsn())
    assert error.splitlines()[-2:] == ["fusefs: the database holds no schema of fusefs", "hint: Run `fusefs init`."]


def test_a_step_changed_after_it_was_applied_is_no_matter_of_migrating_up(fusefs: Fusefs, pg: str) -> None:
    with psycopg.connect(pg, autocommit=True) as conn:
        conn.execute("update fusefs_migrations set checksum = 'other' where number = 1")
    text = fusefs.fails(13, "migrate", "status")
    assert "0001_agent_files was changed after it was applied" in text
    assert "`fusefs export`" in text
    assert "migrate up" not in text


def test_a_server_that_does_not_answer_is_one_sentence_without_the_password(bare_fusefs: Fusefs) -> None:
    text = bare_fusefs.fails(11, "df", "--dsn", "postgresql://u:secret@127.0.0.1:1/x")
    assert text.startswith("fusefs: Postgres does not answer at 127.0.0.1:1")
    assert "secret" not in text
    assert "secret" not in bare_fusefs.fails(2, "df", "--dsn", "not-a-dsn secret")


# Check


def test_check_finds_nothing_in_a_sound_namespace(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/d/e/f", "x")
    put(agent, "/d/e/f", "xy")
    agent.execute("delete from agent_files where path = '/d/e/f'")
    assert "1 agent checked, everything holds" in fusefs("check").text
    assert fusefs("check", "--json").json == []


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        ("delete from agent_files where path = '/d'", "parents"),
        ("update agent_files set kind = 'fifo' where path = '/d'", "parents"),
        ("update agent_files set size_bytes = 77 where path = '/d/a'", "sizes"),
        ("update agent_files set content_bytes = 'x' where path = '/d/a'", "sizes"),
        ("update agent_files set path = '/d/../b', kind = 'file' where path = '/d/a'", "paths"),
        ("update agent_files set path = '/.fusefs', kind = 'file' where path = '/b'", "paths"),
        ("update agent_files set kind = 'socket' where path = '/b'", "kinds"),
        ("update agent_files set ino = (select ino from agent_files where path = '/b')", "incarnations"),
        ("update agent_files set version = 9 where path = '/b'", "newest"),
        ("delete from agent_file_versions where path = '/d/a' and version = 1", "density"),
        ("update agent_file_versions set old_content = 'abcd' where version = 2", "history"),
        ("update agent_file_versions set old_content = null where version = 2", "history"),
        ("update agent_file_versions set old_size = 9, old_content = '123456789' where version = 2", "steps"),
    ],
)
def test_check_finds_each_kind_of_damage(bare_fusefs: Fusefs, module_pg: str, damage: str, rule: str) -> None:
    # The cases share a database, and each leaves it empty: cloning one for each would take most of the time.
    agent = harness.make_namespace(module_pg)
    put(agent, "/d/a", "one")
    put(agent, "/d/a", "three")
    put(agent, "/b", "b")
    with psycopg.connect(module_pg, autocommit=True) as conn:
        conn.execute("set session_replication_role = replica")  # past the triggers that prevent it
        conn.execute(damage)  # type: ignore[call-overload]
    result = bare_fusefs("check", "--json", "--dsn", module_pg, check=False)
    assert result.code == 12
    assert rule in {finding["rule"] for finding in result.json}
    assert "violated" in result.stderr
    # The audit after the tests must not find it again.
    agent.execute("delete from agents where id = %s", (agent.agent_id,))


# Usage and retention


def test_df(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "12345")
    put(agent, "/a", "1234567890")
    fusefs("agent", "quota", agent.agent, "--quota", "100")
    fusefs("agent", "quota", agent.agent, "--history-quota", "50")
    (line,) = fusefs("df", "--json").json
    assert line == {
        "tenant": agent.tenant,
        "agent": agent.agent,
        "agent_id": agent.agent_id,
        "files": 1,
        "bytes": 10,
        "history_bytes": 5,
        "changes": 2,
        "conflicts": 0,
        "quota_bytes": 100,
        "history_quota_bytes": 50,
    }
    assert "10%" in fusefs("df").text
    fusefs("agent", "quota", agent.agent, "--quota", "-1")
    (line,) = fusefs("df", "--json").json
    assert (line["quota_bytes"], line["history_quota_bytes"]) == (None, 50)


def age(agent: harness.Namespace, days: float, where: str) -> None:
    agent.execute(f"update agent_file_versions set at = at - interval '{days} days' where {where}")


def test_gc_drops_old_contents_only(fusefs: Fusefs, agent: harness.Namespace) -> None:
    for content in ("1", "22", "333"):
        put(agent, "/a", content)
    age(agent, 40, "version <= 2")
    planned = fusefs("gc", "--dry-run", "--json").json
    assert fusefs("gc", "--dry-run", "--json").json == planned
    done = fusefs("gc", "--json").json
    assert done == planned
    assert (done[0]["versions"], done[0]["version_bytes"]) == (1, 1)
    assert fusefs("versions", "/a", "--agent", agent.agent, "--version", "2").stdout == b"22"
    assert "was not kept" in fusefs.fails(3, "versions", "/a", "--agent", agent.agent, "--version", "1")
    assert fusefs("versions", "/a", "--agent", agent.agent, "--version", "3").stdout == b"333"
    assert "everything holds" in fusefs("check").text
    assert fusefs("gc", "--json").json[0]["versions"] == 0
    assert fusefs("gc", "--version-days", "0", "--json").json[0]["versions"] == 1


def test_gc_deletes_large_results_of_ended_sessions(fusefs: Fusefs, agent: harness.Namespace) -> None:
    for session, ended in (("s-old", "8 days"), ("s-new", "6 days"), ("s-open", None)):
        put(agent, f"/large_tool_results/{session}/deep/call", "result")
        agent.execute(
            "insert into agent_sessions (tenant_id, agent_id, session, principal, ended_at)"
            " values (%s, %s, %s, 'agent', now() - %s::interval)",
            (agent.tenant_id, agent.agent_id, session, ended),
        )
    assert "1 content (6 B) would be removed" in fusefs("gc", "--dry-run").text
    assert fusefs("gc", "--json").json[0]["results"] == 1
    left = agent.execute("select path from agent_files where path like '/large_tool_results/%%' order by path")
    assert [row[0] for row in left] == [
        "/large_tool_results/s-new",
        "/large_tool_results/s-new/deep",
        "/large_tool_results/s-new/deep/call",
        "/large_tool_results/s-open",
        "/large_tool_results/s-open/deep",
        "/large_tool_results/s-open/deep/call",
    ]


def test_gc_touches_only_the_agent_that_was_named(fusefs: Fusefs, agent: harness.Namespace, pg: str) -> None:
    other = harness.make_namespace(pg)
    for one in (agent, other):
        put(one, "/a", "1")
        put(one, "/a", "2")
    fusefs("gc", "--version-days", "0")
    rows = agent.execute("select agent_id::text, old_state from agent_file_versions where version = 2")
    assert dict(rows) == {agent.agent_id: "dropped", other.agent_id: "text"}
