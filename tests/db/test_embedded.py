"""The embedded Postgres: made once, shared, private, stopped."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fusefs.cli import processes
from fusefs.db import embedded
from fusefs.rules.errors import BadConfig, Unavailable


@pytest.fixture
def data_dir(suite_dir: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="e-", dir=suite_dir))
    path.chmod(0o755)
    yield path
    for pidfile in path.rglob("postmaster.pid"):
        embedded.stop(pidfile.parent.parent)
    shutil.rmtree(path)


_ENSURE = (
    "import sys, pathlib; from fusefs.db import embedded; print(embedded.ensure_running(pathlib.Path(sys.argv[1])))"
)


def ensure_elsewhere(data_dir: Path, **options: object) -> subprocess.Popen[str]:
    """In a process of its own."""
    root = Path(embedded.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", _ENSURE, str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root)},
        **options,  # type: ignore[call-overload]
    )


def test_first_use_by_two_processes_makes_one_server_that_outlives_them(data_dir: Path) -> None:
    """Also where a process that was killed left half of a cluster behind."""
    (data_dir / "pg.new").mkdir()
    (data_dir / "pg.new" / "PG_VERSION").write_text("18\n")
    started = [ensure_elsewhere(data_dir) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert {error for _, error in results} == {""}
    (dsn,) = {out.strip() for out, _ in results}
    assert embedded.ensure_running(data_dir) == embedded.running_dsn(data_dir) == dsn
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(
            "select current_database(), current_setting('shared_buffers'), current_setting('listen_addresses'),"
            " pg_encoding_to_char(encoding), current_setting('max_connections'), upper('é')"
            " from pg_database where datname = current_database()"
        ).fetchone()
    assert row == ("fusefs", "256MB", "", "UTF8", "200", "É")
    folder = (data_dir / "pg").stat()
    assert stat.S_IMODE(folder.st_mode) == 0o700, "whoever reaches the socket is superuser"

    pidfile = data_dir / "pg" / "postmaster.pid"
    lines = pidfile.read_text().splitlines()
    pid = int(lines[0])
    assert embedded.stop(data_dir)
    gone = (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )
    assert gone, "it ended, though perhaps nobody has collected it yet"
    assert not embedded.stop(data_dir)
    assert embedded.running_dsn(data_dir) is None

    # After a power failure the file is there, and its pid may be anybody's by now.
    lines[0] = str(os.getpid())
    pidfile.write_text("\n".join(lines))
    assert embedded.running_dsn(data_dir) is None
    assert not embedded.stop(data_dir)
    pidfile.unlink()


def test_files_of_another_version_are_refused(data_dir: Path) -> None:
    (data_dir / "pg").mkdir()
    (data_dir / "pg" / "PG_VERSION").write_text("12\n")
    with pytest.raises(Unavailable, match="made by version 12"):
        embedded.ensure_running(data_dir)


def test_a_path_too_long_for_a_socket(data_dir: Path) -> None:
    deep = data_dir / ("d" * 90) / "with blank"
    dsn = embedded.ensure_running(deep)
    try:
        socket_dir = Path(psycopg.conninfo.conninfo_to_dict(dsn)["host"])
        assert socket_dir.parent == Path("/tmp")
        assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
        with psycopg.connect(dsn) as conn:
            assert conn.execute("select 1").fetchone() == (1,)
    finally:
        embedded.stop(deep)
    socket_dir.rmdir()


def test_a_directory_that_cannot_be_made(data_dir: Path) -> None:
    (data_dir / "file").write_text("")
    with pytest.raises(BadConfig, match="cannot make the data directory"):
        embedded.ensure_running(data_dir / "file" / "x")


def test_default_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGO_FS_DATA_DIR", "/a/b")
    assert embedded.default_data_dir() == Path("/a/b")
    monkeypatch.delenv("HANGO_FS_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    assert embedded.default_data_dir() == Path("/x/fusefs")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert embedded.default_data_dir() == Path("/h/.local/share/fusefs")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert embedded.default_data_dir() == Path("/var/lib/fusefs")


def test_an_interrupt_stops_it(data_dir: Path) -> None:
    """As `fusefs status` says."""
    assert embedded.running_pid(data_dir) is None
    embedded.ensure_running(data_dir)
    found = embedded.running_pid(data_dir)
    assert found is not None
    pid, where = found
    assert where == data_dir
    started = processes.start_time(pid)
    assert started is not None
    os.kill(pid, signal.SIGINT)
    assert processes.wait_gone(pid, started, 60)
    assert embedded.running_pid(data_dir) is None
    assert not (data_dir / "pg" / "postmaster.pid").exists(), "it ended in good order"


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another account")


@as_root
def test_root_and_an_ordinary_user_each_have_one(data_dir: Path) -> None:
    """At the same time, without a lock in common; root's directories above the data keep their modes."""
    closed = data_dir / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(BadConfig, match="cannot enter"):
        embedded.ensure_running(closed / "data")
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert embedded.ensure_running(data_dir / "root")
    owner = (data_dir / "root" / "pg").stat().st_uid
    assert pwd.getpwuid(owner).pw_name == "pgserver"

    nobody = pwd.getpwnam("nobody")
    theirs = data_dir / "nobody"
    theirs.mkdir()
    os.chown(theirs, nobody.pw_uid, nobody.pw_gid)
    binaries = embedded._binaries(data_dir, embedded._Account(nobody.pw_uid, nobody.pw_gid))
    process = subprocess.run(
        [sys.executable, "-c", _ENSURE_AS, str(theirs), str(nobody.pw_uid), str(binaries)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(embedded.__file__).parents[2])},
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert (theirs / "pg").stat().st_uid == nobody.pw_uid
    with psycopg.connect(process.stdout.strip()) as conn:
        assert conn.execute("select 1").fetchone() == (1,)
    embedded._run(
        [binaries / "pg_ctl", "stop", "-w", "-s", "-m", "fast", "-D", theirs / "pg"],
        embedded._Account(nobody.pw_uid, nobody.pw_gid),
        "it does not stop",
    )


# Imports first and becomes the user then: the checkout may lie where that user cannot read.
_ENSURE_AS = """
import os, pathlib, sys
import psycopg.conninfo
from fusefs.db import embedded
embedded._binaries = lambda data_dir, account: pathlib.Path(sys.argv[3])
os.chdir("/")
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
print(embedded.ensure_running(pathlib.Path(sys.argv[1])))
"""


@as_root
def test_binaries_that_the_account_cannot_reach_are_copied(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment below /root (0700) stays closed."""
    account = embedded._account()
    real = embedded._can
    monkeypatch.setattr(embedded, "_can", lambda command, who: "site-packages" not in command[0] and real(command, who))
    found = embedded._binaries(data_dir, account)
    assert found.is_relative_to(data_dir)
    assert real([str(found / "initdb"), "--version"], account)
    assert embedded._binaries(data_dir, account) == found
    assert embedded.ensure_running(data_dir)
