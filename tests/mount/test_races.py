"""Interleavings found by review: what happens while a commit waits in Postgres, and what others do meanwhile.

A test holds the row that a commit needs, waits until the server shows the commit waiting, and goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.posix_support import RENAME_EXCHANGE, errno_of, refused, renameat2
from tests.mount.sides import Duo, eventually

_numbers = itertools.count(1)
EXPECTED_LOG = r"stale|conflict|refused|malformed"


@pytest.fixture(scope="module")
def mounts(module_mount: harness.MountFactory) -> tuple[harness.Mount, ...]:
    pair = tuple(module_mount(session=name) for name in ("s-one", "s-two"))
    for mount in pair:
        mount.expect_log(EXPECTED_LOG)
    return pair


@pytest.fixture
def duo(
    mounts: tuple[harness.Mount, ...], module_namespace: harness.Namespace, request: pytest.FixtureRequest
) -> Iterator[Duo]:
    found = Duo(mounts, module_namespace, f"{request.node.originalname.removeprefix('test_')}-{next(_numbers)}")
    yield found
    found.close()


class Background:
    """A call in a thread of its own; `join` raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self._error = error

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def held_row(duo: Duo, name: str) -> Iterator[Callable[[], None]]:
    """Hold a row's lock for the block; the value waits until `count` statements of others wait for it."""
    dsn = duo.files.namespace.dsn
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as watcher:
        holder.execute("SELECT FROM agent_files WHERE path = %s FOR UPDATE", (duo.files.path(name),))

        def waiting() -> bool:
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            found = watcher.execute(query).fetchone()
            return found is not None and found[0] > 0

        yield lambda: eventually(waiting, "a commit waits for the row")
        holder.commit()


@contextlib.contextmanager
def unannounced(duo: Duo) -> Iterator[None]:
    """What is changed in the block is announced to nobody yet, as in the moment between a commit and its arrival."""
    namespace = duo.files.namespace
    where = " WHERE tenant_id = %s AND agent_id = %s"
    scope = (namespace.tenant_id, namespace.agent_id)
    ((channel,),) = namespace.execute("SELECT channel FROM agent_namespaces" + where, scope)
    namespace.execute("UPDATE agent_namespaces SET channel = 'nobody'" + where, scope)
    try:
        yield
    finally:
        namespace.execute("UPDATE agent_namespaces SET channel = %s" + where, (channel, *scope))


def told(duo: Duo) -> None:
    """Session a has heard of what session b did before."""
    duo.b.ok("echo > mark")
    eventually((duo.a / "mark").exists, "the mark in session a")
    os.unlink(duo.a / "mark")


def test_append_does_not_show_what_was_there(duo: Duo) -> None:
    duo.stale("f")
    duo.a.ok("echo mine >> f")
    duo.a.refused("echo all > f")
    assert duo.files.content("f") == b"two\nmine\n"
    duo.a.ok("cat f > /dev/null; echo all > f")


def test_rename_to_a_name_that_others_took_a_moment_ago(duo: Duo) -> None:
    duo.given("f")
    os.unlink(duo.b / "f")
    eventually(lambda: not (duo.a / "f").exists(), "the removal in session a")
    duo.a.ok("echo mine > g")
    with unannounced(duo):
        duo.b.ok("echo theirs > f")
    with refused(errno.ESTALE):
        os.rename(duo.a / "g", duo.a / "f")
    assert duo.files.content("f") == b"theirs\n"
    assert duo.files.content("g") == b"mine\n"
    assert (duo.a / "f").read_bytes() == b"theirs\n"
    os.rename(duo.a / "g", duo.a / "f")
    assert duo.files.content("f") == b"mine\n"


def test_name_that_others_gave_a_file_a_moment_ago_is_not_touched(duo: Duo) -> None:
    for call in (lambda: os.unlink(duo.a / "f"), lambda: os.rename(duo.a / "f", duo.a / "h")):
        duo.given("f")
        with unannounced(duo):
            os.rename(duo.b / "f", duo.b / "g")
        assert errno_of(call) == errno.ENOENT
        assert duo.files.content("g") == b"one\n"
        assert duo.files.content("h") is None
        os.unlink(duo.b / "g")


def test_read_while_others_append_is_not_cut_and_shows_what_it_gave(duo: Duo) -> None:
    duo.b.ok("printf one > f")
    eventually((duo.a / "f").exists, "the file in session a")
    fd = os.open(duo.a / "f", os.O_RDONLY)
    with unannounced(duo):
        duo.b.ok("printf two >> f")
    text = os.pread(fd, 100, 0)
    os.close(fd)
    if text == b"one":
        duo.a.refused("echo mine > f")
        assert duo.files.content("f") == b"onetwo"
    else:
        assert text == b"onetwo"


