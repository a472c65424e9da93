"""Answers and announcements come by several connections, each in its own order: every order of the two that can be.

One session's daemon is behind a relay that holds up answers, or announcements, until the other session has done its
part.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.mount.test_walks import tree
from tests.relay import Line, Which


@pytest.fixture
def behind(mount: harness.MountFactory, line: Line) -> Path:
    found = mount(session="behind", dsn=line.dsn)
    found.expect_log("stale|refused")
    return found.path


@pytest.fixture
def other(mount: harness.MountFactory, behind: Path) -> Path:
    return mount(session="other").path


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.failed = -1
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        self.failed = errno_of(call)

    def join(self) -> int:
        """Its errno, 0 for success."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the call hangs"
        return self.failed


@pytest.fixture
def held(line: Line) -> Iterator[Callable[[bytes, Callable[[], object]], Call]]:
    """Make a call whose statement's answer is held until the line thaws."""

    def hold(marker: bytes, call: Callable[[], object]) -> Call:
        line.relay.hold_answer = marker
        made = Call(call)
        eventually(lambda: line.relay.hold_answer is None, "the statement has been sent")
        return made

    yield hold
    line.thaw()


def both_see(behind: Path, other: Path, name: str, text: bytes) -> None:
    for side in (behind, other):
        eventually(lambda side=side: (side / name).read_bytes() == text, f"{name} in {side}")


def test_source_whose_change_is_announced_after_the_rename_does_not_come_back(
    behind: Path, other: Path, line: Line
) -> None:
    (other / "new").write_bytes(b"one")
    (other / "f").write_bytes(b"old")
    both_see(behind, other, "new", b"one")
    both_see(behind, other, "f", b"old")
    line.freeze(Which.LISTENER)
    (other / "new").write_bytes(b"two")
    os.rename(behind / "new", behind / "f")
    line.thaw()
    (other / "mark").write_bytes(b"")
    eventually((behind / "mark").exists, "later announcements")
    assert {"new", "f", "mark"} & {*os.listdir(behind)} == {"f", "mark"}
    assert not (behind / "new").exists()
    both_see(behind, other, "f", b"two")


def test_listing_from_before_a_rename_that_was_announced_meanwhile(
    behind: Path, other: Path, line: Line, held: Callable[[bytes, Callable[[], object]], Call]
) -> None:
    (other / "d").mkdir()
    (other / "d" / "new").write_bytes(b"new")
    (other / "d" / "f").write_bytes(b"old")
    eventually((behind / "d").exists, "the directory")
    listing = held(b"load_directory", lambda: os.listdir(behind / "d"))
    os.rename(other / "d" / "new", other / "d" / "f")
    (other / "mark").write_bytes(b"")
    eventually((behind / "mark").exists, "the rename was announced before")
    line.thaw()
    assert listing.join() == 0
    assert os.listdir(behind / "d") == ["f"]
    assert not (behind / "d" / "new").exists()
    assert (behind / "d" / "f").read_bytes() == b"new"


def test_file_made_while_a_listing_from_before_was_on_its_way(
    behind: Path, other: Path, line: Line, held: Callable[[bytes, Callable[[], object]], Call]
) -> None:
    for name in ("d", "e"):
        (other / name).mkdir()
    (other / "e" / "f").write_bytes(b"f")
    eventually((behind / "d").exists, "the directory")
    fd = os.open(behind / "d" / "new", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"text")
    os.rename(other / "e" / "f", other / "d" / "f")  # of a file that this mount does not know: it must list again
    (other / "mark").write_bytes(b"")
    eventually((behind / "mark").exists, "the rename was announced")
    listing = held(b"load_directory", lambda: os.listdir(behind / "d"))
    os.close(fd)
    line.thaw()
    assert listing.join() == 0
    assert sorted(os.listdir(behind / "d")) == ["f", "new"]
    assert (behind / "d" / "new").read_bytes() == b"text"


