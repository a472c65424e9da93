"""Cases of the project's requirements that have a number (L01 and so on) but no script.

L03, a half-open connection, is in test_announcements.py. L09 is here as far as it is not in test_outage.py (SIGTERM
while Postgres is away) and test_sessions.py (signals). L27, two daemons with another user and place each, is what
test_shared_cases.py runs the cases of two mounts with. L21 speaks of HTTP, which is not there yet; that a change hangs
on lineage and version, and on nothing else, is in tests/services/test_backend.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.sides import Duo, eventually

IN_MODIFY, IN_CREATE = 0x2, 0x100
LISTENS = "query ILIKE 'listen %%' AND datname = current_database()"


@pytest.fixture(scope="module")
def mounts(module_mount: harness.MountFactory) -> tuple[harness.Mount, ...]:
    return tuple(module_mount(session=name) for name in ("s-one", "s-two"))


@pytest.fixture
def duo(
    mounts: tuple[harness.Mount, ...], module_namespace: harness.Namespace, request: pytest.FixtureRequest
) -> Iterator[Duo]:
    found = Duo(mounts, module_namespace, request.node.originalname)
    yield found
    found.close()


@contextlib.contextmanager
def asking(path: Path) -> Iterator[None]:
    """Meanwhile the daemon of this file asks over its listening connection all the time: each open for writing takes
    a barrier."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            os.close(os.open(path, os.O_WRONLY))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_l01_changes_that_arrive_while_the_listener_asks(duo: Duo) -> None:
    (duo.a / "own").write_bytes(b"")
    (duo.b / "f").write_bytes(b"0")
    assert not (duo.a / "n1").exists()
    with asking(duo.a / "own"):
        for number in range(1, 200):
            (duo.b / "f").write_bytes(b"%d" % number)
            os.close(os.open(duo.b / f"n{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            eventually((duo.a / f"n{number}").exists, "the name that was missing")
            assert (duo.a / "f").read_bytes() == b"%d" % number, "what came before it"
            assert not (duo.a / f"n{number + 1}").exists()


def test_l05_listener_is_never_in_a_transaction(duo: Duo) -> None:
    (duo.a / "own").write_bytes(b"")
    with psycopg.connect(duo.files.namespace.dsn, autocommit=True) as conn, asking(duo.a / "own"):
        seen = set()
        for number in range(100):
            (duo.b / "f").write_bytes(b"%d" % number)
            found = conn.execute(f"SELECT pid, state FROM pg_stat_activity WHERE {LISTENS}").fetchall()
            assert len(found) == 2, "one for each daemon, and nothing but LISTEN was ever said on it"
            seen.update(found)
    assert {state for _, state in seen} <= {"idle", "active"}
    assert len({pid for pid, _ in seen}) == 2


def test_l09_what_was_acknowledged_survives_kill_9(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    first = mount(session="s-killed")
    (first.path / "closed").write_bytes(b"closed")
    fd = os.open(first.path / "synced", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"synced")
    os.fsync(fd)
    os.write(fd, b" and more")
    first.kill()
    with contextlib.suppress(OSError):
        os.close(fd)
    subprocess.run(["fusermount3", "-u", "-z", first.path], check=True)
    assert not harness.mounts_under(first.path)
    again = mount(session="s-killed", path=first.path)
    assert (again.path / "closed").read_bytes() == b"closed"
    assert (again.path / "synced").read_bytes() == b"synced"
    assert namespace.execute("SELECT count(*) FROM agent_files WHERE kind = 'file'") == [(2,)]


def test_l29_inotify_tells_of_changes_made_here(duo: Duo) -> None:
    (duo.a / "f").write_bytes(b"")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    try:
        assert libc.inotify_add_watch(fd, os.fsencode(duo.a.root), IN_MODIFY | IN_CREATE) > 0
        duo.a.ok("echo text > f; echo new > g")
        found = set()
        while found != {(IN_MODIFY, "f"), (IN_CREATE, "g"), (IN_MODIFY, "g")}:
            assert select.select([fd], [], [], 10)[0], found
            data = os.read(fd, 65536)
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                found.add((mask, data[16 : 16 + length].rstrip(b"\0").decode()))
                data = data[16 + length :]
    finally:
        os.close(fd)


def test_l29_tools_that_poll_see_what_others_change(duo: Duo) -> None:
    """As docs/howto/troubleshooting.md says: tail polls here by itself, and make looks when it is called."""
    duo.a.ok("echo start > log; echo 1 > source; printf 'target: source\\n\\tcp source target\\n' > Makefile; make -s")
    eventually((duo.b / "target").exists, "the files in session b")
    assert duo.a.run("make -q").code == 0
    with subprocess.Popen(
        ["tail", "-n", "0", "-F", "-s", "0.05", "log"], cwd=duo.a.root, stdout=subprocess.PIPE
    ) as tail:
        try:
            assert tail.stdout is not None
            for number in range(5):
                duo.b.ok(f"echo line {number} >> log")
                assert select.select([tail.stdout], [], [], 10)[0], "tail shows nothing"
                assert tail.stdout.readline() == b"line %d\n" % number
            duo.b.ok("echo moved > new; mv new log")
            assert select.select([tail.stdout], [], [], 10)[0], "tail does not see the new file"
            assert tail.stdout.readline() == b"moved\n"
        finally:
            tail.terminate()
    duo.b.ok("echo 2 > source")
    eventually(lambda: duo.a.run("make -q").code == 1, "make sees the change")
    duo.a.ok("make -s")
    eventually(lambda: (duo.b / "target").read_text() == "2\n", "what make made")


# L07: a fault of the program itself

BROKEN = """
import fusefs.core.vfs

async def broken(*_args):
    raise ZeroDivisionError("the text of a fault")

fusefs.core.vfs.SessionFs.readlink = broken
"""


def test_l07_a_fault_in_a_handler_ends_neither_the_mount_nor_other_calls(
    mount: harness.MountFactory, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    one = mount(env={"PYTHONPATH": str(tmp_path)})
    one.expect_log("fuse.handler_failed")
    (one.path / "link").symlink_to("nowhere")
    (one.path / "file").write_text("before")
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            (one.path / "link").readlink()
        assert caught.value.errno == errno.EIO
        assert one.path.is_mount()
    (one.path / "file").write_text("after")
    assert (one.path / "file").read_text() == "after"
    faults = [entry for entry in one.log_events() if entry["event"] == "fuse.handler_failed"]
    assert len(faults) == 3
    assert "ZeroDivisionError" in str(faults[0])


# L11: errors at close


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cp {source} f", "Disk quota exceeded"),
        ("cat {source} > f", "Disk quota exceeded"),
        ("sed -i s/x/yy/ g", "quota"),
    ],
)
def test_l11_what_the_database_refuses_is_told_by_the_tool(
    mount: harness.MountFactory, namespace: harness.Namespace, tmp_path: Path, command: str, text: str
) -> None:
    """By close at the latest: nothing is left to the release, which nobody waits for. (Lost races:
    test_versions.py::test_tool_that_checks_close_exits_non_zero.)"""
    one = mount()
    one.expect_log("refused|quota")
    (one.path / "f").write_text("old\n")
    (one.path / "g").write_text("x" * 3000)
    source = tmp_path / "source"
    source.write_text("y" * 3000)
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, 3004, null)", (namespace.tenant_id, namespace.agent_id))
    done = subprocess.run(
        ["bash", "-c", command.format(source=source)], cwd=one.path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert text in done.stderr
    assert (one.path / "f").read_text() in {"old\n", ""}
    assert (one.path / "g").read_text() == "x" * 3000


# L33: large databases

FILL = """
import sqlite3, sys
base = sqlite3.connect(sys.argv[1])
base.execute("pragma journal_mode = wal")
base.execute("create table if not exists t (id integer primary key, body blob)")
try:
    with base:
        for number in range(int(sys.argv[2])):
            base.execute("insert into t (body) values (randomblob(1000000))")
    base.execute("delete from t where id % 2 = 0")
    base.commit()
    base.execute("vacuum")
    base.execute("pragma wal_checkpoint(truncate)")
finally:
    base.close()
"""
MIB = 1 << 20


def sqlite(script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=300, check=False
    )


def whole(database: Path) -> int:
    """How many rows a database has that says it is whole."""
    with contextlib.closing(sqlite3.connect(database)) as base:
        assert base.execute("pragma integrity_check").fetchone() == ("ok",)
        found: int = base.execute("select count(*) from t where length(body) = 1000000").fetchone()[0]
        return found


def test_l33_a_large_database_survives_vacuum_checkpoint_and_a_new_mount(mount: harness.MountFactory) -> None:
    """16 MB here; the figures of 100 MB are in docs/internals/reliability.md."""
    one = mount(env={"HANGO_FS_MAX_FILE_BYTES": str(256 * MIB)})
    done = sqlite(FILL, one.path / "base", "16")
    assert done.returncode == 0, done.stderr
    assert (one.path / "base").stat().st_size > 8_000_000
    assert whole(one.path / "base") == 8
    one.umount()
    assert whole(mount().path / "base") == 8


def test_l33_a_database_that_passes_the_limit_is_told_and_stays_whole(mount: harness.MountFactory) -> None:
    one = mount(env={"HANGO_FS_MAX_FILE_BYTES": str(8 * MIB)})
    done = sqlite(FILL, one.path / "base", "16")
    assert done.returncode == 1
    assert "sqlite3." in done.stderr.splitlines()[-1]
    assert "the limit is 8388608" in (one.path / ".fusefs/errors").read_text()
    one.umount()
    assert whole(mount().path / "base") == 0


# L35: bulk delete


def test_l35_one_rm_takes_20000_files_in_2000_directories(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    namespace.execute(
        "insert into agent_files (id, tenant_id, agent_id, path, content, size_bytes)"
        " select gen_random_uuid(), %s, %s, format('/tree/d%%s/f%%s', d, f), 'x', 1"
        " from generate_series(1, 2000) d, generate_series(1, 10) f",
        (namespace.tenant_id, namespace.agent_id),
    )
    one = mount()
    done = subprocess.run(["rm", "-rf", one.path / "tree"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (one.path / "tree").exists()
    assert namespace.execute("select count(*) from agent_files where starts_with(path, '/tree')") == [(0,)]
