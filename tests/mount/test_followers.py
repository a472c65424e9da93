"""Mounts that come to a namespace and go while another one writes: who writes alone announces nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.relay import Line

EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Writer(threading.Thread):
    """Makes, replaces, moves and removes files of one directory until it is told to stop; `pause` holds it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.count = 0
        self.pause = threading.Lock()
        self.ended = False
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            while not self.ended:
                with self.pause:
                    self._step()
        except Exception as error:  # noqa: BLE001  (handed to the test)
            self.failed = error

    def _step(self) -> None:
        n = self.count
        (self.root / f"f{n}").write_text(f"{n}\n")
        (self.root / "newest").write_text(f"{n}\n")
        if n % 3 == 0:
            (self.root / f"f{n}").rename(self.root / f"g{n}")
        if n % 5 == 0:
            # In a directory of its own: a directory's move is announced in any case, and has the directory loaded anew.
            (self.root / "moves" / f"d{n}").mkdir()
            (self.root / "moves" / f"d{n}" / "x").write_text(f"{n}\n")
            (self.root / "moves" / f"d{n}").rename(self.root / "moves" / f"e{n}")
        if n > 40:
            (self.root / f"{'g' if (n - 40) % 3 == 0 else 'f'}{n - 40}").unlink()
        self.count += 1

    def goes_on(self) -> None:
        """Return after some more steps."""
        seen = self.count
        eventually(lambda: self.failed or self.count > seen + 3, "the writer goes on")
        assert self.failed is None, self.failed


