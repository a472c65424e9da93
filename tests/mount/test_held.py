"""Attributes that the only mount answers before they are stored: seen at once, stored soon, overtaken by nothing."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.outage import LOGGED, TIMEOUT
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.relay import Line, Which

LONG_AGO_NS = 1_000_000_000_123_456_000


@pytest.fixture
def only(mount: harness.MountFactory) -> harness.Mount:
    return mount(session="s-only")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def stored(namespace: harness.Namespace, name: str) -> tuple[int, int]:
    """Mode and mtime in Postgres."""
    (row,) = namespace.execute(
        "select mode, mtime_ns from agent_files where agent_id = %s and path = %s", (namespace.agent_id, f"/{name}")
    )
    return row[0], row[1]


def sync(directory: Path) -> None:
    """fsync(2) of a directory: what is held by then is in Postgres."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unmounted_while_there_is(line: Line, found: harness.Mount) -> Iterator[harness.Mount]:
    """A mount behind a line, for a fixture."""
    yield found
    line.thaw()
    found.umount()


@pytest.fixture
def behind(mount: harness.MountFactory, line: Line) -> Iterator[harness.Mount]:
    """The only mount, behind a line."""
    yield from unmounted_while_there_is(line, mount(session="s-only", dsn=line.dsn))


def send_late(line: Line, path: Path, time_ns: int = LONG_AGO_NS) -> None:
    """Set a time whose statement is on its way until the line thaws."""
    line.relay.hold_request = str(time_ns).encode()
    os.utime(path, ns=(time_ns, time_ns))
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")


@contextmanager
def locked(namespace: harness.Namespace, name: str) -> Iterator[psycopg.Connection]:
    """Another program's transaction that has a row locked; committed at the end."""
    with psycopg.connect(namespace.dsn) as conn:
        conn.execute(
            "select from agent_files where agent_id = %s and path = %s for update", (namespace.agent_id, f"/{name}")
        )
        yield conn


def test_what_is_set_is_shown_at_once_and_stored_soon(only: harness.Mount, namespace: harness.Namespace) -> None:
    path = only.path / "f"
    path.write_text("text\n")
    with locked(namespace, "f"):
        os.chmod(path, 0o640)
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
        os.chmod(path, 0o600)
        assert (mode(path), path.stat().st_mtime_ns) == (0o600, LONG_AGO_NS)
        assert stored(namespace, "f")[0] == 0o644
    eventually(lambda: stored(namespace, "f") == (0o600, LONG_AGO_NS), "it is stored")


def test_many_are_stored_by_few_statements(only: harness.Mount, namespace: harness.Namespace) -> None:
    for number in range(200):
        (only.path / f"d{number}").mkdir()
    with only.counting() as count:
        began = time.monotonic()
        for number in range(200):
            os.utime(only.path / f"d{number}", ns=(LONG_AGO_NS, LONG_AGO_NS))
            os.chmod(only.path / f"d{number}", 0o700)
        sync(only.path)
        took = time.monotonic() - began
    assert count.counts.requests["setattr"] == 400
    # One statement for each 5 ms at most, the last one and fsync's own.
    assert count.counts.trips <= took / 0.005 + 3
    assert {stored(namespace, f"d{number}") for number in range(200)} == {(0o700, LONG_AGO_NS)}


