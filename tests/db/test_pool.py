"""The pool: who gets a connection, what is repeated, and that a write happens exactly once."""

from __future__ import annotations

import uuid

import psycopg
import pytest
import trio
import trio.testing

from fusefs.db.failures import LostInFlight, NotConnected, Retryable
from fusefs.db.pool import Database, flow, open_database
from fusefs.db.queries import Query
from fusefs.rules.errors import Exists, FsError, NotFound, Unavailable
from tests.db.conftest import execute, wait_active
from tests.relay import Relay, open_relay

PID = Query("ask_pid", "select pg_backend_pid()")
SLEEP = Query("sleep_long", "select pg_sleep($1::float8)")
REFUSE = Query("refuse_it", "select refuse($1, 'x')")
INSERT = Query("insert_note", "insert into notes (write_id, content) values ($1, $2) returning write_id, content")
FIND = Query("find_note", "select write_id, content from notes where write_id = $1")
# Waits inside the statement, so that the connection can be lost there; then it would go on and insert.
SLOW_INSERT = Query(
    "insert_slowly",
    "with waited as materialized (select pg_advisory_xact_lock(4711))"
    " insert into notes (write_id, content) select $1, $2 from waited returning write_id, content",
)


class Writer:
    """One write with its confirmation, counted."""

    def __init__(self, db: Database, query: Query = INSERT) -> None:
        self.db = db
        self.query = query
        self.write_id = uuid.uuid4().hex
        self.confirms: list[bool] = []

    async def write(self) -> list[tuple[object, ...]]:
        return await self.db.write("t1", self.query, (self.write_id, "c"), self._confirm)

    async def _confirm(self) -> list[tuple[object, ...]] | None:
        rows = await self.db.run("t1", FIND, self.write_id)
        self.confirms.append(bool(rows))
        return rows or None

    @property
    def expected(self) -> list[tuple[object, ...]]:
        return [(self.write_id, "c")]


def notes(dsn: str) -> list[tuple[object, ...]]:
    return execute(dsn, "select write_id, tenant from notes order by write_id")


