"""Who is told of changes: while one program alone follows a namespace, its own changes are told to nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest
import trio

from fusefs.db import listen
from fusefs.db.listen import Channel, Listener
from fusefs.rules.errors import Unavailable
from tests import harness
from tests.db.conftest import execute


class Follower:
    """A program that listens on a namespace's channel, and one that writes under the same origin."""

    def __init__(self, namespace: harness.Namespace, origin: str) -> None:
        self.namespace = namespace
        self.origin = origin
        self.heard: list[str] = []
        self.listener = Listener(
            namespace.dsn,
            origin=origin,
            on_notify=self._hear,
            on_lost=lambda: None,
            on_live=lambda _: None,
        )
        ((name,),) = namespace.execute(
            "select channel from agent_namespaces where agent_id = %s", (namespace.agent_id,)
        )
        self.channel = Channel(str(name), (namespace.tenant_id, namespace.agent_id))

    def _hear(self, _channel: str, payload: str) -> bool:
        self.heard.append(payload)
        return True

    async def hears(self, path: str) -> bool:
        """Whether it was told of a path, of everything that is committed by now."""
        await self.listener.barrier()
        return any(f'"{path}"' in payload for payload in self.heard)


@asynccontextmanager
async def following(namespace: harness.Namespace, origin: str, *, late: bool = False) -> AsyncIterator[Follower]:
    follower = Follower(namespace, origin)
    async with trio.open_nursery() as nursery:
        await nursery.start(follower.listener.run)
        await follower.listener.subscribe(follower.channel, late=late)
        yield follower
        nursery.cancel_scope.cancel()


class Writer:
    """A connection that writes as a daemon's do."""

    def __init__(self, namespace: harness.Namespace, origin: str) -> None:
        self.namespace = namespace
        self.conn = psycopg.connect(namespace.dsn, autocommit=True)
        self.conn.execute("select set_config('fusefs.origin', %s, false)", (origin,))
        self.conn.execute("select set_config('fusefs.tenant', %s, false)", (namespace.tenant_id,))

    def make(self, path: str, kind: str = "file") -> None:
        self.conn.execute(
            "insert into agent_files (tenant_id, agent_id, path, content, kind) values (%s, %s, %s, '', %s)",
            (self.namespace.tenant_id, self.namespace.agent_id, path, kind),
        )

    def change(self, what: str) -> None:
        self.conn.execute(what.encode(), (self.namespace.agent_id,))


@pytest.fixture
def writer(namespace: harness.Namespace) -> Iterator[Callable[[str], Writer]]:
    made: list[Writer] = []

    def make(origin: str) -> Writer:
        made.append(Writer(namespace, origin))
        return made[-1]

    yield make
    for each in made:
        each.conn.close()


MakeWriter = Callable[[str], Writer]


async def test_own_changes_of_the_only_follower_are_told_to_nobody(
    namespace: harness.Namespace, writer: MakeWriter
) -> None:
    own, other, foreign = writer("a"), writer("x"), writer("")
    async with following(namespace, "a") as a:
        assert namespace.only_follower() == "a"
        own.make("/own")
        own.change(
            "update agent_files set content = 'x', write_id = gen_random_uuid() where agent_id = %s and path = '/own'"
        )
        own.change("delete from agent_files where agent_id = %s and path = '/own'")
        other.make("/other")
        foreign.make("/foreign")
        assert not await a.hears("/own")
        assert await a.hears("/other")
        assert await a.hears("/foreign")


async def test_a_second_follower_is_told_and_a_third(namespace: harness.Namespace, writer: MakeWriter) -> None:
    own, second = writer("a"), writer("b")
    async with following(namespace, "a") as a, following(namespace, "b") as b:
        assert namespace.only_follower() is None
        own.make("/of-a")
        second.make("/of-b")
        async with following(namespace, "c") as c:
            own.make("/of-a-later")
            for each in (a, b, c):
                assert await each.hears("/of-a-later")
        assert await b.hears("/of-a")
        assert await a.hears("/of-b")