def test_descriptor_from_before_a_change_does_not_show_it(duo: Duo) -> None:
    """Nobody can tell which size the kernel has while it is told of a change: what is read through a descriptor from
    before counts for the next open only."""
    duo.b.ok("printf one > f")
    eventually((duo.a / "f").exists, "the file in session a")
    fd = os.open(duo.a / "f", os.O_RDONLY)
    duo.b.ok("printf two > f")
    eventually(lambda: os.pread(fd, 100, 0) == b"two", "the new text through the old descriptor")
    os.close(fd)
    duo.a.refused("echo mine > f")
    duo.a.ok("cat f > /dev/null; echo mine > f")


def test_what_is_read_of_a_removed_file_counts_when_its_lineage_goes_on(duo: Duo) -> None:
    duo.b.ok("echo one > f")
    eventually((duo.a / "f").exists, "the file in session a")
    fd = os.open(duo.a / "f", os.O_RDONLY)
    duo.b.ok("rm f")
    eventually(lambda: not (duo.a / "f").exists(), "the removal in session a")
    assert os.pread(fd, 100, 0) == b"one\n"
    os.close(fd)
    duo.b.ok("echo two > f")
    eventually((duo.a / "f").exists, "the file made anew in session a")
    duo.a.ok("echo more >> f")
    duo.a.refused("echo mine > f")
    assert duo.files.content("f") == b"two\nmore\n"


def test_read_after_a_change_was_heard_shows_it(duo: Duo) -> None:
    """The kernel may be being told of it at that moment: the open waits for that."""
    duo.given("f")
    for number in range(20):
        (duo.b / "f").write_bytes(b"theirs %d" % number)
        told(duo)
        assert (duo.a / "f").read_bytes() == b"theirs %d" % number
        (duo.a / "f").write_bytes(b"mine %d" % number)
        eventually(lambda number=number: (duo.b / "f").read_bytes() == b"mine %d" % number, "it in session b")
        assert (duo.b / "f").read_bytes() == b"mine %d" % number


def test_open_without_a_read_does_not_show_a_file(duo: Duo) -> None:
    duo.stale("f")
    fd = os.open(duo.a / "f", os.O_RDWR)
    assert errno_of(lambda: os.ftruncate(fd, 0)) == errno.ESTALE
    assert errno_of(lambda: os.close(fd)) == errno.ESTALE
    assert duo.files.content("f") == b"two\n"


def test_what_is_read_of_ones_own_buffer_does_not_show_what_others_wrote(duo: Duo) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"mine")
    duo.b.ok("echo theirs > f")
    told(duo)
    assert (duo.a / "f").read_bytes() == b"mine"
    with refused(errno.ESTALE):
        os.close(fd)
    duo.a.refused("echo again > f")
    assert duo.files.content("f") == b"theirs\n"


@pytest.mark.parametrize("how", ["open", "truncate"])
def test_truncation_over_an_append_of_ones_own(duo: Duo, how: str) -> None:
    """The append goes to whatever is there; the truncation must have seen it."""
    duo.given("f")
    path = duo.a / "f"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"mine\n")
    duo.b.ok("echo theirs >> f")
    told(duo)
    with refused(errno.ESTALE):
        if how == "open":
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        else:
            os.truncate(path, 0)
    os.close(fd)
    assert duo.files.content("f") == b"one\ntheirs\nmine\n"


def test_file_that_others_changed_a_moment_ago_moves_as_it_is(duo: Duo) -> None:
    duo.given("new")
    duo.given("f", "old\n")
    fd = os.open(duo.a / "new", os.O_RDWR)
    with unannounced(duo):
        duo.b.ok("echo two > new")
    os.rename(duo.a / "new", duo.a / "f")
    assert (duo.a / "f").read_bytes() == b"two\n", "not what this mount knew of it"
    with refused(errno.ESTALE):
        os.pwrite(fd, b"MINE", 0)
    assert errno_of(lambda: os.close(fd)) == errno.ESTALE
    assert duo.files.content("f") == b"two\n"


def test_rename_does_not_show_what_others_wrote_a_moment_ago(duo: Duo) -> None:
    duo.given("new")
    duo.given("f", "old\n")
    with unannounced(duo):
        duo.b.ok("echo two > new")
    os.rename(duo.a / "new", duo.a / "f")
    duo.a.refused("echo mine > f")
    duo.a.ok("cat f > /dev/null; echo mine > f")


