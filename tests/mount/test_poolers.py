"""Poolers between the daemon and Postgres: PgBouncer in session mode works, in the other modes it is refused.

Needs the program `pgbouncer`; the refusal itself is also tested without it, in `tests/db/test_connection.py`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests import harness
from tests.mount.sides import eventually

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed (Debian package pgbouncer)")
REFUSED = "is a pooler in transaction mode, which cannot be used"

Pooled = Callable[[str], str]
"""From a pool mode to the DSN of a PgBouncer in it."""


@pytest.fixture
def pooled(namespace: harness.Namespace, suite_dir: Path) -> Iterator[Pooled]:
    given = conninfo_to_dict(namespace.dsn)
    owner = Path(str(given["host"])).stat()  # PgBouncer does not run as root, and only the server's user may connect
    started: list[subprocess.Popen[bytes]] = []

    def start(mode: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = suite_dir / f"pgbouncer-{port}.ini"
        config.write_text(
            f"[databases]\n* = host={given['host']} user={given['user']}\n"
            f"[pgbouncer]\npool_mode = {mode}\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
            "unix_socket_dir =\nauth_type = any\ndefault_pool_size = 40\n"
        )
        log = (suite_dir / f"pgbouncer-{port}.log").open("wb")
        assert PGBOUNCER is not None
        as_root = os.geteuid() == 0
        with log:
            process = subprocess.Popen(
                [PGBOUNCER, config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=owner.st_uid if as_root else None,
                group=owner.st_gid if as_root else None,
                extra_groups=[] if as_root else None,
            )
        started.append(process)
        dsn = make_conninfo("", host="127.0.0.1", port=port, user=given["user"], dbname=given["dbname"])

        def answers() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            try:
                psycopg.connect(dsn).close()
            except psycopg.OperationalError:
                return False
            return True

        eventually(answers, "PgBouncer answers")
        return dsn

    yield start
    for process in started:
        process.terminate()
        process.wait(10)


def listeners(namespace: harness.Namespace, name: str) -> int:
    """How many connections of a name listen."""
    ((found,),) = namespace.execute(
        "select count(*) from pg_stat_activity where application_name = %s and query ilike 'listen%%'", (name,)
    )
    return int(found)


def test_session_mode(namespace: harness.Namespace, pooled: Pooled, mount: harness.MountFactory) -> None:
    mounted = mount(session="s1", dsn=pooled("session"))
    path = mounted.path / "f"
    path.write_text("mine\n")
    namespace.execute("update agent_files set content = 'theirs' where path = '/f'")
    eventually(lambda: path.read_text() == "theirs", "the change is announced")
    namespace.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where pid <> pg_backend_pid() and datname = current_database()"
    )
    assert path.read_text() == "theirs"  # a read that meets the change itself may not count as seen
    path.write_text("mine again\n")
    assert namespace.execute("select content, updated_by from agent_files where path = '/f'") == [
        ("mine again\n", "agent")
    ]


def test_announcements_by_another_way(
    namespace: harness.Namespace, pooled: Pooled, mount: harness.MountFactory
) -> None:
    direct = make_conninfo(namespace.dsn, application_name="direct")
    mounted = mount("--listen-dsn", direct, session="s1", dsn=pooled("session"))
    path = mounted.path / "f"
    path.write_text("mine\n")
    namespace.execute("update agent_files set content = 'theirs' where path = '/f'")
    eventually(lambda: path.read_text() == "theirs", "the change is announced")
    assert (listeners(namespace, "direct"), listeners(namespace, "fusefs")) == (1, 0)


@pytest.fixture
def mount_command(namespace: harness.Namespace, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "m").mkdir()
    return ("mount", str(tmp_path / "m"), "--tenant", namespace.tenant, "--agent", namespace.agent, "--foreground")


def fusefs(dsn: str, *args: str, suite_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [harness.FUSEFS, *args],
        env=harness.command_environment(suite_dir, dsn),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_other_modes_are_refused(
    namespace: harness.Namespace, pooled: Pooled, suite_dir: Path, mount_command: tuple[str, ...], mode: str
) -> None:
    """By every command, also where announcements have a way of their own: otherwise statements would run under the
    tenant and role that another client of the pooler has set."""
    dsn = pooled(mode)
    for args in (mount_command, (*mount_command, "--listen-dsn", namespace.dsn), ("check",), ("tenant", "list")):
        done = fusefs(dsn, *args, suite_dir=suite_dir)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert REFUSED in done.stderr and "session mode" in done.stderr
    done = fusefs(namespace.dsn, *mount_command, "--listen-dsn", dsn, suite_dir=suite_dir)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert REFUSED in done.stderr


def test_announcements_of_another_database_are_refused(
    namespace: harness.Namespace, suite_dir: Path, mount_command: tuple[str, ...]
) -> None:
    other = make_conninfo(namespace.dsn, dbname="postgres")
    done = fusefs(namespace.dsn, *mount_command, "--listen-dsn", other, suite_dir=suite_dir)
    assert (done.returncode, done.stdout) == (11, ""), done.stderr
    assert "announcements from Postgres do not arrive" in done.stderr
    assert "--listen-dsn must lead to the server of --dsn" in done.stderr
