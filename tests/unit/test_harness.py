"""The harness itself: a test that stands on it fails when it should, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

import psycopg
import pytest

from tests import harness

READY = """printf '{"event":"ready","session":"s1"}\\n'; """


def start(tmp_path: Path, script: str) -> harness.Mount:
    """A stand-in for the daemon: a shell script."""
    return harness.Mount(tmp_path / "mnt", ["sh", "-c", script], os.environ, tmp_path / "log")


def test_a_daemon_that_ends_before_it_is_ready_fails_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with 14 before it was ready\n.*no such tenant"):
        start(tmp_path, "echo no such tenant >&2; exit 14")


def test_a_first_line_that_is_not_the_ready_line_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not the ready line"):
        start(tmp_path, """echo '{"event":"other"}'; exec sleep 60""")


def test_a_daemon_that_ends_with_another_code_fails(tmp_path: Path) -> None:
    mount = start(tmp_path, READY + "exit 3")
    with pytest.raises(AssertionError, match="ended with 3, not 0"):
        mount.wait()


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"fs.cache","level":"warning"}',
        '{"event":"fs.cache","level":"error"}',
        '{"event":"fs.cache"}',
        "Traceback (most recent call last):",
        "x.py:1: ResourceWarning: unclosed file",
        '"text"',
    ],
)
def test_a_log_line_that_nobody_announced_fails(tmp_path: Path, line: str) -> None:
    mount = start(tmp_path, READY + f"""echo '{{"event":"fine","level":"info"}}' >&2; echo '{line}' >&2""")
    mount.wait()
    with pytest.raises(AssertionError, match="did not announce"):
        mount.finish()
    mount.expect_log("fs.cache|Traceback|Resource|text")
    mount.finish()
    assert [entry["event"] for entry in mount.log_events() if entry.get("level") == "info"] == ["fine"]


def test_a_mount_point_is_read_whatever_its_name() -> None:
    line = r"36 35 0:98 / /mnt/a\040b\134c\011d rw,nosuid - fuse.fusefs fusefs rw"
    assert list(harness.mount_table(line)) == [("0:98", "/mnt/a b\\c\td")]
    assert ("/", True) in [(point, ":" in device) for device, point in harness.mount_table()]


def test_the_sweep_removes_what_a_killed_run_left_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {"dead": f"{dead.pid} 1", "reused": f"{os.getpid()} 1", "alive": f"{os.getpid()} ", "other": None}
    for name, owner in names.items():
        folder = tmp_path / (harness.SUITE_PREFIX + name)
        folder.mkdir()
        if owner is not None:
            (folder / "owner").write_text(owner if name != "alive" else owner + str(harness.process_start(os.getpid())))
    harness.sweep_stale(tmp_path)
    left = {path.name.removeprefix(harness.SUITE_PREFIX) for path in tmp_path.iterdir()}
    assert left == {"alive", "other"}


@pytest.mark.parametrize("run", ["first", "second"])
def test_every_test_has_a_database_of_its_own(namespace: harness.Namespace, run: str) -> None:
    assert namespace.execute("SELECT count(*) FROM tenants") == [(1,)]
    assert namespace.execute("SELECT path FROM agent_files ORDER BY path") == [("/memories",), ("/skills",)]


@pytest.mark.parametrize("parent", ["/missing", "/"])
def test_the_audit_finds_a_broken_invariant(namespace: harness.Namespace, parent: str) -> None:
    harness.audit(namespace.dsn)
    namespace.execute("ALTER TABLE agent_files DISABLE TRIGGER ALL")
    namespace.execute(
        "INSERT INTO agent_files (tenant_id, agent_id, path, parent, content) VALUES (%s, %s, '/missing/x', %s, 'a')",
        (namespace.tenant_id, namespace.agent_id, parent),
    )
    with pytest.raises(AssertionError, match="/missing/x"):
        harness.audit(namespace.dsn)
    namespace.execute("DELETE FROM agent_files WHERE path = '/missing/x'")


def test_a_database_is_dropped_even_with_a_client_connected(pg_server: harness.PostgresServer) -> None:
    name = f"test_{uuid.uuid4().hex[:16]}"
    dsn = pg_server.create_database(name)
    with psycopg.connect(dsn) as conn:
        pg_server.drop_database(name)
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")


def test_commands_under_test_inherit_no_settings(suite_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGO_FS_TENANT", "someone")
    monkeypatch.setenv("PGHOST", "elsewhere")
    env = harness.command_environment(suite_dir, "host=x")
    assert {name for name in env if name.startswith(("HANGO_", "PG"))} == {
        "HANGO_FS_DATA_DIR",
        "HANGO_FS_DSN",
        "HANGO_FS_MAX_FILE_BYTES",
    }


def test_the_holders_of_a_mount_are_named(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with (tmp_path / "f").open():
        (found,) = harness.holders(tmp_path)
    assert found.startswith(f"/proc/{os.getpid()}/fd/")
    assert f"{tmp_path}/f" in found
    assert harness.holders(tmp_path) == []