def test_buffer_of_a_file_that_others_renamed_meets_no_version_of_the_other_lineage(duo: Duo) -> None:
    duo.b.ok("for text in 1 22 333; do printf $text > new; done; echo old > f")
    eventually(lambda: (duo.a / "new").read_bytes() == b"333", "the third version in session a")
    fd = os.open(duo.a / "new", os.O_RDWR)
    os.pwrite(fd, b"MINE", 0)
    duo.b.ok("mv new f; cat f > /dev/null; echo theirs > f")
    assert duo.files.identity("f")[1] == 3, "as many as the renamed file had"
    told(duo)
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") == b"theirs\n"
    assert duo.files.conflicts("f") == [b"MINE"]


def test_rename_of_a_file_that_others_gave_its_new_name(duo: Duo) -> None:
    """It is not there any more: to the caller that is ENOENT, not a move into itself."""
    duo.given("f")
    with held_row(duo, "f") as move_waits:
        moving = Background(lambda: os.rename(duo.a / "f", duo.a / "g"))
        move_waits()
        theirs = Background(lambda: os.rename(duo.b / "f", duo.b / "g"))
    assert sorted((errno_of(moving.join), errno_of(theirs.join))) == [0, errno.ENOENT]
    assert duo.files.content("g") == b"one\n"


def test_append_at_a_size_that_the_kernel_knew_before(duo: Duo) -> None:
    """The kernel appends at the size that it knows: 0 here, which could be a page of a mapping that is written back."""
    duo.b.ok("exec 3> f; exec 3>&-; exec 3>> f")
    eventually(lambda: os.stat(duo.a / "f").st_size == 0, "the empty file in session a")
    duo.b.ok("printf 0123456789 > f")
    told(duo)
    with open(os.open(duo.a / "f", os.O_RDWR | os.O_APPEND), "r+b", buffering=0) as log:
        log.write(b"mine")
        assert os.pread(log.fileno(), 100, 0) == b"0123456789mine"
    assert duo.files.content("f") == b"0123456789mine"


def test_refused_append_is_kept_as_it_is(duo: Duo) -> None:
    """Not at the offset that the kernel gave it, nor behind a content that was committed before."""
    duo.given("f")
    first = os.open(duo.a / "f", os.O_RDWR)
    os.pwrite(first, b"ONE", 0)
    os.fsync(first)
    second = os.open(duo.a / "f", os.O_WRONLY | os.O_APPEND)
    duo.b.ok("rm f")
    told(duo)
    with refused(errno.ESTALE):
        os.write(second, b"mine")
    for fd in (first, second):
        assert errno_of(lambda fd=fd: os.close(fd)) == errno.ESTALE
    assert duo.files.conflicts("f") == [b"mine"]


def test_claim_that_others_wrote_to_before_it_was_answered(duo: Duo) -> None:
    opened: list[int] = []
    duo.a.ok("true")
    with psycopg.connect(duo.files.namespace.dsn) as holder:
        # The claim waits for its directory; what changes the row comes in between it and its answer.
        holder.execute("SELECT FROM agent_files WHERE path = %s FOR UPDATE", (duo.files.path("")[:-1],))
        with psycopg.connect(duo.files.namespace.dsn, autocommit=True) as watcher:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            claiming = Background(lambda: opened.append(os.open(duo.a / "f", flags)))
            query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            eventually(lambda: (watcher.execute(query).fetchone() or (0,))[0], "the claim waits")
            os.kill(duo.a.mount.process.pid, signal.SIGSTOP)
            try:
                holder.commit()
                eventually(lambda: duo.files.content("f") is not None, "the claim is stored")
                eventually((duo.b / "f").exists, "the claimed name in session b")
                duo.b.ok("echo theirs > f")
            finally:
                os.kill(duo.a.mount.process.pid, signal.SIGCONT)
    claiming.join()
    with refused(errno.ESTALE):
        os.write(opened[0], b"mine")
    with refused(errno.ESTALE):
        os.close(opened[0])
    assert duo.files.content("f") == b"theirs\n"
    assert duo.files.conflicts("f") == [b"mine"]


def test_truncation_while_an_append_commits(duo: Duo) -> None:
    path = duo.a / "f"
    path.write_bytes(b"0123456789")
    appended = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(appended, b"TAIL")
    opened: list[int] = []
    with held_row(duo, "f") as commit_waits:
        closing = Background(lambda: os.close(appended))
        commit_waits()
        truncating = Background(lambda: opened.append(os.open(path, os.O_WRONLY | os.O_TRUNC)))
    closing.join()
    truncating.join()
    os.write(opened[0], b"ab")
    os.close(opened[0])
    assert duo.files.content("f") == b"ab"
    assert path.read_bytes() == b"ab"
    eventually(lambda: (duo.b / "f").read_bytes() == b"ab", "the truncated text in session b")


