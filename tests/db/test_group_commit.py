"""Group commit: who shares a transaction with whom, and that nobody depends on another."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psycopg
import pytest
import trio
import trio.testing

from fusefs.db import group_commit
from fusefs.db.group_commit import Attempt
from fusefs.db.pool import Database, open_database
from fusefs.db.queries import Query
from fusefs.rules.errors import Exists
from tests.db.conftest import execute, wait_active
from tests.db.test_pool import FIND, INSERT, PID, SLOW_INSERT
from tests.relay import open_relay

SLOWER_INSERT = Query("insert_slower", SLOW_INSERT.text.replace("4711", "4712"))


class Note:
    """One write, and what became of it."""

    def __init__(self, db: Database, path: str, *, query: Query = INSERT, content: str = "c") -> None:
        self.db = db
        self.path = path
        self.query = query
        self.content = content
        self.attempt = Attempt(uuid.uuid4().hex)
        self.confirms: list[bool] = []
        self.rows: list[tuple[object, ...]] | None = None
        self.scope = trio.CancelScope()

    async def write(self, tenant: str = "t1") -> None:
        with self.scope:
            params = (self.attempt.write_id, self.content)
            self.rows = await self.db.write(tenant, self.query, params, self._confirm, self.attempt, ("a1", self.path))

    async def _confirm(self) -> list[tuple[object, ...]] | None:
        rows = await self.db.run("t1", FIND, self.attempt.write_id)
        self.confirms.append(bool(rows))
        return rows or None

    @property
    def applied(self) -> bool:
        return self.rows == [(self.attempt.write_id, self.content)] and self.attempt.backend is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in line waits until what is under way is back."""
    monkeypatch.setattr(group_commit, "_PATIENCE_MS", 60_000)


@contextmanager
def held(dsn: str, lock: int) -> Iterator[None]:
    """A lock that a write waits for."""
    with psycopg.connect(dsn, autocommit=True) as holder:
        holder.execute("select pg_advisory_lock(%s)", (lock,))
        yield


@asynccontextmanager
async def behind_one(db: Database, plain: str, *notes: Note) -> AsyncIterator[trio.Nursery]:
    """Writes that wait in line, in this order, behind one that is under way. Leaving the block lets that one go on."""
    first = Note(db, "/first", query=SLOW_INSERT)
    ((pid,),) = await db.run("t1", PID)
    async with trio.open_nursery() as nursery:
        with held(plain, 4711):
            nursery.start_soon(first.write)
            await wait_active(plain, pid)
            for note in notes:
                nursery.start_soon(note.write)
                await trio.testing.wait_all_tasks_blocked()
            yield nursery
    assert first.applied


def stored(plain: str) -> list[object]:
    """What is there besides the first one, in the order in which it came."""
    return [row[0] for row in execute(plain, "select write_id from notes order by ctid offset 1")]


@pytest.mark.usefixtures("patient")
async def test_those_in_line_share_one_trip_and_one_transaction(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        notes = [Note(db, path) for path in ("/c", "/a", "/d", "/b")]
        before = db.trips
        async with behind_one(db, plain, *notes):
            asked = db.trips - before
        assert db.trips - before == asked + 1
    assert all(note.applied for note in notes)
    assert execute(plain, "select count(*), count(distinct xmin::text) from notes") == [(5, 2)]
    # In the order of their paths, so that two programs do not wait for each other.
    assert stored(plain) == [note.attempt.write_id for note in sorted(notes, key=lambda note: note.path)]
    assert execute(plain, "select distinct tenant from notes") == [("t1",)]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("count", "size", "shares"), [(40, 1, [1, 16, 16, 8]), (6, 60_000, [1, 4, 2])], ids=["many", "large"]
)
async def test_more_than_one_transaction_may_hold(plain: str, count: int, size: int, shares: list[int]) -> None:
    async with open_database(plain, origin="o") as db:
        notes = [Note(db, f"/{number:02}", content="x" * size) for number in range(count)]
        async with behind_one(db, plain, *notes):
            pass
    assert all(note.applied for note in notes)
    found = execute(plain, "select count(*) from notes group by xmin::text order by min(ctid)")
    assert [share for (share,) in found] == shares