def test_what_changes_while_it_is_loaded_ahead(
    behind: Path, other: Path, line: Line, held: Callable[[bytes, Callable[[], object]], Call]
) -> None:
    for name in "abcdefgh":
        (other / name).mkdir()
        for file in ("kept", "gone", "moved", "over", "new-over"):
            (other / name / file).write_text(name)
    eventually((behind / "h").exists, "the directories")
    os.listdir(behind / "a")
    os.listdir(behind / "b")
    listing = held(b"load_directories", lambda: os.listdir(behind / "c"))
    (other / "d" / "gone").unlink()
    (other / "d" / "made").write_text("made")
    os.rename(other / "d" / "moved", other / "e" / "came")
    os.rename(other / "e" / "new-over", other / "e" / "over")
    os.rename(other / "f", other / "f2")
    (other / "f2" / "made").write_text("made")
    subprocess.run(["rm", "-r", other / "g"], check=True)
    (other / "g").mkdir()
    (other / "g" / "again").write_text("again")
    (other / "mark").write_bytes(b"")
    eventually((behind / "mark").exists, "all of it was announced")
    line.thaw()
    assert listing.join() == 0
    assert tree(behind) == tree(other)
    assert (behind / "e" / "over").read_text() == "e"
    assert not (behind / "d" / "gone").exists()


def test_redirection_to_a_name_that_others_took_away_and_made_anew(behind: Path, other: Path, line: Line) -> None:
    """A shell does not look at what close answers: it has to hear of it at the open, which waits for the
    announcement."""
    (other / "f").write_bytes(b"one")
    eventually(lambda: (behind / "f").read_bytes() == b"one", "the file")
    (other / "f").unlink()
    eventually(lambda: not (behind / "f").exists(), "its removal")
    line.freeze(Which.LISTENER)
    (other / "f").write_bytes(b"anew")
    eventually(lambda: line.relay.held == 1, "the announcement is held")
    with subprocess.Popen(["bash", "-c", "echo mine > f"], cwd=behind, stderr=subprocess.PIPE) as shell:
        try:
            eventually(lambda: line.relay.held == 2, "the open waits")
        finally:
            line.thaw()
        assert shell.wait(30) == 1
    assert (other / "f").read_bytes() == b"anew"


def test_commit_that_is_answered_after_others_renamed_the_file(
    behind: Path, other: Path, line: Line, held: Callable[[bytes, Callable[[], object]], Call]
) -> None:
    """Its version was one of the lineage that went, and says nothing of the one in which the file goes on."""
    (other / "f").write_bytes(b"old")
    both_see(behind, other, "f", b"old")
    for number in range(4):
        (behind / "new").write_bytes(b"%d" % number)
    committing = held(b"commit_write", lambda: (behind / "new").write_bytes(b"fifth"))
    eventually(lambda: (other / "new").read_bytes() == b"fifth", "it is committed")
    assert (other / "new").read_bytes() == b"fifth"  # through a descriptor from after the change
    os.rename(other / "new", other / "f")
    (other / "mark").write_bytes(b"")
    eventually((behind / "mark").exists, "the rename was announced before")
    line.thaw()
    assert committing.join() == 0
    for number in range(3):
        (other / "f").write_bytes(b"theirs %d" % number)
    (other / "mark2").write_bytes(b"")
    eventually((behind / "mark2").exists, "what the other session wrote")
    assert errno_of(lambda: (behind / "f").write_bytes(b"mine")) != 0, "it has not seen version 5 of this file"
    assert (behind / "f").read_bytes() == b"theirs 2"
    (behind / "f").write_bytes(b"mine")
    both_see(behind, other, "f", b"mine")