def test_new_file_in_a_directory_that_others_removed(duo: Duo) -> None:
    (duo.a / "d").mkdir()
    eventually((duo.b / "d").is_dir, "the directory in session b")
    fd = os.open(duo.a / "d" / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"mine")
    os.rmdir(duo.b / "d")
    eventually(lambda: not (duo.a / "d").exists(), "the removal in session a")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.conflicts("d/f") == [b"mine"]


def test_limit_met_by_one_handle_is_told_to_the_other(duo: Duo) -> None:
    path = duo.a / "f"
    path.write_bytes(b"old")
    first = os.open(path, os.O_WRONLY)
    os.write(first, b"NEW")
    second = os.open(path, os.O_WRONLY)
    with refused(errno.EFBIG):
        os.pwrite(second, b"x", 1 << 30)
    # Its bytes were given up too: its close must not say that they are stored.
    assert errno_of(lambda: os.close(first)) == errno.EFBIG
    os.close(second)
    assert duo.files.content("f") == b"old"


def test_exchange_with_a_file_that_is_not_committed_yet(duo: Duo) -> None:
    (duo.a / "f").write_bytes(b"f")
    fd = os.open(duo.a / "g", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"g")
    renameat2(duo.a / "f", duo.a / "g", RENAME_EXCHANGE)
    os.close(fd)
    assert duo.files.content("f") == b"g"
    assert duo.files.content("g") == b"f"


def test_append_right_after_others_removed_the_log(duo: Duo) -> None:
    for number in range(20):
        (duo.a / "log").write_bytes(b"old\n")
        eventually((duo.b / "log").exists, "the log in session b")
        os.unlink(duo.b / "log")
        with open(duo.a / "log", "ab") as log:
            log.write(b"new\n")
        assert duo.files.content("log") == b"new\n", f"round {number}"
        os.unlink(duo.a / "log")
        eventually(lambda: not (duo.b / "log").exists(), "the removal in session b")


def test_access_follows_the_mode(duo: Duo) -> None:
    (duo.a / "f").write_bytes(b"text")
    assert not os.access(duo.a / "f", os.X_OK)
    assert (
        subprocess.run(["find", duo.a.root, "-type", "f", "-executable"], capture_output=True, check=True).stdout == b""
    )
    os.chmod(duo.a / "f", 0o755)
    assert os.access(duo.a / "f", os.X_OK)


def test_times_and_owners_at_the_edge(duo: Duo) -> None:
    path = duo.a / "f"
    with open(path, "wb") as file:
        file.write(b"text")
        assert errno_of(lambda: os.utime(file.fileno(), (1 << 40, 1 << 40))) == errno.EINVAL
    assert duo.files.content("f") == b"text"
    if os.geteuid() == 0:
        os.chown(path, 4294967290, 4294967290)
        assert os.stat(path).st_uid == 4294967290


def test_append_that_races_a_rename_over(duo: Duo) -> None:
    for number in range(10):
        name = f"log{number}"
        (duo.b / name).write_bytes(b"old\n")
        eventually(lambda name=name: (duo.a / name).read_bytes() == b"old\n", "the log in session a")
        (duo.b / "new").write_bytes(b"replaced\n")
        fd = os.open(duo.a / name, os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"mine\n")
        with held_row(duo, name) as waits:
            renaming = Background(lambda name=name: os.rename(duo.b / "new", duo.b / name))
            waits()
            closing = Background(lambda fd=fd: os.close(fd))
        # Postgres chooses who is first. An append that is first makes the rename stale; one that is second adds to
        # what was renamed, unless the announcement told its mount before it asked.
        outcome = errno_of(renaming.join), errno_of(closing.join)
        stored = duo.files.content(name)
        assert (outcome, stored) in (
            ((0, 0), b"replaced\nmine\n"),
            ((0, errno.ESTALE), b"replaced\n"),
            ((errno.ESTALE, 0), b"old\nmine\n"),
        )
        for side in (duo.a, duo.b):
            eventually(lambda side=side, name=name, stored=stored: (side / name).read_bytes() == stored, "one content")


def test_directory_moved_to_where_nothing_is_loaded(duo: Duo) -> None:
    os.makedirs(duo.b / "b" / "c")
    os.makedirs(duo.b / "a" / "d")
    (duo.b / "a" / "d" / "old").write_bytes(b"old")
    eventually(lambda: os.listdir(duo.a / "a" / "d") == ["old"], "the listing in session a")
    os.rename(duo.b / "a" / "d", duo.b / "b" / "c" / "d")
    (duo.b / "b" / "c" / "d" / "new").write_bytes(b"new")
    eventually(lambda: sorted(os.listdir(duo.a / "b" / "c" / "d")) == ["new", "old"], "the new file in session a")