async def test_who_is_left_alone_need_not_announce_any_more(namespace: harness.Namespace, writer: MakeWriter) -> None:
    own = writer("a")
    async with following(namespace, "a") as a:
        async with following(namespace, "b") as b:
            await a.listener.follow_again(a.channel, late=False)
            assert namespace.only_follower() is None, "b is there"
            await b.listener.unsubscribe(b.channel)
            own.make("/before-it-is-known")
            await a.listener.follow_again(a.channel, late=False)
            assert namespace.only_follower() == "a"
            await b.listener.subscribe(b.channel)
            assert namespace.only_follower() is None
            own.make("/b-is-back")
            assert await b.hears("/b-is-back")
        assert await a.hears("/before-it-is-known")


async def test_whose_connection_broke_follows_no_more(namespace: harness.Namespace, writer: MakeWriter) -> None:
    """The server knows it by itself: nothing is left to be cleaned up after kill -9."""
    own = writer("b")
    async with following(namespace, "a") as a:
        namespace.execute("select pg_terminate_backend(%s, 5000)", (a.listener.backend_pid,))
        namespace.execute("select pg_sleep(0)")
        async with following(namespace, "b") as b:
            # a may be back by now, as any daemon is.
            with trio.fail_after(10):
                while not a.listener.reconnects or not a.listener.live:
                    await trio.sleep(0.01)
            await a.listener.subscribe(a.channel)
            assert namespace.only_follower() is None
            own.make("/of-b")
            assert await a.hears("/of-b")
            assert not await b.hears("/nothing")


async def test_a_change_under_way_is_waited_for(namespace: harness.Namespace, writer: MakeWriter) -> None:
    """It was not announced: whoever comes to follow must find it when it loads."""
    own = writer("a")
    async with following(namespace, "a"):
        own.conn.execute("begin")
        own.make("/under-way")
        came = trio.Event()

        async def come() -> None:
            async with following(namespace, "b"):
                assert execute(namespace.dsn, "select 1 from agent_files where path = '/under-way'") == [(1,)]
                own.make("/after")
                came.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            await backend_waits(namespace, "wait_event = 'advisory'")
            assert not came.is_set()
            own.conn.execute("commit")
        assert came.is_set()