def shown(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_mounts_that_come_and_go_see_all_that_another_writes(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    first = mount(session="s-first")
    alone = namespace.only_follower()
    assert alone is not None
    (first.path / "d" / "moves").mkdir(parents=True)
    writer = Writer(first.path / "d")
    writer.start()
    try:
        for number in range(3):
            writer.goes_on()
            comes = mount(session=f"s-{number}")
            root = comes.path / "d"
            os.listdir(root)
            writer.goes_on()
            with writer.pause:
                eventually(lambda root=root: shown(root) == shown(writer.root), "all of it")  # type: ignore[misc]
            writer.goes_on()
            with writer.pause:
                eventually(lambda root=root: shown(root) == shown(writer.root), "what came later")  # type: ignore[misc]
            comes.umount()
    finally:
        writer.ended = True
        writer.join(60)
    assert writer.failed is None, writer.failed


# -- Names that one process alone may have ----------------------------------------------------------------


def stored(namespace: harness.Namespace, name: str) -> list[tuple[int, str]]:
    return namespace.execute(
        "select version, content from agent_files where agent_id = %s and path = %s", (namespace.agent_id, f"/{name}")
    )


def test_the_only_mount_claims_at_the_first_close(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    mounted = mount(session="s-one")
    fd = os.open(mounted.path / "f", EXCLUSIVE)
    os.write(fd, b"text\n")
    assert stored(namespace, "f") == []
    assert errno_of(lambda: os.open(mounted.path / "f", EXCLUSIVE)) == errno.EEXIST
    os.close(fd)
    assert stored(namespace, "f") == [(1, "text\n")]
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/g', '')",
        (namespace.tenant_id, namespace.agent_id),
    )
    assert errno_of(lambda: os.open(mounted.path / "g", EXCLUSIVE)) == errno.EEXIST, "the barrier was taken"


class Holder:
    """A process of its own that holds files open: where the test's holds them, whatever it starts has copies, and
    closes them before the command begins, which is a flush."""

    _CODE = """
import os, sys
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(-error.errno, flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate(timeout=30)

    def do(self, call: str) -> int:
        """Its number, or the negative errno."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{call}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        return 0 if answer == "None" else int(answer)

    def make(self, path: Path) -> int:
        return self.do(f"os.open({str(path)!r}, {EXCLUSIVE})")

    def write(self, fd: int, data: bytes) -> None:
        assert self.do(f"os.write({fd}, {data!r})") == len(data)

    def close(self, fd: int) -> int:
        """The errno."""
        return -self.do(f"os.close({fd})")


@pytest.fixture
def holder() -> Iterator[Holder]:
    with Holder() as process:
        yield process


def test_who_comes_finds_what_others_hold(
    mount: harness.MountFactory, namespace: harness.Namespace, holder: Holder
) -> None:
    """Names that were not claimed are, before a second mount shows anything."""
    first = mount(session="s-first")
    empty, begun, gone = (holder.make(first.path / name) for name in ("empty", "begun", "gone"))
    holder.write(begun, b"one\n")
    os.unlink(first.path / "gone")
    assert stored(namespace, "begun") == []
    second = mount(session="s-second")
    assert stored(namespace, "empty") == [(1, "")]
    assert stored(namespace, "begun") == [(1, "one\n")]
    for name in ("empty", "begun"):
        assert errno_of(lambda name=name: os.open(second.path / name, EXCLUSIVE)) == errno.EEXIST  # type: ignore[misc]
    os.close(os.open(second.path / "gone", EXCLUSIVE))
    holder.write(begun, b"two\n")
    assert [holder.close(fd) for fd in (empty, begun, gone)] == [0, 0, 0]
    assert stored(namespace, "begun") == [(2, "one\ntwo\n")]
    late = holder.make(first.path / "late")
    assert stored(namespace, "late") == [(0, "")], "claimed at once, since there are two"
    holder.close(late)


def test_a_second_session_sees_what_the_first_holds(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    agent = mount(layout="host").path / namespace.tenant / namespace.agent
    first, second = agent / "s-first", agent / "s-second"
    first.mkdir()
    fd = os.open(first / "lock", EXCLUSIVE)
    assert stored(namespace, "lock") == []
    second.mkdir()
    assert (second / "lock").exists()
    assert errno_of(lambda: os.open(second / "lock", EXCLUSIVE)) == errno.EEXIST
    os.close(fd)


def test_a_lock_file_has_one_holder_while_mounts_come(mount: harness.MountFactory) -> None:
    """Each adds to a number under a lock file, the first from before the others are there."""
    mounts = [mount(session="s-0")]
    (mounts[0].path / "number").write_text("0")
    ended = threading.Event()
    counts = [0, 0, 0]
    failed: list[Exception] = []

    def count(number: int) -> None:
        root = mounts[number].path
        try:
            while not ended.is_set():
                try:
                    lock = os.open(root / "lock", EXCLUSIVE)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ESTALE):  # the latter: lost twice in one call
                        raise
                    continue
                value = int((root / "number").read_text())
                (root / "number").write_text(str(value + 1))
                counts[number] += 1
                os.unlink(root / "lock")
                os.close(lock)
        except Exception as error:  # noqa: BLE001  (handed to the test)
            failed.append(error)

    threads = [threading.Thread(target=count, args=(0,))]
    threads[0].start()
    try:
        for number in (1, 2):
            eventually(lambda number=number: failed or counts[number - 1] > 10, "the one before counts")  # type: ignore[misc]
            mounts.append(mount(session=f"s-{number}"))
            threads.append(threading.Thread(target=count, args=(number,)))
            threads[-1].start()
        eventually(lambda: failed or counts[2] > 10, "the last one counts")
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not failed, failed
    eventually(lambda: int((mounts[0].path / "number").read_text()) == sum(counts), f"{counts}")


def test_a_lock_file_is_there_when_its_close_returns(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """Also an empty one; and one whose name a program took meanwhile was not won."""
    mounted = mount(session="s-one")
    os.close(os.open(mounted.path / "own", EXCLUSIVE))
    assert stored(namespace, "own") == [(1, "")]
    fd = os.open(mounted.path / "taken", EXCLUSIVE)
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/taken', 'theirs')",
        (namespace.tenant_id, namespace.agent_id),
    )
    assert errno_of(lambda: os.close(fd)) == errno.ESTALE
    assert stored(namespace, "taken") == [(1, "theirs")]


def test_what_meets_a_limit_when_others_come_is_told_at_close(
    mount: harness.MountFactory, namespace: harness.Namespace, holder: Holder
) -> None:
    """No call of the process failed before: the name was claimed for it when the second mount came."""
    first = mount(session="s-first")
    fd = holder.make(first.path / "f")
    holder.write(fd, b"x" * 1000)
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, 10, null)", (namespace.tenant_id, namespace.agent_id))
    mount(session="s-second")
    assert stored(namespace, "f") == [(1, "")]
    assert holder.close(fd) == errno.EDQUOT


def test_a_mount_that_hears_nothing_takes_no_name_from_one_that_claims_late(
    mount: harness.MountFactory, namespace: harness.Namespace, holder: Holder
) -> None:
    with Line(namespace.dsn) as line:
        deaf = mount("--listen-dsn", line.dsn, session="s-deaf")
        line.shut()
        eventually(lambda: not deaf.status()["live"], "the loss is noticed")
        first = mount(session="s-first")
        fd = holder.make(first.path / "lock")
        assert stored(namespace, "lock") == []
        assert errno_of(lambda: os.open(deaf.path / "lock", EXCLUSIVE)) == errno.EIO
        line.open()
        eventually(lambda: deaf.status()["live"], "announcements are back")
        eventually(lambda: stored(namespace, "lock") == [(1, "")], "the name is claimed")
        assert errno_of(lambda: os.open(deaf.path / "lock", EXCLUSIVE)) == errno.EEXIST
        assert holder.close(fd) == 0


def test_an_agent_whose_other_mount_hangs_keeps_no_other_agent_back(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    """After a loss of the host's connection: each agent is live by itself, and opens sessions."""
    other = harness.make_namespace(namespace.dsn)
    host = mount(layout="host")
    host.expect_log("mounted.later|follow")
    waits, goes_on = (host.path / each.tenant / each.agent for each in (namespace, other))
    for agent in (waits, goes_on):
        (agent / "s-1").mkdir()
        (agent / "s-1" / "f").write_text("text")

    def is_live(agent: Path) -> bool:
        """Postgres is not asked for what was looked at just now."""
        (agent / "s-1" / "f").stat()
        before = harness.status_at(goes_on / "s-1")["trips"]
        (agent / "s-1" / "f").stat()
        return bool(harness.status_at(goes_on / "s-1")["trips"] == before)

    with psycopg.connect(namespace.dsn, autocommit=True) as hangs:
        locks = "select pg_advisory_lock_shared(uuid_hash_extended(%s::uuid, key)) from generate_series(1, 3, 2) key"
        hangs.execute(locks, (namespace.agent_id,))
        namespace.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where query ilike 'listen%%' and datname = current_database()"
        )
        eventually(lambda: harness.status_at(goes_on / "s-1")["listener_reconnects"] == 1, "the connection is back")
        eventually(lambda: is_live(goes_on), "the other agent is live")
        (goes_on / "s-2").mkdir()
        assert not is_live(waits)
    eventually(lambda: is_live(waits), "the agent is live")


# -- Alone again ------------------------------------------------------------------------------------------


def test_who_is_left_alone_announces_no_more(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    first = mount(session="s-first")
    alone = namespace.only_follower()
    second = mount(session="s-second")
    assert namespace.only_follower() is None
    second.umount()

    def has_found_out() -> bool:
        (first.path / "f").write_text("text\n")  # whoever announces hears itself, and asks
        return namespace.only_follower() == alone

    eventually(has_found_out, "it found out that it is alone")
    ((channel,),) = namespace.execute("select channel from agent_namespaces where agent_id = %s", (namespace.agent_id,))
    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        conn.execute(f'listen "{channel}"'.encode())
        (first.path / "quiet").write_text("text\n")
        namespace.execute("update agent_files set content = 'sql' where path = '/f'")
        (heard,) = conn.notifies(timeout=10, stop_after=1)
    assert '"/f"' in heard.payload