def test_rename_of_a_file_that_another_session_of_the_daemon_replaced_meanwhile(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    """The second move waits for a lock in Postgres, and moves what the first has put at the name since it was asked."""
    host = mount(layout="host")
    one, two = (host.path / namespace.tenant / namespace.agent / name for name in ("s-1", "s-2"))
    for folder in (one, two):
        folder.mkdir()
    (one / "d").mkdir()
    (one / "d" / "f").write_bytes(b"old")
    (one / "a").write_bytes(b"first")
    (one / "spare").write_bytes(b"second")
    assert (two / "a").read_bytes() == b"first" and (two / "d" / "f").read_bytes() == b"old"
    with psycopg.connect(namespace.dsn) as holder, psycopg.connect(namespace.dsn, autocommit=True) as watcher:
        holder.execute("select from agent_files where path = '/d' for update")
        moving = Call(lambda: os.rename(two / "a", two / "d" / "f"))
        query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        eventually(lambda: (watcher.execute(query).fetchone() or (0,))[0], "the move waits")
        os.rename(one / "spare", one / "a")
        holder.commit()
    assert moving.join() == 0
    for side in (one, two):
        eventually(lambda side=side: not (side / "a").exists(), "the name has gone")
        assert "a" not in os.listdir(side)
        assert (side / "d" / "f").read_bytes() == b"second"


def test_rename_that_is_answered_after_the_next_one(
    mount: harness.MountFactory,
    namespace: harness.Namespace,
    line: Line,
    held: Callable[[bytes, Callable[[], object]], Call],
) -> None:
    """Both are of one daemon. The second moves what the first has put there, and is answered first."""
    host = mount(layout="host", dsn=line.dsn)
    one, two = (host.path / namespace.tenant / namespace.agent / name for name in ("s-1", "s-2"))
    for folder in (one, two):
        folder.mkdir()
    (one / "d").mkdir()
    (one / "a").write_bytes(b"first")
    (one / "spare").write_bytes(b"second")
    assert (two / "a").read_bytes() == b"first" and os.listdir(two / "d") == []
    replacing = held(b"rename_node", lambda: os.rename(one / "spare", one / "a"))
    with psycopg.connect(namespace.dsn, autocommit=True) as watcher:
        query = "select count(*) from agent_files where path = '/spare'"
        eventually(lambda: watcher.execute(query).fetchone() == (0,), "the first is done")
    os.rename(two / "a", two / "d" / "f")
    line.thaw()
    assert replacing.join() == 0
    for side in (one, two):
        eventually(lambda side=side: not (side / "a").exists(), "the name has gone")
        assert "a" not in os.listdir(side)
        eventually(lambda side=side: (side / "d" / "f").read_bytes() == b"second", "what moved")


def test_two_look_ups_in_a_directory_below_one_that_is_being_listed(
    behind: Path, other: Path, line: Line, held: Callable[[bytes, Callable[[], object]], Call]
) -> None:
    """Both wait for the listing above; one of them lists, and the other waits for it."""
    (other / "e" / "d").mkdir(parents=True)
    for name in ("f", "g"):
        (other / "e" / "d" / name).write_bytes(b"text")
    eventually((behind / "e" / "d").exists, "the directory")
    inside = os.open(behind / "e" / "d", os.O_RDONLY | os.O_DIRECTORY)
    for number in range(3):
        reconnects = harness.status_at(behind)["listener_reconnects"]
        line.cut(Which.LISTENER)

        def again(before: int = reconnects) -> bool:
            status = harness.status_at(behind)
            return bool(status["live"]) and status["listener_reconnects"] > before

        eventually(again, "announcements are back, and every directory is to be listed again")
        first = held(b"load_directory", lambda: os.stat("f", dir_fd=inside))
        asked = harness.status_at(behind)["requests"]["lookup"]
        second = Call(lambda: os.stat("g", dir_fd=inside))
        eventually(lambda asked=asked: harness.status_at(behind)["requests"]["lookup"] > asked + 1, "it asks, too")
        line.thaw()
        assert (first.join(), second.join()) == (0, 0), f"round {number}"
    os.close(inside)
