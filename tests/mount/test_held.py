"""Attributes that the only mount answers before they are stored: seen at once, stored soon, overtaken by nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.outage import LOGGED, TIMEOUT
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


def test_a_rename_over_a_file_takes_them_along(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace
) -> None:
    """And what was set of the file that it replaces is not set of the new one, however late it comes."""
    only = mount(session="s-only", dsn=line.dsn)
    for name in ("new", "old"):
        (only.path / name).write_text(f"{name}\n")
    os.chmod(only.path / "new", 0o600)
    os.utime(only.path / "new", ns=(LONG_AGO_NS, LONG_AGO_NS))
    sync(only.path)
    line.relay.hold_request = str(LONG_AGO_NS - 1).encode()
    os.utime(only.path / "old", ns=(LONG_AGO_NS - 1, LONG_AGO_NS - 1))
    os.chmod(only.path / "old", 0o777)
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")
    moving = threading.Thread(target=os.rename, args=(only.path / "new", only.path / "old"))
    moving.start()
    moving.join(0.2)
    line.thaw()
    moving.join(10)
    sync(only.path)
    assert stored(namespace, "old") == (0o600, LONG_AGO_NS)
    assert (mode(only.path / "old"), (only.path / "old").stat().st_mtime_ns) == (0o600, LONG_AGO_NS)
    only.umount()  # while there is a line


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


def test_a_file_made_anew_has_none_of_them(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace
) -> None:
    """It goes on with the lineage that was removed just now, and the statement comes late."""
    only = mount(session="s-only", dsn=line.dsn)
    path = only.path / "f"
    path.write_text("text\n")
    line.relay.hold_request = str(LONG_AGO_NS).encode()
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")

    def make_anew() -> None:
        path.unlink()
        path.write_text("text\n")

    making = threading.Thread(target=make_anew)
    making.start()
    making.join(0.2)
    line.thaw()
    making.join(10)
    sync(only.path)
    assert path.stat().st_mtime_ns == stored(namespace, "f")[1] != LONG_AGO_NS
    only.umount()  # while there is a line


def test_who_comes_sees_them(mount: harness.MountFactory, line: Line, namespace: harness.Namespace) -> None:
    only = mount(session="s-only", dsn=line.dsn)
    only.expect_log("slow")
    (only.path / "f").write_text("text\n")
    line.relay.hold_request = str(LONG_AGO_NS).encode()
    os.utime(only.path / "f", ns=(LONG_AGO_NS, LONG_AGO_NS))
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")
    came: list[harness.Mount] = []
    coming = threading.Thread(target=lambda: came.append(mount(session="s-comes")))
    coming.start()
    coming.join(2)
    line.thaw()
    coming.join(30)
    (comes,) = came
    assert (comes.path / "f").stat().st_mtime_ns == LONG_AGO_NS
    # From now on both are told at once.
    os.chmod(only.path / "f", 0o711)
    assert stored(namespace, "f")[0] == 0o711
    eventually(lambda: mode(comes.path / "f") == 0o711, "it is announced")
    only.umount()  # while there is a line


def test_what_is_set_after_somebody_came_is_newer(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace
) -> None:
    only = mount(session="s-only", dsn=line.dsn)
    path = only.path / "f"
    path.write_text("text\n")
    line.relay.hold_request = str(LONG_AGO_NS).encode()
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")
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
    sync(only.path)
    assert stored(namespace, "f") == (0o600, LONG_AGO_NS)
    assert mode(path) == 0o600
    only.umount()  # while there is a line


def test_unmount_stores_them(only: harness.Mount, namespace: harness.Namespace) -> None:
    (only.path / "f").write_text("text\n")
    os.chmod(only.path / "f", 0o600)
    only.umount()
    assert stored(namespace, "f")[0] == 0o600


def test_postgres_away(mount: harness.MountFactory, line: Line, namespace: harness.Namespace) -> None:
    only = mount(*TIMEOUT, session="s-only", dsn=line.dsn)
    only.expect_log(LOGGED + r"|mounted\.later")
    (only.path / "f").write_text("text\n")
    line.lose(request=str(LONG_AGO_NS).encode())
    os.utime(only.path / "f", ns=(LONG_AGO_NS, LONG_AGO_NS))
    eventually(lambda: any(each["event"] == "follow.lost" for each in only.log_events()), "Postgres is away")
    line.open()
    eventually(lambda: stored(namespace, "f")[1] == LONG_AGO_NS, "it is stored when Postgres is back")
    assert (only.path / "f").stat().st_mtime_ns == LONG_AGO_NS


def test_a_row_that_another_program_has_locked_for_long(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    only = mount(session="s-only")
    only.expect_log(r"mounted\.later")
    (only.path / "f").write_text("text\n")
    with locked(namespace, "f"):
        os.chmod(only.path / "f", 0o600)
        waits = (
            "select pg_cancel_backend(pid) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock' and query like %s"
        )
        eventually(lambda: namespace.execute(waits, ("%fusefs_set_attrs_v1%",)), "the statement waits, and is ended")
        eventually(lambda: any(each["event"] == "mounted.later" for each in only.log_events()), "it was tried")
    eventually(lambda: stored(namespace, "f")[0] == 0o600, "it is tried again")


@pytest.mark.parametrize("name", ["f", "d"])
def test_what_another_program_changes_meanwhile_does_not_hide_them(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, name: str
) -> None:
    only = mount(session="s-only", dsn=line.dsn)
    (only.path / "f").write_text("text\n")
    (only.path / "d").mkdir()
    began = time.time_ns() - 10**9
    line.relay.hold_request = str(LONG_AGO_NS).encode()
    os.utime(only.path / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.chmod(only.path / name, 0o700)
    eventually(lambda: line.relay.hold_request is None, "the statement is on its way")
    if name == "d":
        (only.path / "d" / "x").write_text("")  # and the directory's time is now
    namespace.execute(
        "update agent_files set uid = 7, mode = 416, updated_at = clock_timestamp() where agent_id = %s and path = %s",
        (namespace.agent_id, f"/{name}"),
    )
    eventually(lambda: (only.path / name).stat().st_uid == 7, "it is announced")
    assert mode(only.path / name) == 0o700
    assert ((only.path / name).stat().st_mtime_ns > began) == (name == "d")
    line.thaw()
    sync(only.path)
    assert stored(namespace, name)[0] == mode(only.path / name) == 0o700
    only.umount()  # while there is a line


def test_a_row_that_another_program_changed_before_and_that_is_announced_late(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace
) -> None:
    only = mount(session="s-only", dsn=line.dsn)
    path = only.path / "f"
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
    only.umount()  # while there is a line


@pytest.mark.parametrize("how", ["mode", "content"])
def test_what_another_program_sets_meanwhile(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, how: str
) -> None:
    """After ours, and announced before our answer is here."""
    only = mount(session="s-only", dsn=line.dsn)
    path = only.path / "f"
    path.write_text("text\n")
    line.relay.hold_answer = str(LONG_AGO_NS).encode()
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.chmod(path, 0o600)
    eventually(lambda: stored(namespace, "f")[1] == LONG_AGO_NS, "it is stored")
    change = "mode = 416, updated_at = clock_timestamp()" if how == "mode" else "content = E'theirs\\n'"
    namespace.execute(f"update agent_files set {change} where agent_id = %s and path = '/f'", (namespace.agent_id,))
    (only.path / "barrier").write_text("")
    fd = os.open(only.path / "barrier", os.O_WRONLY)  # what was announced is in the mirror now
    os.close(fd)
    line.thaw()
    sync(only.path)
    assert path.read_text() == ("text\n" if how == "mode" else "theirs\n")
    eventually(lambda: (mode(path), path.stat().st_mtime_ns) == stored(namespace, "f"), "both are the same")
    only.umount()  # while there is a line


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
