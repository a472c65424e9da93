"""Tenants, agents, migrations, checks, usage and retention, on a real database."""

from __future__ import annotations

import psycopg
import pytest

from fusefs.store import versions
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


def readable(fusefs: Fusefs, agent: harness.Namespace, path: str) -> set[int]:
    """The versions of a path whose contents are kept; each is read."""
    found = fusefs("versions", path, "--agent", agent.agent, "--json").json
    kept = {one["version"] for one in found if one["readable"]}
    for version in kept:
        fusefs("versions", path, "--agent", agent.agent, "--version", str(version))
    return kept


def test_gc_keeps_a_history_within_its_quota(fusefs: Fusefs, agent: harness.Namespace) -> None:
    for content in ("1" * 10, "2" * 20, "3" * 30, "4" * 40):
        put(agent, "/a", content)
        put(agent, "/b", content)
    # Superseded, the oldest first: a1 b1 (10 each), a2 b2 (20 each), a3 b3 (30 each): 120 bytes.
    assert fusefs("gc", "--json").json[0]["over_quota"] == 0, "without a quota"
    fusefs("agent", "quota", agent.agent, "--history-quota", "120")
    assert fusefs("gc", "--json").json[0]["over_quota"] == 0, "just within it"
    fusefs("agent", "quota", agent.agent, "--history-quota", "99")
    assert "3 contents (40 B) would be removed" in fusefs("gc", "--dry-run").text
    planned = fusefs("gc", "--dry-run", "--json").json
    assert (planned[0]["over_quota"], planned[0]["over_quota_bytes"], planned[0]["versions"]) == (3, 40, 0)
    assert "121%" in fusefs("df").text
    assert fusefs("gc", "--json").json == planned
    assert readable(fusefs, agent, "/a") == {3, 4}
    assert readable(fusefs, agent, "/b") == {2, 3, 4}
    (usage,) = fusefs("df", "--json").json
    assert (usage["history_bytes"], usage["history_quota_bytes"], usage["bytes"]) == (80, 99, 80)
    assert fusefs("gc", "--json").json[0]["over_quota"] == 0
    assert "everything holds" in fusefs("check").text
    fusefs("agent", "quota", agent.agent, "--history-quota", "0")
    assert fusefs("gc", "--json").json[0]["over_quota"] == 3
    assert readable(fusefs, agent, "/a") == readable(fusefs, agent, "/b") == {4}


def test_the_history_quota_never_takes_what_a_kept_append_needs(fusefs: Fusefs, agent: harness.Namespace) -> None:
    def append(path: str, text: str) -> None:
        agent.execute(
            "update agent_files set content = content || %s, write_op = 'append', write_id = gen_random_uuid()"
            " where path = %s",
            (text, path),
        )

    put(agent, "/old", "x" * 50)
    put(agent, "/log", "1")
    put(agent, "/old", "y")
    append("/log", "2")
    append("/log", "3")
    put(agent, "/log", "new")
    append("/log", "er")
    # 50 bytes of /old, 3 of /log's version 3, of which versions 1 and 2 are the beginning.
    fusefs("agent", "quota", agent.agent, "--history-quota", "3")
    assert fusefs("gc", "--json").json[0]["over_quota_bytes"] == 50
    assert readable(fusefs, agent, "/old") == {2}
    assert readable(fusefs, agent, "/log") == {1, 2, 3, 4, 5}
    fusefs("agent", "quota", agent.agent, "--history-quota", "2")
    done = fusefs("gc", "--json").json[0]
    assert (done["over_quota"], done["over_quota_bytes"]) == (3, 3), "version 3 with the two that begin it"
    assert readable(fusefs, agent, "/log") == {4, 5}
    assert "everything holds" in fusefs("check").text


def test_a_dry_run_counts_what_expires_and_what_comes_into_the_history(
    fusefs: Fusefs, agent: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in ("1" * 100, "2" * 20, "3" * 30, "4"):
        put(agent, "/a", content)
    age(agent, 40, "old_size = 100")
    for name in ("a", "b"):
        put(agent, f"/large_tool_results/s-old/{name}", "r" * 15)
    agent.execute(
        "insert into agent_sessions (tenant_id, agent_id, session, principal, ended_at)"
        " values (%s, %s, 's-old', 'agent', now() - interval '8 days')",
        (agent.tenant_id, agent.agent_id),
    )
    # 100 expire, 20 and 30 are there, 15 and 15 come.
    monkeypatch.setattr(versions, "_DROP_BATCH", 1)
    for quota, expected in ((70, (1, 20)), (59, (2, 50)), (20, (3, 65)), (10, (4, 80))):
        fusefs("agent", "quota", agent.agent, "--history-quota", str(quota))
        (planned,) = fusefs("gc", "--dry-run", "--json").json
        assert (planned["over_quota"], planned["over_quota_bytes"]) == expected, quota
        assert (planned["versions"], planned["results"]) == (1, 2)
    assert fusefs("gc", "--json").json == [planned]
    assert fusefs("df", "--json").json[0]["history_bytes"] == 0


def test_the_history_quota_is_each_agents_own(fusefs: Fusefs, agent: harness.Namespace, pg: str) -> None:
    other = harness.make_namespace(pg)
    for one in (agent, other):
        put(one, "/a", "11")
        put(one, "/a", "2")
    fusefs("agent", "quota", agent.agent, "--history-quota", "1")
    for one in (other, agent):
        fusefs("gc", "--tenant", one.tenant, "--agent", one.agent)
    rows = agent.execute("select agent_id::text, old_state from agent_file_versions where version = 2")
    assert dict(rows) == {agent.agent_id: "dropped", other.agent_id: "text"}


def test_gc_touches_only_the_agent_that_was_named(fusefs: Fusefs, agent: harness.Namespace, pg: str) -> None:
    other = harness.make_namespace(pg)
    for one in (agent, other):
        put(one, "/a", "1")
        put(one, "/a", "2")
    fusefs("gc", "--version-days", "0")
    rows = agent.execute("select agent_id::text, old_state from agent_file_versions where version = 2")
    assert dict(rows) == {agent.agent_id: "dropped", other.agent_id: "text"}