async def test_a_change_that_does_not_end(
    namespace: harness.Namespace, writer: MakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes is refused; its connection and its other channels go on meanwhile, and who was alone still is."""
    monkeypatch.setattr(listen, "_PATIENCE_S", 1.0)
    own = writer("a")
    async with following(namespace, "a") as a:
        own.conn.execute("begin")
        own.make("/under-way")
        b = Follower(namespace, "b")
        async with trio.open_nursery() as nursery:
            await nursery.start(b.listener.run)
            await b.listener.subscribe(Channel("c"))
            with pytest.raises(Unavailable, match="does not end"):
                await b.listener.subscribe(b.channel)
            assert b.listener.live
            assert b.listener.reconnects == 0
            namespace.execute("select pg_notify('c', 'p')")
            await b.listener.barrier()
            assert b.heard == ["p"]
            own.conn.execute("commit")
            await a.listener.follow_again(a.channel, late=False)
            assert namespace.only_follower() == "a", "b does not count"
            await b.listener.subscribe(b.channel)
            assert namespace.only_follower() is None
            nursery.cancel_scope.cancel()


async def test_a_locked_namespace_keeps_nobody_away(namespace: harness.Namespace) -> None:
    """Each change locks its row where there is a quota: who comes announces then, and asks again later."""
    with psycopg.connect(namespace.dsn) as holder:
        holder.execute("select from agent_namespaces where agent_id = %s for update", (namespace.agent_id,))
        async with following(namespace, "a", late=True) as a:
            assert namespace.only_follower() is None
            assert not await a.listener.follow_again(a.channel, late=True)
            assert late_locks(namespace) == 0
            holder.rollback()
            assert await a.listener.follow_again(a.channel, late=True)
            assert late_locks(namespace) == 1
            await a.listener.be_late_no_more(a.channel)
            assert late_locks(namespace) == 0


async def test_what_one_is_refused_is_done_for_the_others(namespace: harness.Namespace) -> None:
    """Commands that leave together are transactions of their own."""
    async with following(namespace, "a", late=True) as a:
        wrong = Channel("c", ("no", "uuid"))
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def refused() -> None:
                with pytest.raises(Unavailable, match="refused"):
                    await a.listener.subscribe(wrong)

            nursery.start_soon(a.listener.barrier)
            nursery.start_soon(a.listener.be_late_no_more, a.channel)
            nursery.start_soon(a.listener.subscribe, Channel("d"))
        assert late_locks(namespace) == 0
        namespace.execute("select pg_notify('d', 'p')")
        await a.listener.barrier()
        assert a.heard == ["p"]


def late_locks(namespace: harness.Namespace) -> int:
    ((count,),) = namespace.execute(
        "select count(*) from pg_locks, uuid_hash_extended(%s::uuid, 3) as key where locktype = 'advisory' and granted"
        " and (classid::bigint << 32 | objid::bigint) = key",
        (namespace.agent_id,),
    )
    return int(count)


async def test_a_namespace_that_cannot_be_seen_cannot_be_followed(namespace: harness.Namespace) -> None:
    """Others could keep quiet: nothing is believed to be live there."""
    follower = Follower(namespace, "a")
    nowhere = Channel("c", (namespace.tenant_id, namespace.tenant_id))
    async with trio.open_nursery() as nursery:
        await nursery.start(follower.listener.run)
        with pytest.raises(Unavailable, match="cannot see the agent"):
            await follower.listener.subscribe(nowhere)
        assert follower.listener.live
        nursery.cancel_scope.cancel()


async def test_who_comes_waits_for_names_that_are_claimed_late(namespace: harness.Namespace) -> None:
    async with following(namespace, "a", late=True) as a, trio.open_nursery() as nursery:
        came = trio.Event()

        @nursery.start_soon
        async def come() -> None:
            async with following(namespace, "b") as b:
                came.set()
                assert not await b.listener.follow_again(b.channel, late=True), "a is there"

        with trio.fail_after(10):
            while not await a.hears("follow"):
                await trio.sleep(0.01)
        for _ in range(5):
            await a.listener.barrier()
        assert not came.is_set()
        await a.listener.be_late_no_more(a.channel)
        with trio.fail_after(10):
            await came.wait()


async def test_who_claims_late_and_is_gone_is_waited_for_by_nobody(namespace: harness.Namespace) -> None:
    async with following(namespace, "a", late=True) as a:
        namespace.execute("select pg_terminate_backend(%s, 5000)", (a.listener.backend_pid,))
        async with following(namespace, "b"):
            async with following(namespace, "c"):
                pass


async def test_who_claims_late_and_does_not_answer(
    namespace: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes is refused, and does not count: what is announced goes to nobody else."""
    monkeypatch.setattr(listen, "_PATIENCE_S", 0.5)
    async with following(namespace, "a", late=True) as a:
        b = Follower(namespace, "b")
        async with trio.open_nursery() as nursery:
            await nursery.start(b.listener.run)
            with pytest.raises(Unavailable, match="does not answer"):
                await b.listener.subscribe(b.channel)
            await b.listener.barrier()
            assert await a.listener.follow_again(a.channel, late=False), "b does not count"
            nursery.cancel_scope.cancel()


async def test_the_move_of_a_directory_is_told_in_any_case(namespace: harness.Namespace, writer: MakeWriter) -> None:
    """Its own daemon takes it in its turn among others' announcements; a file's move is told to nobody."""
    own = writer("a")
    move = (
        "select from fusefs_rename_v1(%s, %s, (select id from agent_files where path = %s), %s, %s, null, null, '',"
        " 'agent', 's1', gen_random_uuid(), 1024, 64)"
    )
    own.make("/dir", "dir")
    own.make("/file")
    async with following(namespace, "a") as a:
        for path in ("/dir", "/file"):
            own.conn.execute(move.encode(), (namespace.tenant_id, namespace.agent_id, path, path, f"{path}-moved"))
        assert await a.hears("/dir-moved")
        assert not await a.hears("/file-moved")


async def backend_waits(namespace: harness.Namespace, where: str) -> None:
    with trio.fail_after(10):
        while not execute(
            namespace.dsn, f"select 1 from pg_stat_activity where datname = current_database() and {where}"
        ):
            await trio.sleep(0.01)