async def test_one_connection_serves_one_task_after_the_other(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        first = await db.run(None, PID)
        assert [await db.run(None, PID) for _ in range(3)] == [first] * 3
        found = db.statistics()
        assert (found.open, found.idle, found.waiting, found.trips, found.reconnects) == (1, 1, 0, 4, 0)
        assert db.trips == 4


@pytest.mark.parametrize(("relaxed", "found"), [(False, "on"), (True, "off")])
async def test_commits_of_a_relaxed_pool_do_not_wait_for_the_disk(plain: str, relaxed: bool, found: str) -> None:
    setting = Query("setting", "select current_setting('synchronous_commit')")
    async with open_database(plain, origin="o", size=1, relaxed=relaxed) as db:
        assert await db.run(None, setting) == [(found,)]
        await db.sync()
        assert await db.run(None, setting) == [(found,)]


async def test_first_come_first_served(plain: str) -> None:
    order: list[int] = []
    async with open_database(plain, origin="o", size=1) as db, trio.open_nursery() as nursery:

        async def ask(number: int) -> None:
            await db.run(None, PID)
            order.append(number)

        async with db.transaction(None) as held:
            await held.run(PID)
            for number in range(6):
                nursery.start_soon(ask, number)
                await trio.testing.wait_all_tasks_blocked()
            assert db.statistics().waiting == 6
    assert order == list(range(6))


async def test_flows_take_turns(plain: str) -> None:
    """One that floods the pool delays another by one statement, not by its queue."""
    order: list[int] = []

    async def ask(db: Database, of: int) -> None:
        flow.set(of)
        await db.run(None, PID)
        order.append(of)

    async with open_database(plain, origin="o", size=1) as db, trio.open_nursery() as nursery:
        async with db.transaction(None) as tx:
            await tx.run(PID)
            for of in [1] * 20 + [2, 3, 2]:
                nursery.start_soon(ask, db, of)
            await trio.testing.wait_all_tasks_blocked()
            assert db.statistics().waiting == 23
    assert sorted(order[:3]) == [1, 2, 3]
    assert order.index(2) < 3 and order[:6].count(2) == 2
    assert order.count(1) == 20


async def test_never_more_connections_than_size(plain: str) -> None:
    name = f"app_{uuid.uuid4().hex[:8]}"
    seen: set[int] = set()
    async with open_database(f"{plain} application_name={name}", origin="o", size=2) as db:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                ((pid,),) = await db.run(None, Query("sleep_shortly", "select pg_backend_pid() from pg_sleep(0.02)"))
                seen.add(pid)

            for _ in range(8):
                nursery.start_soon(ask)
        assert db.statistics().open == len(seen) == 2
        assert execute(plain, "select count(*) from pg_stat_activity where application_name = %s", name) == [(2,)]


async def test_a_waiting_task_that_is_cancelled_takes_nothing(plain: str) -> None:
    async with open_database(plain, origin="o", size=1) as db:
        async with db.transaction(None) as tx:
            await tx.run(PID)
            with trio.move_on_after(0.02) as scope:
                await db.run(None, PID)
            assert scope.cancelled_caught
            assert db.statistics().waiting == 0
        await db.run(None, PID)
        assert db.statistics().idle == 1


async def test_a_cancelled_statement_gives_its_place_to_the_next(plain: str) -> None:
    async with open_database(plain, origin="o", size=1) as db:
        ((before,),) = await db.run(None, PID)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cancelled() -> None:
                with trio.move_on_after(0.1):
                    await db.run(None, SLEEP, 30.0)

            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(5):
                ((after,),) = await db.run(None, PID)
        assert after != before
        assert db.statistics().open == 1


async def test_a_read_is_repeated_after_its_connection_was_lost(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        ((before,),) = await db.run(None, PID)
        relay.lose_answer = b"ask_pid"
        ((after,),) = await db.run(None, PID)
        assert after != before
        assert db.statistics().reconnects == 1
        assert db.trips == 3


@pytest.mark.parametrize("part", ["lose_request", "lose_answer"])
async def test_a_connection_lost_at_the_end_of_its_set_up(plain: str, part: str) -> None:
    """libpq tells this as a failed PREPARE; it is no more than a server that does not answer."""
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o", size=2) as db:
        async with db.transaction(None) as held:
            await held.run(PID)
            setattr(relay, part, b"fusefs_set_tenant")
            writer = Writer(db)
            assert await writer.write() == writer.expected
        assert writer.confirms == []


async def test_dead_idle_connections_are_replaced_without_a_repetition(plain: str) -> None:
    async with open_database(plain, origin="o", size=3) as db:
        async with db.transaction(None) as one, db.transaction(None) as two:
            ((pid_one,),) = await one.run(PID)
            ((pid_two,),) = await two.run(PID)
        for pid in (pid_one, pid_two):
            execute(plain, "select pg_terminate_backend(%s, 5000)", pid)
        writer = Writer(db)
        assert await writer.write() == writer.expected
        assert writer.confirms == [], "nothing was lost in flight"
        assert db.statistics().open == 1
    assert len(notes(plain)) == 1


async def test_postgres_comes_back_within_the_timeout(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        await relay.shut()
        results = []
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                results.append(await db.run(None, FIND, "none"))

            async def write() -> None:
                writer = Writer(db)
                results.append(await writer.write())

            async def transact() -> None:
                async with db.transaction(None) as tx:
                    results.append(await tx.run(FIND, "none"))

            for task in (read, write, transact):
                nursery.start_soon(task)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert results == []
            await relay.open()
        assert len(results) == 3


async def test_postgres_stays_away(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o", write_timeout_s=0.3) as db:
        await relay.shut()
        writer = Writer(db)
        started = trio.current_time()
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
            await db.run(None, PID)
        with pytest.raises(Unavailable):
            await writer.write()
        with pytest.raises(Unavailable):
            async with db.transaction(None):
                raise AssertionError("there is no connection")
        assert trio.current_time() - started < 5
        assert writer.confirms == []
        await relay.open()
        assert await writer.write() == writer.expected


async def test_write_lost_before_it_arrived(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        writer = Writer(db)
        relay.lose_request = b"insert_note"
        assert await writer.write() == writer.expected
        assert writer.confirms == [False]
    assert notes(plain) == [(writer.write_id, "t1")]


async def test_write_whose_answer_was_lost(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        writer = Writer(db)
        relay.lose_answer = b"insert_note"
        assert await writer.write() == writer.expected
        assert writer.confirms == [True]
    assert notes(plain) == [(writer.write_id, "t1")]


async def test_write_lost_inside_the_statement(plain: str) -> None:
    """The old backend still waits inside the statement and would insert later: it is ended before anything
    is asked, so that the repetition is the only one."""
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        writer = Writer(db, SLOW_INSERT)
        ((old_pid,),) = await db.run("t1", PID)
        with psycopg.connect(plain, autocommit=True) as holder:
            holder.execute("select pg_advisory_lock(4711)")
            async with trio.open_nursery() as nursery:
                found = []

                @nursery.start_soon
                async def write() -> None:
                    found.append(await writer.write())

                await wait_active(plain, old_pid)
                relay.cut()
                await wait_gone(plain, old_pid)
                assert notes(plain) == []
                holder.execute("select pg_advisory_unlock(4711)")
        assert found == [writer.expected]
        assert writer.confirms == [False]
    assert notes(plain) == [(writer.write_id, "t1")]


async def test_write_that_takes_too_long_is_not_applied_later(plain: str) -> None:
    """After the timeout the caller keeps the bytes elsewhere: a late application would make two of it."""
    async with open_database(plain, origin="o", write_timeout_s=0.3) as db:
        writer = Writer(db, SLOW_INSERT)
        ((old_pid,),) = await db.run("t1", PID)
        with psycopg.connect(plain, autocommit=True) as holder:
            holder.execute("select pg_advisory_lock(4711)")
            with pytest.raises(Unavailable, match="was not applied") as caught:
                await writer.write()
            assert not isinstance(caught.value, LostInFlight)
            assert writer.confirms == [False]
            await wait_gone(plain, old_pid)
    assert notes(plain) == []


async def test_write_whose_outcome_cannot_be_found_out(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o", write_timeout_s=0.2) as db:
        writer = Writer(db)
        relay.lose_answer = b"insert_note"
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def shut() -> None:
                await relay.cut_happened.wait()
                await relay.shut()

            with pytest.raises(LostInFlight):
                await writer.write()
        assert writer.confirms == []
    assert len(notes(plain)) == 1


async def test_repetition_that_meets_its_own_first_application(plain: str) -> None:
    """Where the first look found nothing and the row is there after all, the unique index says so."""
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        writer = Writer(db)
        answers: list[list[tuple[object, ...]] | None] = [None, writer.expected]

        async def confirm() -> list[tuple[object, ...]] | None:
            return answers.pop(0)

        relay.lose_answer = b"insert_note"
        assert await db.write("t1", INSERT, (writer.write_id, "c"), confirm) == writer.expected
        assert answers == []
    assert len(notes(plain)) == 1


async def test_a_name_that_exists_is_no_success(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        writer = Writer(db)
        await writer.write()
        with pytest.raises(Exists):
            await writer.write()
        assert writer.confirms == []


async def test_hundred_writes_over_a_bad_line(plain: str) -> None:
    """Cut at random times by many tasks at once; each write is there once."""
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o", size=4) as db:
        writers = [Writer(db) for _ in range(100)]
        async with trio.open_nursery() as nursery:

            async def work(mine: list[Writer]) -> None:
                for writer in mine:
                    assert await writer.write() == writer.expected

            for start in range(5):
                nursery.start_soon(work, writers[start::5])
            nursery.start_soon(disturb, relay)
        assert db.statistics().reconnects > 0
    assert [write_id for write_id, _ in notes(plain)] == sorted(writer.write_id for writer in writers)


async def disturb(relay: Relay) -> None:
    for round_number in range(12):
        relay.cut_happened = trio.Event()
        if round_number % 2:
            relay.lose_answer = b"insert_note"
        else:
            relay.lose_request = b"insert_note"
        with trio.move_on_after(2):
            await relay.cut_happened.wait()


async def test_deadlocks_are_repeated(plain: str) -> None:
    """Two statements that lock two rows in opposite orders; the server ends one, and it is sent again."""
    execute(plain, "alter system set deadlock_timeout = '50ms'")
    execute(plain, "select pg_reload_conf()")
    locks = "select pg_advisory_xact_lock({}), pg_sleep(0.2), pg_advisory_xact_lock({}), 1"
    async with open_database(plain, origin="o") as db, trio.open_nursery() as nursery:
        for first, second in ((1, 2), (2, 1)):
            nursery.start_soon(db.run, None, Query(f"lock_{first}", locks.format(first, second)))
    execute(plain, "alter system reset deadlock_timeout")
    execute(plain, "select pg_reload_conf()")


async def test_endless_conflicts_are_given_up_after_five_repetitions(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        with pytest.raises(Retryable):
            await db.run(None, REFUSE, "40001")
        assert db.trips == 6

        async def confirm() -> None:
            raise AssertionError("a statement that was rolled back needs no confirmation")

        with pytest.raises(Retryable):
            await db.write(None, REFUSE, ("40001",), confirm)
        assert db.trips == 12


async def test_transaction(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        async with db.transaction("t1") as tx:
            await tx.run(INSERT, "w1", "a")
            assert notes(plain) == []
            await tx.run(INSERT, "w2", "b")
        assert notes(plain) == [("w1", "t1"), ("w2", "t1")]
        assert db.trips == 3, "BEGIN travels with the first statement"


async def test_transaction_that_raises_is_rolled_back(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        with pytest.raises(KeyError):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                raise KeyError
        with pytest.raises(NotFound):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                await tx.run(REFUSE, "FS001")
        with pytest.raises(FsError, match="rolled back"):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                with pytest.raises(NotFound):
                    await tx.run(REFUSE, "FS001")
        assert notes(plain) == []
        assert db.statistics().open == 1, "the connection was good all the time"
        await db.run("t1", INSERT, "w3", "c")
    assert notes(plain) == [("w3", "t1")]


async def test_transaction_without_a_statement(plain: str) -> None:
    async with open_database(plain, origin="o") as db:
        async with db.transaction(None):
            pass
        assert db.trips == 0


async def test_transaction_that_is_cancelled_leaves_nothing(plain: str) -> None:
    async with open_database(plain, origin="o", size=1) as db:
        with trio.move_on_after(0.1):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                await trio.sleep_forever()
        assert await db.run("t1", FIND, "w1") == []
        with trio.move_on_after(0.1):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                await tx.run(SLEEP, 30.0)
        assert await db.run("t1", FIND, "w1") == []


async def test_transaction_whose_commit_was_lost(plain: str) -> None:
    async with open_relay(plain) as relay, open_database(relay.dsn, origin="o") as db:
        with pytest.raises(LostInFlight):
            async with db.transaction("t1") as tx:
                await tx.run(INSERT, "w1", "a")
                relay.lose_request = b"commit"
        assert await db.run("t1", FIND, "w1") == []


async def test_a_silent_server_is_given_up(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusefs.db.pool._HUNG_MARGIN_S", 0.2)
    async with (
        open_relay(plain) as relay,
        open_database(relay.dsn, origin="o", statement_timeout_s=0.1, write_timeout_s=2) as db,
    ):
        relay.freeze()
        with trio.fail_after(10), pytest.raises(Unavailable):
            await db.run(None, PID)


async def test_the_first_connection_must_work() -> None:
    with pytest.raises(NotConnected, match="Connection refused"):
        async with open_database("host=127.0.0.1 port=1 dbname=x", origin="o"):
            raise AssertionError("it is not open")


async def test_everything_is_closed_at_the_end(plain: str) -> None:
    name = f"app_{uuid.uuid4().hex[:8]}"
    async with open_database(f"{plain} application_name={name}", origin="o", size=1) as db:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(Unavailable):
                    await db.run(None, SLEEP, 30.0)

            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.01)
            db.close()
        with pytest.raises(Unavailable, match="closing"):
            await db.run(None, PID)
    with trio.fail_after(10):
        while execute(plain, "select 1 from pg_stat_activity where application_name = %s and state = 'idle'", name):
            await trio.lowlevel.checkpoint()
    execute(plain, "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", name)


async def wait_gone(dsn: str, pid: object) -> None:
    with trio.fail_after(10):
        while execute(dsn, "select 1 from pg_stat_activity where pid = %s", pid):
            await trio.lowlevel.checkpoint()
