"""The listener: order, barriers, and knowing when announcements may have been missed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
import trio
import trio.testing

from fusefs.db import listen
from fusefs.db.connection import Connection
from fusefs.db.listen import Channel, Listener
from fusefs.db.pool import open_database
from fusefs.db.queries import Query
from fusefs.rules.errors import FsError, Unavailable
from tests.db.conftest import execute
from tests.relay import Which, open_relay

NOTIFY = Query("notify_one", "select pg_notify($1, $2)")


class Heard:
    """What a listener said, in order."""

    def __init__(self, *, news: bool = True) -> None:
        self.news = news
        self.events: list[tuple[str, ...]] = []
        self.changed = trio.Event()

    def notify(self, channel: str, payload: str) -> bool:
        self._add("notify", channel, payload)
        return self.news

    def lost(self) -> None:
        self._add("lost")

    def live(self, same_history: bool) -> None:
        assert same_history
        self._add("live")

    def _add(self, *event: str) -> None:
        self.events.append(event)
        self.changed.set()

    @property
    def payloads(self) -> list[str]:
        return [event[2] for event in self.events if event[0] == "notify"]

    async def wait_for(self, *event: str) -> None:
        with trio.fail_after(20):
            while event not in self.events:
                self.changed = trio.Event()
                await self.changed.wait()


@asynccontextmanager
async def listening(
    dsn: str, heard: Heard, *, heartbeat_s: float = 60.0, silence_s: float = 10.0
) -> AsyncIterator[Listener]:
    listener = Listener(
        dsn,
        origin="o",
        on_notify=heard.notify,
        on_lost=heard.lost,
        on_live=heard.live,
        heartbeat_s=heartbeat_s,
        silence_s=silence_s,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(listener.run)
        yield listener
        nursery.cancel_scope.cancel()


async def test_nothing_of_5000_is_missed_by_a_barrier_after_each(plain: str) -> None:
    """The barrier alone decides: nothing waits for a notification."""
    heard = Heard()
    async with listening(plain, heard) as listener:
        await listener.subscribe(Channel("c"))
        writer = await Connection.open(plain, origin="o")
        try:
            for number in range(5000):
                await writer.run(NOTIFY, ("c", str(number)))
                await listener.barrier()
                assert len(heard.events) == number + 1
        finally:
            writer.close()
        assert listener.trips < 5010
    assert heard.payloads == [str(number) for number in range(5000)]


async def test_own_announcements_are_read_several_at_once_and_a_barrier_does_not_wait(plain: str) -> None:
    """What is no news is not worth a wake-up each; the barrier reads whatever has come at once."""
    heard = Heard(news=False)
    async with open_database(plain, origin="o") as db, listening(plain, heard) as listener:
        await listener.subscribe(Channel("c"))
        for number in range(200):
            await db.run(None, NOTIFY, "c", str(number))
            if number % 10 == 0:
                await listener.barrier()
                assert len(heard.payloads) == number + 1
        await heard.wait_for("notify", "c", "199")
        assert heard.payloads == [str(number) for number in range(200)]


async def test_order_across_a_burst_of_writers(plain: str) -> None:
    heard = Heard()
    async with listening(plain, heard) as listener:
        await listener.subscribe(Channel("c"))

        async def write(name: str) -> None:
            conn = await Connection.open(plain, origin="o")
            try:
                for number in range(100):
                    await conn.run(NOTIFY, ("c", f"{name} {number}"))
            finally:
                conn.close()

        async with trio.open_nursery() as nursery:
            for name in "abcd":
                nursery.start_soon(write, name)
        await listener.barrier()
    assert len(heard.payloads) == 400
    for name in "abcd":
        mine = [payload for payload in heard.payloads if payload.startswith(name)]
        assert mine == [f"{name} {number}" for number in range(100)]


async def test_a_barrier_joins_the_next_round_and_never_the_one_in_flight(plain: str) -> None:
    """While the server is held up with the first round, many queue; one further round serves them all."""
    heard = Heard()
    done: list[int] = []
    async with open_relay(plain) as relay, listening(relay.dsn, heard) as listener:
        before = listener.trips
        relay.freeze()
        async with trio.open_nursery() as nursery:

            async def ask(number: int) -> None:
                await listener.barrier()
                done.append(number)

            nursery.start_soon(ask, 0)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(1, 20):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            assert listener.trips == before + 1, "one in flight, the others wait for the next"
            assert done == []
            relay.thaw()
        assert listener.trips == before + 2
    assert done[0] == 0
    assert sorted(done) == list(range(20))


async def test_a_commit_during_a_round_is_covered_by_the_next(plain: str) -> None:
    heard = Heard()
    async with open_relay(plain) as relay, listening(relay.dsn, heard) as listener:
        await listener.subscribe(Channel("c"))
        relay.freeze()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.barrier)
            await trio.testing.wait_all_tasks_blocked()
            execute(plain, "select pg_notify('c', 'late')")

            @nursery.start_soon
            async def second() -> None:
                await listener.barrier()
                assert heard.payloads == ["late"]

            await trio.testing.wait_all_tasks_blocked()
            relay.thaw()


async def test_cancelled_barriers_disturb_nobody(plain: str) -> None:
    heard = Heard()
    async with open_relay(plain) as relay, listening(relay.dsn, heard) as listener:
        relay.freeze()
        with trio.move_on_after(0.02):
            await listener.barrier()
        with trio.move_on_after(0.02):
            await listener.barrier()
        relay.thaw()
        await listener.barrier()
        assert listener.live


async def test_channels_are_quoted_and_kept_apart(plain: str) -> None:
    heard = Heard()
    names = ['Mixed"Case', "a b;c", "été", "'", "x" * 63]
    async with listening(plain, heard) as listener:
        for name in names:
            await listener.subscribe(Channel(name))
        for name in [*names, 'mixed"case', "other"]:
            execute(plain, "select pg_notify(%s, 'p')", name)
        await listener.barrier()
        assert [event[1] for event in heard.events] == names
        await listener.unsubscribe(Channel("'"))
        await listener.unsubscribe(Channel("never"))
        execute(plain, "select pg_notify('''', 'p')")
        await listener.barrier()
        assert len(heard.events) == len(names)
        for wrong in ("", "x" * 64, "a\0b"):
            with pytest.raises(FsError, match="1 to 63 bytes"):
                await listener.subscribe(Channel(wrong))


async def test_cut_and_back(plain: str) -> None:
    """Lost first, then live; what was announced between them is gone, what comes after is heard."""
    heard = Heard()
    async with open_relay(plain) as relay, listening(relay.dsn, heard) as listener:
        await listener.subscribe(Channel("c"))
        execute(plain, "select pg_notify('c', 'before')")
        await listener.barrier()
        await relay.shut()
        await heard.wait_for("lost")
        assert not listener.live
        with pytest.raises(Unavailable, match="not live"):
            await listener.barrier()
        with pytest.raises(Unavailable):
            await listener.subscribe(Channel("d"))
        execute(plain, "select pg_notify('c', 'between')")
        await relay.open()
        await heard.wait_for("live")
        assert listener.live
        assert listener.reconnects == 1
        execute(plain, "select pg_notify('c', 'after')")
        execute(plain, "select pg_notify('d', 'refused')")
        await listener.barrier()
    assert heard.events == [("notify", "c", "before"), ("lost",), ("live",), ("notify", "c", "after")]


async def test_barriers_in_flight_and_queued_fail_when_the_connection_is_lost(plain: str) -> None:
    heard = Heard()
    failed: list[str] = []
    async with open_relay(plain) as relay, listening(relay.dsn, heard) as listener:
        relay.freeze()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(Unavailable, match="was lost") as caught:
                    await listener.barrier()
                failed.append(str(caught.value))

            for _ in range(3):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            relay.cut()
        assert len(failed) == 3
        assert heard.events[0] == ("lost",)
        relay.thaw()
        await heard.wait_for("live")


async def test_backend_terminated(plain: str) -> None:
    heard = Heard()
    async with listening(plain, heard) as listener:
        await listener.subscribe(Channel("c"))
        pid = listener.backend_pid
        execute(plain, "select pg_terminate_backend(%s)", pid)
        await heard.wait_for("live")
        assert heard.events == [("lost",), ("live",)]
        assert listener.backend_pid != pid
        execute(plain, "select pg_notify('c', 'x')")
        await listener.barrier()
        assert heard.payloads == ["x"]


async def test_backend_terminated_between_barriers(plain: str) -> None:
    """Whatever the server says last is the answer to no command."""
    heard = Heard()
    async with listening(plain, heard) as listener:

        async def ask(ended: trio.Event) -> None:
            with contextlib.suppress(Unavailable):
                while not ended.is_set():
                    await listener.barrier()

        for number in range(1, 11):
            ended = trio.Event()
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask, ended)
                await trio.to_thread.run_sync(execute, plain, "select pg_terminate_backend(%s)", listener.backend_pid)
                with trio.fail_after(10):
                    while listener.reconnects < number:
                        await trio.sleep(0.005)
                ended.set()


async def test_heartbeats_keep_an_idle_connection_under_watch(plain: str) -> None:
    heard = Heard()
    async with listening(plain, heard, heartbeat_s=0.01) as listener:
        before = listener.trips
        with trio.fail_after(10):
            while listener.trips < before + 5:
                await trio.lowlevel.checkpoint()
        assert listener.live
        assert heard.events == []


async def test_a_silent_server_is_lost(plain: str) -> None:
    """The peer is there and says nothing: only the heartbeat finds out."""
    heard = Heard()
    async with open_relay(plain) as relay, listening(relay.dsn, heard, heartbeat_s=0.05, silence_s=0.2) as listener:
        await listener.barrier()
        relay.freeze()
        await heard.wait_for("lost")
        assert not listener.live


async def test_a_server_that_falls_silent_while_a_connection_is_made(plain: str) -> None:
    """Its LISTEN is never answered, and nothing says that the server has gone."""
    heard = Heard()
    async with open_relay(plain) as relay, listening(relay.dsn, heard, silence_s=0.5) as listener:
        relay.freeze(Which.LISTENER)
        relay.cut(Which.LISTENER)
        with trio.fail_after(20):
            while not relay.held:
                await trio.sleep(0.001)
        relay.strand(Which.LISTENER)
        relay.thaw()
        await heard.wait_for("live")
        await listener.barrier()


async def test_a_server_that_swallows_announcements_is_refused(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pooler in transaction mode does; here the echo goes to another database."""
    monkeypatch.setattr(listen, "_ECHO_S", 0.1)
    monkeypatch.setattr(listen, "_ANNOUNCE", Query("announce_nothing", "select $1::text"))
    with pytest.raises(Unavailable, match="do not arrive") as caught:
        async with only_error(), listening(plain, Heard()):
            raise AssertionError("it must not start")
    assert "session mode" in caught.value.given_hint


async def test_no_server_at_the_start() -> None:
    with pytest.raises(Unavailable, match="Connection refused"):
        async with only_error(), listening("host=127.0.0.1 port=1", Heard()):
            raise AssertionError("it must not start")


async def test_a_burst_larger_than_the_socket_holds(plain: str) -> None:
    heard = Heard()
    async with listening(plain, heard) as listener:
        await listener.subscribe(Channel("c"))
        with psycopg.connect(plain) as conn:
            conn.execute("select pg_notify('c', repeat(n::text || ' ', 1000)) from generate_series(1, 2000) n")
        await listener.barrier()
    assert [payload.split(" ", 1)[0] for payload in heard.payloads] == [str(number) for number in range(1, 2001)]


@asynccontextmanager
async def only_error() -> AsyncIterator[None]:
    """Takes a single error out of the groups that nurseries put around it."""
    try:
        yield
    except ExceptionGroup as group:
        found: BaseException = group
        while isinstance(found, ExceptionGroup):
            (found,) = found.exceptions
        raise found from None
