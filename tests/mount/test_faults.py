"""Faults of Postgres and of the daemon under real tools: nothing that was acknowledged is lost, nothing is there twice.

What a lost connection does to one write, and what the rescue directory keeps, is in `test_outage.py`. Here a server
of this module's own is stopped, killed and filled. A duration that a test waits for is the length of a fault, never a
guess of when something will be done.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from fusefs.db import embedded, migrate
from tests import harness
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.mount.test_outage import LOGGED, kept, put_all, stored
from tests.relay import Line

TOOL_TIMEOUT_S = 60
BACKENDS = "datname = current_database() and application_name = 'fusefs'"


class Server(harness.PostgresServer):
    """A Postgres that may be stopped under its daemons."""

    def __init__(self, suite_dir: Path) -> None:
        self.data_dir = suite_dir / "faults"
        super().__init__(self.data_dir)
        self.data_dir /= harness.DATA
        self._log_writer: int | None = None

    def stop_writing_the_log(self) -> None:
        """Until the next crash only a commit that waits for the disk brings the log there."""
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            row = conn.execute("select pid from pg_stat_activity where backend_type = 'walwriter'").fetchone()
        assert row is not None
        self._log_writer = int(row[0])
        os.kill(self._log_writer, signal.SIGSTOP)

    def crash(self) -> None:
        """End it as a crash does: no farewell to anybody, recovery at the next start."""
        found = embedded.running_pid(self.data_dir)
        assert found is not None
        os.kill(found[0], signal.SIGQUIT)
        if self._log_writer is not None:
            os.kill(self._log_writer, signal.SIGKILL)  # it would never hear the postmaster
            self._log_writer = None
        eventually(lambda: not (self.data_dir / "pg" / "postmaster.pid").exists(), "the server has ended")

    def again(self) -> None:
        embedded.ensure_running(self.data_dir)

    def remember(self) -> None:
        """Keep what it has now, for `go_back`."""
        self.stop()
        shutil.rmtree(self._kept, ignore_errors=True)
        subprocess.run(["cp", "-a", self.data_dir / "pg", self._kept], check=True)
        self.again()

    def go_back(self) -> None:
        """Have what it had then, on a timeline of its own: a standby that had got no further is the primary now."""
        self.crash()
        shutil.rmtree(self.data_dir / "pg")
        self._kept.rename(self.data_dir / "pg")
        (self.data_dir / "pg" / "recovery.signal").touch()
        with open(self.data_dir / "pg" / "postgresql.auto.conf", "a") as conf:
            conf.write("restore_command = 'false'\n")
        self.again()

    @property
    def _kept(self) -> Path:
        return self.data_dir / "pg.kept"

    def set(self, name: str, value: str) -> None:
        self.execute(sql.SQL("alter system set {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        self.execute(sql.SQL("select pg_reload_conf()"))


@pytest.fixture(scope="module")
def server(suite_dir: Path) -> Iterator[Server]:
    server = Server(suite_dir)
    server.start()
    migrate.up(server.create_database("fusefs_template"))
    yield server
    server.stop()


@pytest.fixture
def own(server: Server) -> Iterator[harness.Namespace]:
    """An agent in a database of the server that may be stopped."""
    name = f"test_{os.urandom(8).hex()}"
    dsn = server.create_database(name, "fusefs_template")
    yield harness.make_namespace(dsn)
    harness.audit(dsn)
    server.drop_database(name)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory of 150 files, and beside it the same as `corpus.tar`."""
    made = tmp_path / "corpus"
    for number in range(150):
        path = made / f"d{number % 10}" / f"f{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n" * (1 + number * 7 % 400))
    with tarfile.open(tmp_path / "corpus.tar", "w") as tar:
        tar.add(made, "corpus")
    return made