@pytest.mark.usefixtures("patient")
async def test_one_that_is_refused_does_not_take_the_others_along(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        notes = [Note(db, "/a"), Note(db, "/c")]
        twice = Note(db, "/b")
        execute(plain, "insert into notes (write_id, content) values (%s, 'theirs')", twice.attempt.write_id)
        refused = trio.Event()

        async def refuse() -> None:
            with pytest.raises(Exists):
                await twice.write()
            refused.set()

        async with behind_one(db, plain, *notes) as nursery:
            nursery.start_soon(refuse)
            await trio.testing.wait_all_tasks_blocked()
    assert refused.is_set()
    assert twice.attempt.backend is None
    assert twice.confirms == []
    assert all(note.applied for note in notes)


@pytest.mark.usefixtures("patient")
async def test_one_that_waits_for_a_lock_does_not_hold_up_the_others(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        notes = [Note(db, "/a"), Note(db, "/c")]
        slow = Note(db, "/b", query=SLOWER_INSERT)
        async with trio.open_nursery() as nursery:
            with held(plain, 4712):
                async with behind_one(db, plain, *notes):
                    nursery.start_soon(slow.write)
                    await trio.testing.wait_all_tasks_blocked()
                assert all(note.applied for note in notes)
                assert slow.rows is None
        assert slow.applied


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("answered", [False, True], ids=["request lost", "answer lost"])
async def test_a_shared_transaction_that_is_lost_on_its_way(plain: str, answered: bool) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        notes = [Note(db, "/a"), Note(db, "/b"), Note(db, "/c")]
        async with behind_one(db, plain, *notes):
            if answered:
                relay.lose_answer = b"set_impatient"
            else:
                relay.lose_request = b"set_impatient"
    assert all(note.applied for note in notes)
    assert [note.confirms for note in notes] == [[answered]] * 3
    assert sorted(stored(plain), key=str) == sorted(note.attempt.write_id for note in notes)


async def test_nobody_waits_in_line_for_what_is_stuck(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_database(plain, origin="o") as db:
        async with behind_one(db, plain):
            note = Note(db, "/a")
            await note.write()
            assert note.applied
            # One has waited, and led from then on. Nobody else has to.
            monkeypatch.setattr(group_commit, "_PATIENCE_MS", 60_000)
            for note in (Note(db, "/b"), Note(db, "/c")):
                await note.write()
                assert note.applied


@pytest.mark.usefixtures("patient")
async def test_the_lock_of_notify_is_waited_for(plain: str) -> None:
    """The commit takes it; so what a deferred trigger finds there holds for it."""
    execute(plain, "create table found (lock_timeout text)")
    execute(plain, "grant insert on found to fusefs_daemon")
    execute(
        plain,
        "create function look() returns trigger language plpgsql as $$ begin"
        " insert into found values (current_setting('lock_timeout')); return null; end $$",
    )
    execute(
        plain,
        "create constraint trigger look after insert on notes deferrable initially deferred"
        " for each row execute function look()",
    )
    try:
        async with open_database(plain, origin="o") as db:
            notes = [Note(db, "/a"), Note(db, "/b")]
            async with behind_one(db, plain, *notes):
                pass
        assert all(note.applied for note in notes)
        assert execute(plain, "select lock_timeout, count(*) from found group by 1") == [("0", 3)]
        assert execute(plain, "select count(distinct xmin::text) from notes") == [(2,)]
    finally:
        execute(plain, "drop trigger look on notes")
        execute(plain, "drop function look()")
        execute(plain, "drop table found")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("why", ["not announced", "large", "another tenant"])
async def test_who_does_not_wait_in_line(plain: str, why: str) -> None:
    async with open_database(plain, origin="o") as db:
        note = Note(db, "/a", content="x" * 70_000 if why == "large" else "c")
        note.attempt.announced = why != "not announced"
        async with behind_one(db, plain):
            await note.write("t2" if why == "another tenant" else "t1")
            assert note.applied


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("quick_s", "shares"), [(60.0, [1, 1, 2]), (0.0, [1, 1, 1, 1])], ids=["quick", "slow"])
async def test_what_is_not_announced_waits_where_the_server_is_quick(
    plain: str, monkeypatch: pytest.MonkeyPatch, quick_s: float, shares: list[int]
) -> None:
    monkeypatch.setattr(group_commit, "_QUICK_S", quick_s)
    async with open_database(plain, origin="o") as db:
        await Note(db, "/before").write()
        notes = [Note(db, "/a"), Note(db, "/b")]
        for note in notes:
            note.attempt.announced = False
        async with behind_one(db, plain, *notes):
            if not quick_s:
                while not all(note.applied for note in notes):
                    await trio.lowlevel.checkpoint()
    assert all(note.applied for note in notes)
    found = execute(plain, "select count(*) from notes group by xmin::text order by 1")
    assert [share for (share,) in found] == shares


async def test_how_quick_commits_are(autojump_clock: trio.testing.MockClock) -> None:
    pace = group_commit.Pace()

    async def commit(seconds: float, *, fails: bool = False) -> None:
        began = pace.begin()
        await trio.sleep(seconds)
        pace.end(began, [] if fails else [()])

    assert not pace.quick
    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit, 0.002)
        await trio.testing.wait_all_tasks_blocked()
        await commit(0.0005)  # beside another: it may have had its flush
    assert not pace.quick
    await commit(0.0001, fails=True)
    assert not pace.quick
    await commit(0.0005)
    assert pace.quick
    for _ in range(20):
        await commit(0.002)
    assert pace.quick  # one that is slow now and then does not count
    for _ in range(20):
        await commit(0.002)
    assert not pace.quick


@pytest.mark.usefixtures("patient")
async def test_cancelled_in_line(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        notes = [Note(db, "/a"), Note(db, "/b"), Note(db, "/c")]
        async with behind_one(db, plain, *notes):
            for note in notes[:2]:
                note.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
    assert [note.applied for note in notes] == [False, False, True]
    assert [note.attempt.backend for note in notes] == [None, None, None]
    assert stored(plain) == [notes[2].attempt.write_id]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("who", ["leader", "taken along", "all"])
async def test_cancelled_while_the_shared_transaction_is_under_way(plain: str, who: str) -> None:
    """Whoever was taken along waits to know what becomes of it. Where the leader goes, the others find out."""
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        notes = [Note(db, "/a"), Note(db, "/b"), Note(db, "/c")]
        async with trio.open_nursery() as nursery:
            async with behind_one(db, plain, *notes):
                relay.hold_answer = b"set_impatient"

                @nursery.start_soon
                async def cancel() -> None:
                    while not relay.held:
                        await trio.lowlevel.checkpoint()
                    for note in {"leader": notes[:1], "taken along": notes[1:], "all": notes}[who]:
                        note.scope.cancel()
                    await trio.testing.wait_all_tasks_blocked()
                    relay.thaw()

    assert [note.applied for note in notes] == {
        "leader": [False, True, True],
        "taken along": [True, True, True],
        "all": [False, False, False],
    }[who]
    for note in notes:
        assert note.applied or note.attempt.backend is not None  # it may have been applied
    assert sorted(stored(plain), key=str) == sorted(note.attempt.write_id for note in notes)
