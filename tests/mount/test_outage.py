"""Postgres out of reach: what is told, what is kept, and that nothing happens twice."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.outage import LOGGED, TIMEOUT, kept, put_all, stored
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.relay import Line, Which


@pytest.mark.parametrize(
    ("reached", "more"), [(True, b""), (True, b"more\n"), (False, b"more\n")], ids=["applied", "more", "never-arrived"]
)
def test_append_that_nobody_could_settle(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, reached: bool, more: bytes
) -> None:
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"the-line\n")
    if reached:
        line.lose(answer=b"the-line")
    else:
        line.lose(request=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    if more:
        os.write(fd, more)
    os.close(fd)
    assert stored(namespace, "/log") == b"old\nthe-line\n" + more
    assert (mounted.path / "log").read_bytes() == b"old\nthe-line\n" + more


@pytest.mark.parametrize(
    ("reached", "name"), [(True, "new"), (True, "old"), (False, "new")], ids=["new", "rewritten", "never-arrived"]
)
def test_write_that_nobody_could_settle(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, reached: bool, name: str
) -> None:
    (mounted.path / "old").write_bytes(b"old\n")
    fd = os.open(mounted.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"the-line\n")
    if reached:
        line.lose(answer=b"the-line")
    else:
        line.lose(request=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    os.write(fd, b"more\n")
    os.close(fd)
    assert stored(namespace, f"/{name}") == b"the-line\nmore\n"
    assert (mounted.path / name).read_bytes() == b"the-line\nmore\n"


def test_truncation_after_a_commit_that_nobody_could_settle(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_RDWR | os.O_APPEND)
    os.write(fd, b"the-line\n")
    line.lose(answer=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    with open(mounted.path / "log", "w") as file:
        file.write("new\n")
    os.close(fd)
    assert stored(namespace, "/log") == b"new\n"


def test_removal_that_nobody_could_settle_is_seen(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    """It was applied, and its answer lost: the mount learns of it like of another's."""
    (mounted.path / "f").write_bytes(b"text")
    os.stat(mounted.path / "f")
    before = mounted.status()["listener_reconnects"]
    line.lose(answer=b"delete from agent_files")
    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        # Every statement's text travels once only; a new connection sends it again.
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where pid <> pg_backend_pid() and datname = current_database()"
        )
    # Live is also what it was before it noticed; what reconnects when the line is shut may get through.
    eventually(
        lambda: mounted.status()["live"] and mounted.status()["listener_reconnects"] > before, "announcements are back"
    )
    assert errno_of(lambda: os.unlink(mounted.path / "f")) == errno.EIO
    line.open()
    eventually(lambda: not os.path.exists(mounted.path / "f"), "the removal is seen")
    assert stored(namespace, "/f") is None