@contextmanager
def tools(scripts: list[str], cwd: Path, **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Shell scripts beside each other; ended at the end of the block where they have not ended by themselves."""
    started = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **env},
        )
        for script in scripts
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def same(one: Path, other: Path) -> None:
    done = subprocess.run(["diff", "-r", one, other], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:2000]


def wait_for_backend(ns: harness.Namespace, condition: str) -> int:
    """The pid of the daemon's backend that a condition on pg_stat_activity holds for."""
    found: list[tuple[int]] = []

    def look() -> bool:
        found[:] = ns.execute(f"select pid from pg_stat_activity where {BACKENDS} and {condition}")
        return bool(found)

    eventually(look, f"a backend of the daemon with {condition}")
    return found[0][0]


def terminate(ns: harness.Namespace, condition: str) -> None:
    ns.execute(f"select pg_terminate_backend(pid, 5000) from pg_stat_activity where {BACKENDS} and {condition}")


class Call(threading.Thread):
    """A call that waits for Postgres, beside the test."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as exc:  # noqa: BLE001  (handed to the test)
            self._error = exc

    def result(self) -> int:
        """0, or the errno; what is no OSError is raised."""
        self.join(TOOL_TIMEOUT_S)
        assert not self.is_alive(), "the call does not return"
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        return 0 if self._error is None else self._error.errno or -1


# -- The server goes away --------------------------------------------------------------------------------


def test_server_away_for_less_than_the_write_timeout(
    server: Server, own: harness.Namespace, mount: harness.MountFactory, corpus: Path
) -> None:
    """Tools that are at work when the server is stopped notice nothing but the time. (A server that crashes may
    forget an O_EXCL create or a mkdir of the last moment: see docs/internals/schema.md#claims.)"""
    mounted = mount("--write-timeout", "30", namespace=own, session="s1")
    scripts = [
        f"tar xf {corpus}.tar",
        f"cp -r {corpus} copied",
        "for i in $(seq 600); do echo $i >> log || exit; done",
        "for i in $(seq 300); do echo $i > new && mv new counter || exit; done",
    ]
    with tools(scripts, mounted.path) as started:
        eventually(lambda: len((mounted.path / "log").read_text().splitlines()) > 50, "the tools are at work")
        assert [process.poll() for process in started] == [None] * 4
        server.stop()
        try:
            time.sleep(5)  # the fault
            assert [process.poll() for process in started] == [None] * 4, "they wait"
        finally:
            server.again()
        for process in started:
            out, _ = process.communicate(timeout=TOOL_TIMEOUT_S)
            assert (process.returncode, out) == (0, "")
    same(corpus, mounted.path / "corpus")
    same(corpus, mounted.path / "copied")
    assert stored(own, "/log") == "".join(f"{number}\n" for number in range(1, 601)).encode()
    assert stored(own, "/counter") == b"300\n"
    assert stored(own, "/new") is None


def test_server_away_for_more_than_the_write_timeout(
    server: Server, own: harness.Namespace, mount: harness.MountFactory, corpus: Path, tmp_path: Path
) -> None:
    """cp says which copies failed. The others are in Postgres, whole; those of the failed whose bytes the daemon had
    are in the rescue directory, and in Postgres after `fusefs rescue put`."""
    rescue_dir = tmp_path / "rescue"
    mounted = mount("--write-timeout", "0.5", "--rescue-dir", str(rescue_dir), namespace=own, session="s1")
    mounted.expect_log(LOGGED)
    names = sorted(str(path) for path in corpus.rglob("f*.txt"))
    copy = 'for f in "$@"; do n=${f##*/}; cp "$f" $n 2> /dev/null && echo $n || echo "! $n"; done'
    script = f"set -- {' '.join(names)}; {{ {copy}; }} > {tmp_path}/said"
    with tools([script], mounted.path) as (started,):
        eventually(lambda: (tmp_path / "said").read_text().count("\n") > 30, "cp is at work")
        server.crash()
        try:
            eventually(lambda: (tmp_path / "said").read_text().count("!") >= 2, "cp is told")
        finally:
            server.again()
        eventually(lambda: started.poll() is not None, "cp has ended")
        assert started.returncode == 0
    eventually(lambda: mounted.status()["live"], "announcements are back")
    said = (tmp_path / "said").read_text().split("\n")[:-1]
    failed = {name[2:] for name in said if name[0] == "!"}
    assert len(said) == 150 and 2 <= len(failed) < 120
    content = {Path(name).name: Path(name).read_bytes() for name in names}
    for name in content.keys() - failed:
        assert stored(own, f"/{name}") == content[name], "acknowledged, and not in Postgres"
    for name in failed:
        assert stored(own, f"/{name}") in (None, content[name])
    # A cp that is told of the outage between its open and its first write has left an empty file.
    rescued = {str(one["path"]).removeprefix("/") for one in kept(rescue_dir) if one["size"]}
    assert rescued <= failed
    put_all(rescue_dir, own)
    for name in rescued:
        assert stored(own, f"/{name}") == content[name]


def test_failover_that_lost_commits(server: Server, own: harness.Namespace, mount: harness.MountFactory) -> None:
    """What an asynchronous standby had not got is gone. A daemon that lived through it shows what there is, and goes
    on from there."""
    mounted = mount(namespace=own, session="s1")
    mounted.expect_log("went_back")
    path = mounted.path / "f"
    path.write_text("one\n")
    server.remember()
    path.write_text("two\n")
    path.write_text("three\n")
    (mounted.path / "new").write_text("new\n")
    eventually(lambda: mounted.status()["live"], "announcements are back")
    server.go_back()
    eventually(lambda: mounted.status()["live"], "announcements are back")
    assert stored(own, "/f") == b"one\n"
    assert path.read_text() == "one\n"
    assert not (mounted.path / "new").exists()
    path.write_text("four\n")
    assert stored(own, "/f") == b"four\n"


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_what_a_crash_of_the_server_takes_back(
    server: Server, own: harness.Namespace, mount: harness.MountFactory, durability: str
) -> None:
    """Relaxed: what was not synced, and that only. The daemon forgets it too, and goes on from what is there."""
    mounted = mount("--durability", durability, namespace=own, session="s1")
    mounted.expect_log("went_back")
    server.stop_writing_the_log()
    for name, sync in [("synced", True), ("closed", False)]:
        with open(mounted.path / name, "w") as file:
            file.write(f"{name}\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
    (mounted.path / "synced").write_text("later\n")
    (mounted.path / "made").mkdir()
    assert (mounted.path / "synced").read_text() == "later\n"
    server.crash()
    server.again()
    eventually(lambda: mounted.status()["live"], "announcements are back")
    full = durability == "full"
    assert stored(own, "/synced") == (b"later\n" if full else b"synced\n")
    assert stored(own, "/closed") == (b"closed\n" if full else None)
    assert (mounted.path / "synced").read_text() == ("later\n" if full else "synced\n")
    assert (mounted.path / "closed").exists() == full
    # Relaxed: this is made under the number of the version that was taken back.
    own.execute("update agent_files set content = 'theirs' where path = '/synced'")
    assert errno_of(lambda: (mounted.path / "synced").write_text("new\n")) == errno.ESTALE
    assert (mounted.path / "synced").read_text() == "theirs"
    (mounted.path / "synced").write_text("new\n")
    assert stored(own, "/synced") == b"new\n"


def test_a_synced_directory_outlives_a_crash_of_the_server(
    server: Server, own: harness.Namespace, mount: harness.MountFactory
) -> None:
    mounted = mount(namespace=own, session="s1")
    server.stop_writing_the_log()
    (mounted.path / "made").mkdir()
    fd = os.open(mounted.path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    server.crash()
    server.again()
    eventually(lambda: mounted.status()["live"], "announcements are back")
    assert (mounted.path / "made").is_dir()


def test_the_end_while_postgres_is_away_takes_less_than_ten_seconds(
    mount: harness.MountFactory, namespace: harness.Namespace, tmp_path: Path
) -> None:
    """With the default write timeout, and at its worst: a server that is there and says nothing (L09)."""
    with Line(namespace.dsn) as line:
        mounted = mount("--rescue-dir", str(tmp_path / "rescue"), session="s1", dsn=line.dsn)
        mounted.expect_log(rf"{LOGGED}|fusefs: |hint: ")
        (mounted.path / "d").mkdir()
        fd = os.open(mounted.path / "d" / "f", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"precious\n")
        line.freeze()
        began = time.monotonic()
        mounted.process.terminate()
        mounted.wait(11)
        took = time.monotonic() - began
        line.thaw()
        assert errno_of(lambda: os.close(fd)) in (0, errno.ENOTCONN)
    assert [one["path"] for one in kept(tmp_path / "rescue")] == ["/d/f"]
    assert took < 10


# -- Connections are killed ------------------------------------------------------------------------------


def test_connection_killed_before_a_commit(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    mounted = mount(session="s1")
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    terminate(namespace, "true")
    os.close(fd)
    assert stored(namespace, "/log") == b"old\nline\n"


def test_connection_killed_inside_a_commit(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    mounted = mount(session="s1")
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with psycopg.connect(namespace.dsn) as holder:
        holder.execute("select from agent_files where path = '/log' for update")
        closing = Call(lambda: os.close(fd))
        pid = wait_for_backend(namespace, "wait_event_type = 'Lock'")
        terminate(namespace, f"pid = {pid}")
        wait_for_backend(namespace, f"wait_event_type = 'Lock' and pid <> {pid}")
    assert closing.result() == 0
    assert stored(namespace, "/log") == b"old\nline\n"


@contextmanager
def standby_missing(server: Server, ns: harness.Namespace) -> Iterator[None]:
    """Each commit waits for a standby that is not there: the moment after it was made, and before its answer."""
    asking: list[Call] = []

    def waits() -> bool:
        if not asking or not asking[-1].is_alive():
            asking.append(Call(lambda: ns.execute("select pg_logical_emit_message(true, 'test', '')")))
        return bool(ns.execute("select 1 from pg_stat_activity where wait_event = 'SyncRep'"))

    server.set("synchronous_standby_names", "nobody")
    try:
        eventually(waits, "the setting is in force")
        yield
    finally:
        server.set("synchronous_standby_names", "")
        for one in asking:
            one.result()


def test_connection_killed_after_a_commit(server: Server, own: harness.Namespace, mount: harness.MountFactory) -> None:
    mounted = mount("--write-timeout", "20", namespace=own, session="s1")
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with standby_missing(server, own):
        closing = Call(lambda: os.close(fd))
        pid = wait_for_backend(own, "wait_event = 'SyncRep' and query ~ '^update agent_files'")
        assert stored(own, "/log") == b"old\n", "nobody sees it yet"
        terminate(own, f"pid = {pid}")
        assert stored(own, "/log") == b"old\nline\n", "it was made"
    assert closing.result() == 0
    assert stored(own, "/log") == b"old\nline\n"


def test_what_no_standby_has_is_not_acknowledged(
    server: Server, own: harness.Namespace, mount: harness.MountFactory, tmp_path: Path
) -> None:
    """To end a backend that waits for its synchronous standby makes its commit visible, and only here: the next
    failover would lose it. So the answer is an error while no standby has it."""
    rescue_dir = tmp_path / "rescue"
    mounted = mount("--write-timeout", "0.5", "--rescue-dir", str(rescue_dir), namespace=own, session="s1")
    mounted.expect_log(LOGGED)
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with standby_missing(server, own):
        assert errno_of(lambda: os.close(fd)) == errno.EIO
        eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
        eventually(
            lambda: own.execute(f"select 1 from pg_stat_activity where {BACKENDS} and query ~ 'emit_message'") == [],
            "no question is left waiting",
        )
    assert "there already" in put_all(rescue_dir, own)
    assert stored(own, "/log") == b"old\nline\n"


def test_connections_killed_at_random(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """Eighty times, whatever the daemon is doing: each append is there once, each replacement is one version, and
    no call fails."""
    mounted = mount("--write-timeout", "20", session="s1")
    done = threading.Event()
    counts = {"/log": 0, "/other-log": 0, "/whole": 0, "/moved": 0}

    def append(path: str) -> None:
        while not done.is_set():
            fd = os.open(f"{mounted.path}{path}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, f"{counts[path]}\n".encode())
            os.close(fd)
            counts[path] += 1

    def replace() -> None:
        while not done.is_set():
            fd = os.open(f"{mounted.path}/whole", os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
            os.write(fd, f"{counts['/whole']}\n".encode() * 50)
            os.close(fd)
            counts["/whole"] += 1

    def move() -> None:
        while not done.is_set():
            fd = os.open(f"{mounted.path}/new", os.O_WRONLY | os.O_EXCL | os.O_CREAT)
            os.write(fd, f"{counts['/moved']}\n".encode())
            os.close(fd)
            os.rename(f"{mounted.path}/new", f"{mounted.path}/moved")
            counts["/moved"] += 1

    calls = [Call(lambda: append("/log")), Call(lambda: append("/other-log")), Call(replace), Call(move)]
    chance = random.Random(4711)
    killed = 0
    with psycopg.connect(namespace.dsn, autocommit=True) as killer:
        began = time.monotonic()
        while killed < 80 and time.monotonic() - began < 30:
            time.sleep(chance.uniform(0, 0.08))  # the random moment
            rows = killer.execute(f"select pid from pg_stat_activity where {BACKENDS}").fetchall()
            if rows:
                killed += bool(killer.execute("select pg_terminate_backend(%s)", chance.choice(rows)).rowcount)
    assert killed == 80
    eventually(lambda: min(counts.values()) > 20 or not all(call.is_alive() for call in calls), "each did something")
    done.set()
    assert [call.result() for call in calls] == [0] * 4
    for path in ("/log", "/other-log"):
        assert stored(namespace, path) == "".join(f"{n}\n" for n in range(counts[path])).encode()
    assert stored(namespace, "/whole") == f"{counts['/whole'] - 1}\n".encode() * 50
    assert stored(namespace, "/moved") == f"{counts['/moved'] - 1}\n".encode()
    for path in ("/log", "/other-log", "/whole"):
        rows = namespace.execute("select version from agent_file_versions where path = %s order by version", (path,))
        assert rows == [(version,) for version in range(1, counts[path] + 1)], "each change is one version"
    assert mounted.status()["pool"]["reconnects"] > 10


# -- Statements that the server ends ---------------------------------------------------------------------


def test_deadlock_with_another_program(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """With a quota a commit locks the file, then the namespace; another program locks them the other way round. The
    server ends the daemon's statement, which is sent again."""
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, 1000000, null)", (namespace.tenant_id, namespace.agent_id))
    mounted = mount(session="s1")
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with psycopg.connect(namespace.dsn) as other:
        other.execute("set deadlock_timeout = '30s'")  # the daemon's backend finds it, and is the one that gives way
        other.execute("select from agent_namespaces for update")
        closing = Call(lambda: os.close(fd))
        wait_for_backend(namespace, "wait_event_type = 'Lock'")
        other.execute("select from agent_files where path = '/log' for update")
        assert closing.is_alive()
    assert closing.result() == 0
    assert stored(namespace, "/log") == b"old\nline\n"
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    eventually(lambda: namespace.execute(deadlocks) == [(1,)], "there was a deadlock")


def test_serialization_failure(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    database = namespace.execute("select current_database()")[0][0]
    namespace.execute(f"alter database {database} set default_transaction_isolation = 'serializable'")
    mounted = mount(session="s1")
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with psycopg.connect(namespace.dsn) as other:
        other.execute("update agent_files set content = content || 'theirs\n' where path = '/log'")
        closing = Call(lambda: os.close(fd))
        wait_for_backend(namespace, "wait_event_type = 'Lock'")
    assert closing.result() == 0
    assert stored(namespace, "/log") == b"old\ntheirs\nline\n"


@pytest.mark.parametrize("how", ["cancelled", "too-long"])
def test_statement_that_is_ended(mount: harness.MountFactory, namespace: harness.Namespace, how: str) -> None:
    """What the server ends (as its statement timeout does), and what the write timeout ends, did not happen: the
    caller is told, and the next fsync does it, once."""
    mounted = mount("--write-timeout", "0.5" if how == "too-long" else "20", session="s1")
    mounted.expect_log(LOGGED)
    (mounted.path / "log").write_bytes(b"old\n")
    fd = os.open(mounted.path / "log", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"line\n")
    with psycopg.connect(namespace.dsn) as holder:
        holder.execute("select from agent_files where path = '/log' for update")
        syncing = Call(lambda: os.fsync(fd))
        pid = wait_for_backend(namespace, "wait_event_type = 'Lock'")
        if how == "cancelled":
            namespace.execute("select pg_cancel_backend(%s)", (pid,))
        assert syncing.result() == errno.EIO
        assert namespace.execute(f"select 1 from pg_stat_activity where {BACKENDS} and wait_event_type = 'Lock'") == []
    assert stored(namespace, "/log") == b"old\n"
    os.fsync(fd)
    os.close(fd)
    assert stored(namespace, "/log") == b"old\nline\n"


# -- The disk of the server is full ----------------------------------------------------------------------


@pytest.fixture
def small(server: Server, suite_dir: Path) -> Iterator[tuple[harness.Namespace, Path]]:
    """An agent in a database on a file system of its own, and the directory of that file system."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = suite_dir / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0755", "tmpfs", disk], check=True)
    try:
        space = disk / "space"
        space.mkdir(mode=0o700)
        owner = (server.data_dir / "pg").stat()
        os.chown(space, owner.st_uid, owner.st_gid)
        server.execute(sql.SQL("create tablespace small location {}").format(sql.Literal(str(space))))
        server.execute(sql.SQL("create database on_small template fusefs_template tablespace small"))
        try:
            yield harness.make_namespace(server.dsn("on_small")), disk
            (disk / "filler").unlink(missing_ok=True)
            harness.audit(server.dsn("on_small"))
        finally:
            server.drop_database("on_small")
            server.execute(sql.SQL("drop tablespace small"))
    finally:
        subprocess.run(["umount", disk], check=True)
        disk.rmdir()


def test_disk_full(small: tuple[harness.Namespace, Path], mount: harness.MountFactory, tmp_path: Path) -> None:
    namespace, disk = small
    rescue_dir = tmp_path / "rescue"
    mounted = mount("--rescue-dir", str(rescue_dir), namespace=namespace, session="s1")
    mounted.expect_log(LOGGED)
    sources = {f"f{number}": os.urandom(256 * 1024) for number in range(8)}
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)

    def cp(name: str) -> tuple[int, str]:
        done = subprocess.run(
            ["cp", tmp_path / name, mounted.path / name],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
        return done.returncode, done.stderr

    assert cp("f0") == (0, "")
    with open(disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(64 * 1024))
    results = {name: cp(name) for name in list(sources)[1:]}
    failed = [name for name, (code, _) in results.items() if code]
    assert failed, "the disk was not full"
    assert all("Input/output error" in results[name][1] for name in failed)
    for name in sources.keys() - failed:
        assert stored(namespace, f"/{name}") == sources[name], "acknowledged, and not in Postgres"
        assert (mounted.path / name).read_bytes() == sources[name]
    assert sorted(str(one["path"]) for one in kept(rescue_dir)) == sorted(f"/{name}" for name in failed)
    (disk / "filler").unlink()
    (mounted.path / "after").write_bytes(b"works again\n")
    assert stored(namespace, "/after") == b"works again\n"
    put_all(rescue_dir, namespace)
    for name in failed:
        assert stored(namespace, f"/{name}") == sources[name]
        eventually(lambda name=name: (mounted.path / name).read_bytes() == sources[name], "the mount sees it")  # type: ignore[misc]


# -- The daemon is killed --------------------------------------------------------------------------------


def test_daemon_killed_during_tar(mount: harness.MountFactory, namespace: harness.Namespace, corpus: Path) -> None:
    """tar names a file before it makes it, so whatever it named before the last name was closed."""
    mounted = mount(session="s1")
    named: list[str] = []
    with tools([f"exec stdbuf -oL tar xvf {corpus}.tar"], mounted.path) as (tar,):
        assert tar.stdout is not None
        for line in tar.stdout:
            named.append(line.strip())
            if len(named) == 90:
                mounted.kill()
                break
        rest, _ = tar.communicate(timeout=TOOL_TIMEOUT_S)
        assert tar.returncode == 2
        assert "Transport endpoint is not connected" in rest
    closed = [name for name in named[:-1] if name.endswith(".txt")]
    assert len(closed) > 60
    for name in closed:
        assert stored(namespace, f"/{name}") == (corpus.parent / name).read_bytes(), "acknowledged, and not in Postgres"
    checked = subprocess.run(
        [harness.FUSEFS, "check", "--dsn", namespace.dsn], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "1 agent checked, everything holds\n"), checked.stderr
    again = mount(session="s2", path=mounted.path)
    with tools([f"tar xf {corpus}.tar"], again.path) as (tar,):
        out, _ = tar.communicate(timeout=TOOL_TIMEOUT_S)
        assert (tar.returncode, out) == (0, "")
    same(corpus, again.path / "corpus")