def test_others_file_behind_an_uncommitted_one(duo: Duo) -> None:
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"mine")
    (duo.b / "f").write_bytes(b"theirs")
    eventually(lambda: (duo.a / "f").read_bytes() == b"theirs", "the others' file in session a")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.conflicts("f") == [b"mine"]
    assert (duo.a / "f").read_bytes() == b"theirs"


def test_open_file_after_announcements_were_lost(duo: Duo) -> None:
    path = duo.a / "f"
    path.write_bytes(b"one")
    eventually(lambda: (duo.b / "f").read_bytes() == b"one", "the file in session b")
    namespace = duo.files.namespace
    with open(path, "rb") as file, psycopg.connect(namespace.dsn, autocommit=True) as conn:
        assert file.read() == b"one"
        for number in range(5):
            text = f"by sql {number}"
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ILIKE 'listen%'")
            conn.execute("UPDATE agent_files SET content = %s WHERE path = %s", (text, duo.files.path("f")))
            for side in (duo.a, duo.b):
                eventually(lambda side=side, text=text: (side / "f").read_text() == text, "the new text")
            eventually(lambda text=text: os.pread(file.fileno(), 100, 0) == text.encode(), "the new text, open file")
    assert os.stat(path).st_size == len(text)


def test_symlink_as_a_lock(duo: Duo) -> None:
    """Emacs and others lock so: one winner, and it reads what the last holder wrote."""
    (duo.a / "data").write_bytes(b"0")
    for number in range(1, 20):
        holder, next_one = (duo.a, duo.b) if number % 2 else (duo.b, duo.a)
        eventually(lambda side=holder: errno_of(lambda: os.symlink("me", side / "lock")) == 0, "the lock is free")
        assert errno_of(lambda side=next_one: os.symlink("me", side / "lock")) == errno.EEXIST
        assert (holder / "data").read_bytes() == str(number - 1).encode()
        (holder / "data").write_bytes(str(number).encode())
        os.unlink(holder / "lock")


def test_names_that_were_looked_up_and_then_made_are_not_remembered_as_absent(duo: Duo) -> None:
    """More than the kernel may remember of one directory as missing (10,000 names) pass through here."""
    directory = duo.a / "d"
    directory.mkdir()
    for number in range(300):
        (directory / f"f{number}").write_bytes(b"")
        os.unlink(directory / f"f{number}")
    assert not os.path.exists(directory / "later")
    (duo.b / "d" / "later").write_bytes(b"x")
    eventually(lambda: os.path.exists(directory / "later"), "the name that was missing")


def test_chmod_of_a_directory_in_the_other_session(duo: Duo) -> None:
    """The directory's shown ctime is this machine's; what orders its states is Postgres's."""
    (duo.a / "d").mkdir()
    for number in range(20):
        (duo.a / "d" / f"f{number}").write_bytes(b"x")
        mode = 0o700 + number
        os.chmod(duo.b / "d", mode)
        eventually(lambda mode=mode: os.stat(duo.a / "d").st_mode & 0o777 == mode, "the mode")


def test_directory_replaced_by_a_rename_does_not_come_back(duo: Duo) -> None:
    for number in range(10):
        (duo.a / f"old{number}").mkdir()
        eventually(lambda number=number: (duo.b / f"old{number}").is_dir(), "the directory in the other session")
        (duo.a / f"new{number}").mkdir()
        (duo.a / f"new{number}" / "in").write_bytes(b"x")
        os.rename(duo.a / f"new{number}", duo.a / f"old{number}")
        for side in (duo.a, duo.b):
            eventually(lambda side=side, number=number: os.listdir(side / f"old{number}") == ["in"], "its new entries")


@pytest.mark.parametrize("way", ["replace", "unlink"])
def test_what_was_found_by_its_name_can_be_opened_after_this_session_took_the_name(
    mount: harness.MountFactory, tmp_path: Path, way: str
) -> None:
    """As by a reader between its look-up and its open. A plain directory is asked first."""
    for top in (tmp_path, mount(session="s1").path):
        (top / "f").write_text("old")
        assert (top / "f").read_text() == "old"
        (top / "new").write_text("new")
        found = os.open(top / "f", os.O_PATH)
        try:
            if way == "replace":
                os.rename(top / "new", top / "f")
            else:
                (top / "f").unlink()
            assert Path(f"/proc/self/fd/{found}").read_text() == "old"
        finally:
            os.close(found)