@pytest.mark.parametrize("of", ["f", "."])
def test_fsync_waits_for_them(only: harness.Mount, namespace: harness.Namespace, of: str) -> None:
    (only.path / "f").write_text("text\n")
    fd = os.open(only.path / of, os.O_RDONLY)
    with locked(namespace, "f"):
        os.chmod(only.path / "f", 0o600)
        waiting = threading.Thread(target=os.fsync, args=(fd,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(10)
    os.close(fd)
    assert stored(namespace, "f")[0] == 0o600


def test_what_is_written_afterwards_is_newer(only: harness.Mount, namespace: harness.Namespace) -> None:
    path = only.path / "f"
    path.write_text("text\n")
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.chmod(path, 0o600)
    began = time.time_ns()
    with path.open("a") as file:
        file.write("more\n")
    sync(only.path)
    found = stored(namespace, "f")
    assert found[0] == 0o600
    assert found[1] > began - 10**9
    assert path.stat().st_mtime_ns == found[1]


def test_a_rename_over_a_file_takes_them_along(behind: harness.Mount, line: Line, namespace: harness.Namespace) -> None:
    """And what was set of the file that it replaces is not set of the new one, however late it comes."""
    for name in ("new", "old"):
        (behind.path / name).write_text(f"{name}\n")
    os.chmod(behind.path / "new", 0o600)
    os.utime(behind.path / "new", ns=(LONG_AGO_NS, LONG_AGO_NS))
    sync(behind.path)
    send_late(line, behind.path / "old", LONG_AGO_NS - 1)
    os.chmod(behind.path / "old", 0o777)
    moving = threading.Thread(target=os.rename, args=(behind.path / "new", behind.path / "old"))
    moving.start()
    moving.join(0.2)
    line.thaw()
    moving.join(10)
    sync(behind.path)
    assert stored(namespace, "old") == (0o600, LONG_AGO_NS)
    assert (mode(behind.path / "old"), (behind.path / "old").stat().st_mtime_ns) == (0o600, LONG_AGO_NS)


def test_a_moved_file_keeps_them(only: harness.Mount, namespace: harness.Namespace) -> None:
    (only.path / "before").write_text("text\n")
    with locked(namespace, "before"):
        os.chmod(only.path / "before", 0o600)
        moving = threading.Thread(target=os.rename, args=(only.path / "before", only.path / "after"))
        moving.start()
    moving.join(10)
    assert mode(only.path / "after") == 0o600
    sync(only.path)
    assert stored(namespace, "after")[0] == 0o600


def test_a_file_made_anew_has_none_of_them(behind: harness.Mount, line: Line, namespace: harness.Namespace) -> None:
    """It goes on with the lineage that was removed just now, and the statement comes late."""
    path = behind.path / "f"
    path.write_text("text\n")
    send_late(line, path)

    def make_anew() -> None:
        path.unlink()
        path.write_text("text\n")

    making = threading.Thread(target=make_anew)
    making.start()
    making.join(0.2)
    line.thaw()
    making.join(10)
    sync(behind.path)
    assert path.stat().st_mtime_ns == stored(namespace, "f")[1] != LONG_AGO_NS


def test_who_comes_sees_them(
    mount: harness.MountFactory, behind: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    behind.expect_log("slow")
    (behind.path / "f").write_text("text\n")
    send_late(line, behind.path / "f")
    came: list[harness.Mount] = []
    coming = threading.Thread(target=lambda: came.append(mount(session="s-comes")))
    coming.start()
    coming.join(2)
    line.thaw()
    coming.join(30)
    (comes,) = came
    assert (comes.path / "f").stat().st_mtime_ns == LONG_AGO_NS
    # From now on both are told at once.
    os.chmod(behind.path / "f", 0o711)
    assert stored(namespace, "f")[0] == 0o711
    eventually(lambda: mode(comes.path / "f") == 0o711, "it is announced")


def test_what_is_set_after_somebody_came_is_newer(
    mount: harness.MountFactory, behind: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    path = behind.path / "f"
    path.write_text("text\n")
    send_late(line, path)
    os.chmod(path, 0o777)
    coming = threading.Thread(target=mount, kwargs={"session": "s-comes"})
    coming.start()
    eventually(lambda: namespace.only_follower() is None, "the other one comes")
    changing = threading.Thread(target=os.chmod, args=(path, 0o600))
    changing.start()
    changing.join(0.2)
    line.thaw()
    changing.join(10)
    coming.join(30)
    sync(behind.path)
    assert stored(namespace, "f") == (0o600, LONG_AGO_NS)
    assert mode(path) == 0o600


def test_unmount_stores_them(only: harness.Mount, namespace: harness.Namespace) -> None:
    (only.path / "f").write_text("text\n")
    os.chmod(only.path / "f", 0o600)
    only.umount()
    assert stored(namespace, "f")[0] == 0o600


def test_postgres_away(mount: harness.MountFactory, line: Line, namespace: harness.Namespace) -> None:
    only = mount(*TIMEOUT, session="s-only", dsn=line.dsn)
    only.expect_log(LOGGED + r"|mounted\.(later|attributes_wait)")
    (only.path / "f").write_text("text\n")
    line.lose(request=str(LONG_AGO_NS).encode())
    os.utime(only.path / "f", ns=(LONG_AGO_NS, LONG_AGO_NS))
    eventually(lambda: any(each["event"] == "follow.lost" for each in only.log_events()), "Postgres is away")
    line.open()
    eventually(lambda: stored(namespace, "f")[1] == LONG_AGO_NS, "it is stored when Postgres is back")
    assert (only.path / "f").stat().st_mtime_ns == LONG_AGO_NS


def test_a_row_that_another_program_has_locked_holds_up_no_other(
    mount: harness.MountFactory, only: harness.Mount, namespace: harness.Namespace
) -> None:
    for name in ("f", "g", "h"):
        (only.path / name).write_text("text\n")
    with locked(namespace, "f"):
        os.chmod(only.path / "f", 0o600)
        os.chmod(only.path / "g", 0o600)
        eventually(lambda: stored(namespace, "g")[0] == 0o600, "the other is stored")
        os.chmod(only.path / "h", 0o600)
        (only.path / "h").unlink()
        os.chmod(only.path / "g", 0o640)
        (only.path / "g").write_text("more\n")
        comes = mount(session="s-comes")
        assert stored(namespace, "f")[0] == 0o644
    eventually(lambda: stored(namespace, "f")[0] == 0o600, "it is tried again")
    eventually(lambda: mode(comes.path / "f") == 0o600, "and announced, since there is somebody by now")


def test_a_removal_that_fails_undoes_nothing(only: harness.Mount, namespace: harness.Namespace) -> None:
    (only.path / "d").mkdir()
    (only.path / "d" / "x").write_text("")
    os.chmod(only.path / "d", 0o700)
    assert errno_of(lambda: os.rmdir(only.path / "d")) == errno.ENOTEMPTY
    sync(only.path)
    assert stored(namespace, "d")[0] == mode(only.path / "d") == 0o700


def test_a_file_that_is_removed_while_others_are_on_their_way(
    behind: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    """More than one statement takes."""
    names = [behind.path / f"d{number}" for number in range(600)]
    for name in names:
        name.mkdir()
    send_late(line, names[0])
    for name in names:
        os.utime(name, ns=(LONG_AGO_NS + 7, LONG_AGO_NS + 7))
    line.relay.hold_request = str(LONG_AGO_NS + 7).encode()
    line.thaw()
    eventually(lambda: line.relay.hold_request is None, "the next one is")
    removing = threading.Thread(target=os.rmdir, args=(names[-1],))
    removing.start()
    removing.join(0.2)
    line.thaw()
    removing.join(10)
    sync(behind.path)
    assert {stored(namespace, name.name)[1] for name in names[:-1]} == {LONG_AGO_NS + 7}


def test_moves_of_a_directory_in_which_attributes_are_set(only: harness.Mount, namespace: harness.Namespace) -> None:
    found = "select deadlocks from pg_stat_database where datname = current_database()"
    before = namespace.execute(found)
    directory = only.path / "d"
    directory.mkdir()
    for number in range(200):
        (directory / f"f{number}").write_text("")
    for turn in range(24):
        for number in range(200):
            os.chmod(directory / f"f{number}", 0o600 + turn % 8)
        time.sleep(0.0005 * turn)  # so that the move meets the statement at another moment each time
        directory = directory.rename(only.path / f"d{turn}")
    sync(only.path)
    assert {stored(namespace, f"{directory.name}/f{number}")[0] for number in range(200)} == {0o607}
    namespace.execute("select pg_stat_clear_snapshot()")
    assert namespace.execute(found) == before


def test_fsync_while_no_statement_gets_through(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace
) -> None:
    """One attempt fails for all who wait: not each of them waits for the write timeout of each."""
    only = mount(*TIMEOUT, session="s-only", dsn=line.dsn)
    only.expect_log(LOGGED + r"|mounted\.attributes_wait")
    names = [only.path / f"f{number}" for number in range(16)]
    for name in names:
        name.write_text("text\n")
    line.refuse()
    line.cut(Which.STATEMENTS)
    for name in names:
        os.chmod(name, 0o600)
    with ExitStack() as opened:
        files = [opened.enter_context(name.open("rb")) for name in names]
        waiting = [threading.Thread(target=errno_of, args=(partial(os.fsync, file.fileno()),)) for file in files]
        for each in waiting:
            each.start()
        until = time.monotonic() + 4  # 16 write timeouts are 8 s
        for each in waiting:
            each.join(max(0, until - time.monotonic()))
        assert not any(each.is_alive() for each in waiting)
    line.open()
    eventually(lambda: {stored(namespace, name.name)[0] for name in names} == {0o600}, "it is stored later")


@pytest.fixture
def host(mount: harness.MountFactory, line: Line) -> Iterator[harness.Mount]:
    yield from unmounted_while_there_is(line, mount(layout="host", dsn=line.dsn))


@pytest.fixture
def two(host: harness.Mount, namespace: harness.Namespace) -> tuple[Path, Path]:
    """Two sessions of one daemon."""
    agent = host.path / namespace.tenant / namespace.agent
    for name in ("s-a", "s-b"):
        (agent / name).mkdir()
    return agent / "s-a", agent / "s-b"


def test_an_agent_whose_last_session_ends(
    host: harness.Mount, two: tuple[Path, Path], namespace: harness.Namespace
) -> None:
    """It is not forgotten while it holds something."""
    watched = harness.make_namespace(namespace.dsn, tenant=namespace.tenant)
    watching = host.path / watched.tenant / watched.agent / "s-watching"
    watching.mkdir()

    def round_number() -> int:
        found: int = harness.status_at(watching)["background_rounds"]
        return found

    (two[0] / "f").write_text("text\n")
    with locked(namespace, "f"):
        os.chmod(two[0] / "f", 0o600)
        for session in two:
            session.rmdir()
        began = round_number()
        eventually(lambda: round_number() > began + 1, "two rounds of the background")
        two[0].mkdir()
        assert mode(two[0] / "f") == 0o600
    eventually(lambda: stored(namespace, "f")[0] == 0o600, "it is stored")


def test_a_file_that_another_session_moves_over_another(
    host: harness.Mount, two: tuple[Path, Path], line: Line, namespace: harness.Namespace
) -> None:
    a, b = two
    for name in ("the-new-one", "the-old-one"):
        (a / name).write_text(f"{name}\n")
        (b / name).read_text()
    line.relay.hold_answer = b"the-old-one"
    moving = threading.Thread(target=os.rename, args=(a / "the-new-one", a / "the-old-one"))
    moving.start()
    there = "select from agent_files where agent_id = %s and path = '/the-new-one'"
    eventually(lambda: not namespace.execute(there, (namespace.agent_id,)), "it has moved")
    sent = harness.status_at(b)["operations"].get("setattr", 0)
    os.chmod(b / "the-new-one", 0o600)
    eventually(lambda: harness.status_at(b)["operations"].get("setattr", 0) > sent, "the row was not found")
    line.thaw()
    moving.join(10)
    sync(a)
    assert stored(namespace, "the-old-one")[0] == mode(a / "the-old-one") == 0o600


def test_what_is_shown_after_another_session_wrote(
    host: harness.Mount, two: tuple[Path, Path], line: Line, namespace: harness.Namespace
) -> None:
    a, b = two
    (a / "f").write_text("one\n")
    (b / "f").read_text()
    line.relay.hold_answer = b"the-second-text"
    writing = threading.Thread(target=(a / "f").write_text, args=("the-second-text\n",))
    writing.start()
    version = "select version from agent_files where agent_id = %s and path = '/f'"
    eventually(lambda: namespace.execute(version, (namespace.agent_id,)) == [(2,)], "it is written")
    with locked(namespace, "f"):
        os.utime(b / "f", ns=(LONG_AGO_NS, LONG_AGO_NS))
        line.thaw()
        writing.join(10)
        assert (b / "f").stat().st_mtime_ns == LONG_AGO_NS
    sync(b)
    assert stored(namespace, "f")[1] == LONG_AGO_NS


def test_ctime_stays_as_it_was_shown(
    host: harness.Mount, two: tuple[Path, Path], line: Line, namespace: harness.Namespace
) -> None:
    a, b = two
    (a / "f").write_text("text\n")
    send_late(line, a / "f")
    os.chmod(a / "f", 0o600)
    shown = (a / "f").stat().st_ctime_ns
    eventually(lambda: time.time_ns() > shown + 50_000_000, "time has passed")
    line.thaw()
    sync(a)
    assert (b / "f").stat().st_ctime_ns == shown  # the other session asks for the first time


def test_a_directory_that_another_program_changed_before(
    behind: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    """What is announced late does not undo the time that was set since."""
    directory = behind.path / "d"
    directory.mkdir()
    os.listdir(directory)
    line.freeze(Which.LISTENER)
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/d/theirs', '')",
        (namespace.tenant_id, namespace.agent_id),
    )
    with locked(namespace, "d"):
        os.utime(directory, ns=(LONG_AGO_NS, LONG_AGO_NS))
        line.thaw()
        eventually((directory / "theirs").exists, "it is announced")
    sync(behind.path)
    assert stored(namespace, "d")[1] == LONG_AGO_NS


@pytest.mark.parametrize("name", ["f", "d"])
def test_what_another_program_changes_meanwhile_does_not_hide_them(
    behind: harness.Mount, line: Line, namespace: harness.Namespace, name: str
) -> None:
    (behind.path / "f").write_text("text\n")
    (behind.path / "d").mkdir()
    began = time.time_ns() - 10**9
    send_late(line, behind.path / name)
    os.chmod(behind.path / name, 0o700)
    if name == "d":
        (behind.path / "d" / "x").write_text("")  # and the directory's time is now
    namespace.execute(
        "update agent_files set uid = 7, mode = 416, updated_at = clock_timestamp() where agent_id = %s and path = %s",
        (namespace.agent_id, f"/{name}"),
    )
    eventually(lambda: (behind.path / name).stat().st_uid == 7, "it is announced")
    assert mode(behind.path / name) == 0o700
    assert ((behind.path / name).stat().st_mtime_ns > began) == (name == "d")
    line.thaw()
    sync(behind.path)
    assert stored(namespace, name)[0] == mode(behind.path / name) == 0o700


def test_a_row_that_another_program_changed_before_and_that_is_announced_late(
    behind: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    path = behind.path / "f"
    path.write_text("text\n")
    line.freeze(Which.LISTENER)
    namespace.execute(
        "update agent_files set content = E'theirs\n' where path = '/f' and agent_id = %s", (namespace.agent_id,)
    )
    os.chmod(path, 0o600)
    eventually(lambda: stored(namespace, "f")[0] == 0o600, "it is stored")
    line.thaw()
    eventually(lambda: path.read_text() == "theirs\n", "it is announced")
    assert mode(path) == 0o600


@pytest.mark.parametrize("how", ["mode", "content"])
def test_what_another_program_sets_meanwhile(
    behind: harness.Mount, line: Line, namespace: harness.Namespace, how: str
) -> None:
    """After ours, and announced before our answer is here."""
    path = behind.path / "f"
    path.write_text("text\n")
    line.relay.hold_answer = str(LONG_AGO_NS).encode()
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.chmod(path, 0o600)
    eventually(lambda: stored(namespace, "f")[1] == LONG_AGO_NS, "it is stored")
    change = "mode = 416, updated_at = clock_timestamp()" if how == "mode" else "content = E'theirs\\n'"
    namespace.execute(f"update agent_files set {change} where agent_id = %s and path = '/f'", (namespace.agent_id,))
    (behind.path / "barrier").write_text("")
    fd = os.open(behind.path / "barrier", os.O_WRONLY)  # what was announced is in the mirror now
    os.close(fd)
    line.thaw()
    sync(behind.path)
    assert path.read_text() == ("text\n" if how == "mode" else "theirs\n")
    eventually(lambda: (mode(path), path.stat().st_mtime_ns) == stored(namespace, "f"), "both are the same")


def test_a_directory_made_and_dated_by_tar(only: harness.Mount, namespace: harness.Namespace, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(30):
        (tree / f"d{number}").mkdir(parents=True)
        (tree / f"d{number}" / "f").write_text("text\n")
        os.chmod(tree / f"d{number}", 0o750)
        os.utime(tree / f"d{number}", ns=(LONG_AGO_NS, LONG_AGO_NS))
    subprocess.run(["tar", "cf", tmp_path / "t.tar", "-C", tmp_path, "tree"], check=True)
    subprocess.run(["tar", "xf", tmp_path / "t.tar", "-C", only.path, "--no-same-owner"], check=True)
    shown = {(mode(each), each.stat().st_mtime_ns) for each in (only.path / "tree").iterdir()}
    only.umount()
    kept = {stored(namespace, f"tree/d{number}") for number in range(30)}
    assert shown == kept == {(0o750, LONG_AGO_NS // 10**9 * 10**9)}