def test_a_file_being_written_has_attributes_while_postgres_is_away(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    """cp(1) asks for them between its open and its first write: an error there would leave nothing to rescue."""
    fd = os.open(mounted.path / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    line.shut()
    eventually(lambda: not mounted.status()["live"], "the mount knows that it follows nobody")
    os.write(fd, b"text")
    assert os.fstat(fd).st_size == 4
    line.open()
    os.close(fd)
    assert stored(namespace, "/f") == b"text"


@pytest.mark.parametrize("kind", ["new", "rewritten", "appended"])
def test_close_while_postgres_is_away(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path, kind: str
) -> None:
    path = mounted.path / "f"
    flags = os.O_WRONLY | os.O_CREAT
    if kind != "new":
        path.write_bytes(b"old\n")
        flags |= os.O_TRUNC if kind == "rewritten" else os.O_APPEND
    fd = os.open(path, flags)
    os.write(fd, b"precious\n")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    (one,) = kept(rescue_dir)
    assert (one["path"], one["size"], one["session"], one["principal"]) == ("/f", 9, "s1", "agent")
    line.open()
    eventually(lambda: mounted.status()["live"], "announcements are back")
    assert os.path.exists(path) == (kind != "new"), "the file is what Postgres has"
    if kind != "new":
        assert path.read_bytes() == b"old\n"
    assert f"fusefs rescue put {one['id']}" in (mounted.path / ".fusefs" / "errors").read_text()

    assert "written" in put_all(rescue_dir, namespace)
    expected = {"new": b"precious\n", "rewritten": b"precious\n", "appended": b"old\nprecious\n"}[kind]
    assert stored(namespace, "/f") == expected
    eventually(lambda: path.read_bytes() == expected, "the mount sees it")
    assert kept(rescue_dir) == []


def test_rescued_write_whose_file_moved_on(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    (mounted.path / "f").write_bytes(b"old\n")
    fd = os.open(mounted.path / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"precious\n")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    namespace.execute("update agent_files set content = 'theirs' where path = '/f'")
    line.open()
    assert "conflict" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/f") == b"theirs"
    assert namespace.execute("select convert_from(content, 'UTF8') from agent_file_conflicts") == [("precious\n",)]
    assert kept(rescue_dir) == []


def test_rescued_write_whose_claim_the_server_lost(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    """cp and others claim the name first, which commits asynchronously: a crash of the server may take that back."""
    fd = os.open(mounted.path / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"precious\n")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    namespace.execute("delete from agent_files where path = '/f'")
    line.open()
    assert "written" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/f") == b"precious\n"
    assert kept(rescue_dir) == []


def test_rescued_write_that_had_arrived(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"the-line\n")
    line.lose(answer=b"the-line")
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()
    assert "there already" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/log") == b"old\nthe-line\n"


def test_sigterm_while_postgres_is_away(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    held = [os.open(mounted.path / f"f{number}", os.O_WRONLY | os.O_CREAT) for number in range(3)]
    for fd in held:
        os.write(fd, b"precious\n")
    line.shut()
    mounted.process.terminate()
    mounted.expect_log("fusefs: |hint: ")
    mounted.wait(11)
    for fd in held:
        assert errno_of(lambda fd=fd: os.close(fd)) in (0, errno.ENOTCONN)  # type: ignore[misc]
    assert sorted(str(one["path"]) for one in kept(rescue_dir)) == ["/f0", "/f1", "/f2"]
    stopped = [event for event in mounted.log_events() if event["event"] == "daemon.stopped"]
    assert stopped[-1]["clean"] is False
    assert str(mounted.path) not in harness.mounts_under(mounted.path)
    put_all(rescue_dir, namespace)
    assert [stored(namespace, f"/f{number}") for number in range(3)] == [b"precious\n"] * 3


def test_nobody_waits_beyond_the_end_of_the_daemon(mount: harness.MountFactory, line: Line) -> None:
    """A thread that tells the kernel of a name that went waits for the directory, which a process holds whose request
    nobody reads any more. It keeps the device open, so that the end of the daemon alone would end neither."""
    held, other = mount("--write-timeout", "2", session="s1", dsn=line.dsn), mount(session="s2")
    held.expect_log(LOGGED)
    (held.path / "d").mkdir()
    (held.path / "d" / "known").touch()
    eventually((other.path / "d" / "known").exists, "the other session sees the file")
    line.freeze(Which.STATEMENTS)
    makers = [subprocess.Popen(["mkdir", held.path / "d" / "a"], stderr=subprocess.DEVNULL)]
    eventually(lambda: line.held == 1, "a request waits for Postgres")
    makers.append(subprocess.Popen(["mkdir", held.path / "d" / "b"], stderr=subprocess.DEVNULL))
    state = Path(f"/proc/{makers[1].pid}/stat")
    eventually(lambda: "(mkdir) D" in state.read_text(), "the other waits for the directory")
    (other.path / "d" / "known").unlink()
    time.sleep(0.3)  # until the thread waits, too
    held.process.terminate()
    assert [maker.wait(harness.EXIT_DEADLINE_S) for maker in makers] == [1, 1]
    held.wait()


def test_conflict_that_postgres_does_not_take(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    """The race is known to be lost when the bytes cannot be stored: they go the same way."""
    (mounted.path / "f").write_bytes(b"old\n")
    fd = os.open(mounted.path / "f", os.O_RDWR)
    namespace.execute("update agent_files set content = 'theirs' where path = '/f'")
    eventually(lambda: os.stat(mounted.path / "f").st_size == 6, "the change is seen")
    line.shut()
    assert errno_of(lambda: os.write(fd, b"mine")) == errno.ESTALE
    assert errno_of(lambda: os.close(fd)) == errno.ESTALE
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()
    assert "conflict" in put_all(rescue_dir, namespace)


def test_conflict_that_is_not_stored_when_the_mount_ends(
    mounted: harness.Mount, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    """The race is known to be lost, and the time is up while its bytes are on their way."""
    (mounted.path / "f").write_bytes(b"old\n")
    fd = os.open(mounted.path / "f", os.O_RDWR)
    os.write(fd, b"mine")
    namespace.execute("update agent_files set content = 'theirs' where path = '/f'")
    with psycopg.connect(namespace.dsn) as holder:
        holder.execute("lock table agent_file_conflicts in share mode")
        mounted.expect_log("fusefs: |hint: ")
        mounted.process.terminate()
        mounted.wait(11)
    assert errno_of(lambda: os.close(fd)) in (0, errno.ENOTCONN)
    assert [one["path"] for one in kept(rescue_dir)] == ["/f"]
    assert "conflict" in put_all(rescue_dir, namespace)
    assert ("mine",) in namespace.execute("select convert_from(content, 'UTF8') from agent_file_conflicts")


def test_rescue_directory_that_takes_nothing(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    mounted = mount(*TIMEOUT, "--rescue-dir", str(tmp_path / "file"), session="s1", dsn=line.dsn)
    mounted.expect_log(rf"fs\.write_lost|{LOGGED}")
    fd = os.open(mounted.path / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"precious\n")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(
        lambda: any(event["event"] == "fs.write_lost" for event in mounted.log_events()), "the log says what was lost"
    )
    (lost,) = [event for event in mounted.log_events() if event["event"] == "fs.write_lost"]
    assert (lost["path"], lost["bytes"]) == ("/f", 9)
    assert "precious" not in mounted.log_path.read_text()
    line.open()
    eventually(lambda: mounted.status()["live"], "announcements are back")
    assert "is lost" in (mounted.path / ".fusefs" / "errors").read_text()
