"""The listening connection: announcements in order, barriers, and knowing when they stop.

Decided here and only here: when announcements can be trusted, and that whoever listens on a namespace's channel counts
as one who follows it (`fusefs_follow_v1`), so that it is told. `live` is true while there is a connection that is
neither lost nor silent; `on_lost` is called at once when it ends, and `on_live` when there is one again. Between the
two, and until a namespace's channel is subscribed to anew, announcements were missed.

A barrier is one round trip that carries only a Sync: before Postgres says that it is ready again it
sends the notifications of everything committed before. Measured with 5000 commits and a barrier after
each: none missed.

Threading: belongs to the trio thread. `run` reads the socket, and so does, for a moment, the task that sent a round
trip; the methods may be called from any number of tasks. Callbacks are called synchronously by whoever reads, and must
not block.
"""

from __future__ import annotations

import contextlib
import math
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import trio
from psycopg import pq

from fusefs.db.connection import Connection
from fusefs.db.failures import NotConnected
from fusefs.db.queries import Query
from fusefs.rules.errors import FsError, Unavailable

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0
_ECHO_S = 2.0
"""How long an announcement to itself may take before announcements count as swallowed."""
_NAP_S = 0.005
_PAUSE_FIRST_S = 0.002
_PAUSE_MAX_S = 0.1
_PATIENCE_S = 30.0
_ALONE, _BUSY = b"alone", b"busy"
_BOOL = {False: b"f", True: b"t"}
_CHANNEL_MAX = 63
"""Bytes of an identifier; Postgres cuts longer ones, and two channels could become one."""

_OK = int(pq.ConnStatus.OK)
_SYNC = int(pq.ExecStatus.PIPELINE_SYNC)
_FAILED = (int(pq.ExecStatus.FATAL_ERROR), int(pq.ExecStatus.PIPELINE_ABORTED))
_LISTEN = b"listen "
_UNLISTEN = b"unlisten "
_SET_TENANT = b"select set_config('fusefs.tenant', $1, true)"
_FOLLOW = b"select fusefs_follow_v1($1, $2, $3, $4, $5)"
_UNFOLLOW = b"select pg_advisory_unlock_shared(uuid_hash_extended($1, 1))"
_IS_ANYBODY_LATE = b"select not pg_try_advisory_xact_lock(uuid_hash_extended($1, 3))"
_BE_LATE_NO_MORE = b"select pg_advisory_unlock_shared(uuid_hash_extended($1, 3))"
_ANNOUNCE = Query("announce_echo", "select pg_notify($1, '')")


def _identifier(channel: str) -> bytes:
    raw = channel.encode()
    if not 0 < len(raw) <= _CHANNEL_MAX or b"\0" in raw:
        raise FsError(f"a channel's name must have 1 to {_CHANNEL_MAX} bytes")
    return b'"' + raw.replace(b'"', b'""') + b'"'


_Command = tuple[bytes, list[bytes]]


@dataclass(frozen=True, slots=True)
class Channel:
    """What can be listened on. Of `scope`, a tenant and an agent, who listens counts as a follower; None: a channel of
    which nobody keeps account."""

    name: str
    scope: tuple[str, str] | None = None

    def listen(self, origin: str, *, again: bool = False, late: bool = False) -> list[_Command]:
        """What makes a connection hear it, all at the end of one transaction; `again`: it did before; `late`: to claim
        names late, if alone. The answer to the first but one says whether it is. LISTEN comes last: pg_stat_activity
        shows by that who listens."""
        commands: list[_Command] = []
        if self.scope is not None:
            tenant_id, agent_id = (each.encode() for each in self.scope)
            commands.append((_SET_TENANT, [tenant_id]))
            commands.append((_FOLLOW, [tenant_id, agent_id, origin.encode(), _BOOL[again], _BOOL[late]]))
        commands.append((_LISTEN + _identifier(self.name), []))
        return commands

    def unlisten(self) -> list[_Command]:
        commands: list[_Command] = [(_UNLISTEN + _identifier(self.name), [])]
        if self.scope is not None:
            agent_id = self.scope[1].encode()
            commands += [(_UNFOLLOW, [agent_id]), (_BE_LATE_NO_MORE, [agent_id])]
        return commands

    def ask(self, command: bytes) -> list[_Command]:
        """A command about the agent."""
        assert self.scope is not None
        return [(command, [self.scope[1].encode()]), (_LISTEN + _identifier(self.name), [])]


class _Group:
    """Commands that happen all or none, and what each said, in the first row and column; `refused`: none happened."""

    __slots__ = ("commands", "refused", "values")

    def __init__(self, commands: list[_Command]) -> None:
        self.commands = commands
        self.values: list[bytes | None] = []
        self.refused = False


class Round:
    """What one round trip will do, and who waits for it. `lost`: nobody knows whether it was done."""

    __slots__ = ("answered", "done", "groups", "lost")

    def __init__(self) -> None:
        self.groups: list[_Group] = []
        self.answered = 0
        self.done = trio.Event()
        self.lost = False


class _Patience:
    """Pauses that double, for 30 s in all: longer than the server takes to notice that a host has gone."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_FIRST_S
        self._deadline = trio.current_time() + _PATIENCE_S

    async def pause(self, why: str, hint: str = "Try again.") -> None:
        """Wait once more. Raises Unavailable, which says why, when there is no more time."""
        if trio.current_time() > self._deadline:
            raise Unavailable(why, hint=hint)
        await trio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)


class Listener:
    """Listens on any number of channels of one database.

    Args:
        dsn: must reach the server itself or a pooler in session mode.
        announce_dsn: where those write who are listened to; `dsn` without it. That both are one database is proved
            at each connection.
        origin: as for `Connection.open`.
        on_notify: called with channel and payload, in the order of the commits; returns whether it was news
            (another's announcement).
        on_lost: called once when announcements may have been missed.
        on_live: called when a connection is there again (not at the start), with whether the server goes on with the
            history that it had: after the promotion of a standby it may lack the newest commits. Channels with a scope
            were forgotten: each is to be subscribed to anew, so that one that has to wait holds up no other.
        heartbeat_s: after how many seconds without a round trip one is made.
        silence_s: after how many seconds without an answer the connection counts as lost.

    Attributes: `live`; `reconnects`; `wait_in_place` (see `Database.wait_in_place`).
    """

    def __init__(
        self,
        dsn: str,
        *,
        origin: str,
        on_notify: Callable[[str, str], bool],
        on_lost: Callable[[], None],
        on_live: Callable[[bool], None],
        heartbeat_s: float = 5.0,
        silence_s: float = 5.0,
        announce_dsn: str | None = None,
    ) -> None:
        self._dsn = dsn
        self._announce_dsn = announce_dsn or dsn
        self._origin = origin
        self._on_notify = on_notify
        self._on_lost = on_lost
        self._on_live = on_live
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._channels: dict[str, Channel] = {}
        self._conn: Connection | None = None
        self._in_flight: Round | None = None
        self._next: Round | None = None
        self._nursery: trio.Nursery | None = None
        self._nap: trio.CancelScope | None = None
        self._alarm = trio.CancelScope()
        self._deadline = self._rings_at = math.inf
        self._closed_trips = 0
        self._timeline: str | None = None
        self.live = False
        self.reconnects = 0
        self.wait_in_place: Callable[[int], bool] | None = None

    @property
    def trips(self) -> int:
        """Round trips so far, heartbeats included."""
        return self._closed_trips + (self._conn.trips if self._conn is not None else 0)

    @property
    def backend_pid(self) -> int | None:
        """The server's process of the connection, while there is one."""
        return self._conn.backend_pid if self._conn is not None else None

    async def subscribe(self, channel: Channel, *, late: bool = False) -> bool:
        """Listen on one more channel; returns when it is in force, no change of its namespace is kept quiet, and no
        name is claimed late by others. Returns whether this program is the only one that follows the namespace.

        Args:
            late: claim names late if so, until `be_late_no_more`.

        Raises Unavailable while not live; where for 30 s a change under way does not end, or another follower that
        claims late does not answer; where the login cannot see the namespace. The channel is not subscribed then.
        """
        self._channels[channel.name] = channel
        try:
            said = await self._join(channel.listen(self._origin, late=late))
            if channel.scope is None:
                return False
            patience = _Patience()
            while said[1] == _BUSY:
                await patience.pause("a change of the agent's files does not end")
                said = await self._join(channel.listen(self._origin, late=late))
            if said[1] == _ALONE:
                return True
            if said[1] is None:
                raise Unavailable(
                    "the connection for announcements cannot see the agent",
                    hint="The login of --listen-dsn needs the rights of that of --dsn.",
                )
            # Asked again and again: a connection that waited for the lock would bring no announcements.
            while (await self._join(channel.ask(_IS_ANYBODY_LATE)))[0] != b"f":
                await patience.pause(
                    "another mount of the agent does not answer",
                    hint="The server forgets it 25 s after its host has gone. One that hangs must be ended.",
                )
        except BaseException:
            self._channels.pop(channel.name, None)
            if self.live:
                # With whatever is sent next. What was not done needs no undoing, but who knows.
                self._round_to_come().groups.append(_Group(channel.unlisten()))
            raise
        return False

    async def follow_again(self, channel: Channel, *, late: bool) -> bool:
        """Find out whether this program has become the only one that follows a channel to which it is subscribed; if so
        it announces no more. `late`: and claims names late, which it does not yet. Raises Unavailable."""
        return (await self._join(channel.listen(self._origin, again=True, late=late)))[1] == _ALONE

    async def be_late_no_more(self, channel: Channel) -> None:
        """Every name is claimed, and the next ones will be at once. Raises Unavailable: it counts as late still, unless
        the connection was lost."""
        await self._join(channel.ask(_BE_LATE_NO_MORE))

    async def unsubscribe(self, channel: Channel) -> None:
        """Stop listening on a channel. Raises Unavailable while not live; it is forgotten in any case."""
        if self._channels.pop(channel.name, None) is not None:
            await self._join(channel.unlisten())

    async def barrier(self) -> None:
        """Return after `on_notify` was called for everything committed before this call.

        Joins the next round trip to be sent, never one in flight: that one may have passed the server
        before the commit. Raises Unavailable while not live, or when the connection is lost meanwhile.
        """
        await self.end_barrier(self.begin_barrier())

    def begin_barrier(self) -> Round:
        """Ask for a barrier now, to wait for it later by `end_barrier`. Raises Unavailable while not live."""
        return self._begin(None)

    async def end_barrier(self, begun: Round) -> None:
        """Return when the answer is here. Raises Unavailable when the connection was lost meanwhile."""
        if not begun.done.is_set():
            self._look()
        if not begun.done.is_set():
            await begun.done.wait()
        if begun.lost:
            raise Unavailable("the connection for announcements was lost")

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled, reconnecting with backoff. `started` is called once live.

        Raises Unavailable, before it has started only: the server does not answer, or announcements do not
        arrive (a pooler in transaction mode swallows LISTEN).
        """
        limiter = trio.CapacityLimiter(2)
        started = False
        wait_s = _BACKOFF_FIRST_S
        try:
            while True:
                try:
                    conn = await self._connect(limiter)
                except FsError:
                    if not started:
                        raise
                    await trio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311  (spreads reconnects)
                    wait_s = min(wait_s * 2, _BACKOFF_MAX_S)
                    continue
                wait_s = _BACKOFF_FIRST_S
                self._conn = conn
                self.live = True
                timeline, self._timeline = self._timeline, conn.timeline
                if started:
                    self.reconnects += 1
                    self._on_live(timeline == self._timeline)
                else:
                    started = True
                    task_status.started()
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._beat, conn)
                    await self._follow(conn)
                    self.live = False
                    self._channels = {name: one for name, one in self._channels.items() if one.scope is None}
                    self._on_lost()
                    self._give_up()
                    self._nursery.cancel_scope.cancel()
        finally:
            self.live = False
            self._give_up()

    async def _join(self, commands: list[_Command]) -> list[bytes | None]:
        """Have commands run with the next round, in a transaction of their own, and return what each said."""
        group = _Group(commands)
        await self.end_barrier(self._begin(group))
        if group.refused:
            raise Unavailable("the server refused to announce changes")
        return group.values

    def _begin(self, group: _Group | None) -> Round:
        """Join the next round, and send it where none is on its way."""
        if not self.live:
            raise Unavailable("announcements from Postgres are not live")
        joined = self._round_to_come()
        if group is not None:
            joined.groups.append(group)
        if self._in_flight is None:
            self._send_next()
        return joined

    def _round_to_come(self) -> Round:
        if self._next is None:
            self._next = Round()
        return self._next

    def _send_next(self) -> None:
        """Send the next round from whichever task has it: a switch to the reading task first would cost more
        than the send. What does not fit into the socket (it is some bytes) is flushed by the reading task.
        """
        assert self._conn is not None
        pgconn = self._conn.pgconn
        self._in_flight, self._next = self._next or Round(), None
        self._set_deadline(self._silence_s)
        try:
            self._conn.trips += 1
            for group in self._in_flight.groups:
                for command, values in group.commands:
                    pgconn.send_query_params(command, values)
                pgconn.pipeline_sync()
            if not self._in_flight.groups:
                pgconn.pipeline_sync()
            unsent = pgconn.flush()
        except psycopg.Error:
            self._conn.close()  # wakes the reading task, which sees the loss
            return
        if unsent and self._nursery is not None:
            self._nursery.start_soon(self._send_rest, self._conn)

    def _look(self) -> None:
        """Read the answer to what was just sent, where it may be waited for in place and comes at once; else have the
        reading task read it."""
        conn, wait_in_place = self._conn, self.wait_in_place
        try:
            while conn is not None and self._in_flight is not None and wait_in_place is not None:
                if conn.broken or not wait_in_place(conn.fd):
                    break
                conn.pgconn.consume_input()
                self._take(conn.pgconn)
        except psycopg.Error:
            assert conn is not None
            conn.close()  # wakes the reading task, which sees the loss
        self._wake_reader()

    def _wake_reader(self) -> None:
        """End the reading task's nap where somebody waits for an answer."""
        if self._nap is not None and self._in_flight is not None:
            self._nap.cancel()

    async def _send_rest(self, conn: Connection) -> None:
        """Send what did not fit into the socket; libpq may read meanwhile, so that the two sides cannot wait for
        each other."""
        with contextlib.suppress(psycopg.Error, trio.ClosedResourceError):
            while not conn.broken and conn.pgconn.flush():
                await trio.lowlevel.wait_writable(conn.fd)

    def _set_deadline(self, after_s: float) -> None:
        """When the next heartbeat is due, or the answer to what was sent. The alarm is set anew only when it
        would ring too late; otherwise it rings early, and finds the deadline moved."""
        self._deadline = trio.current_time() + after_s
        if self._deadline < self._rings_at:
            self._rings_at = self._alarm.deadline = self._deadline

    async def _beat(self, conn: Connection) -> None:
        """Send the heartbeats, and give up a connection that does not answer."""
        while not conn.broken:
            self._rings_at = self._deadline
            with trio.CancelScope(deadline=self._rings_at) as self._alarm:
                await trio.sleep_forever()
            if trio.current_time() < self._deadline:
                continue
            if self._in_flight is not None:
                conn.close()  # wakes the reading task, which sees the loss
            else:
                self._send_next()
                self._wake_reader()

    async def _follow(self, conn: Connection) -> None:
        """Read until the connection is lost or silent.

        Where everything that came was this program's own, as while it writes and nobody else does, the next look
        waits a little, so that several come at once (each wake-up costs a tenth of a commit); a round trip that
        somebody waits for ends the wait.
        """
        pgconn = conn.pgconn
        self._set_deadline(self._heartbeat_s)
        try:
            self._deliver(pgconn)  # what came behind the echo
            while not conn.broken:
                await trio.lowlevel.wait_readable(conn.fd)
                pgconn.consume_input()
                if not self._take(pgconn) and self._in_flight is None:
                    with trio.CancelScope(deadline=trio.current_time() + _NAP_S) as self._nap:
                        await trio.sleep_forever()
                    self._nap = None
        except (psycopg.Error, trio.ClosedResourceError):
            return
        finally:
            self._nap = None

    def _take(self, pgconn: pq.abc.PGconn) -> bool:
        """Deliver what has arrived; end the round in flight when its answer is there. Returns whether there was
        any news.

        The answer comes after the notifications that it vouches for, and libpq keeps that order.
        """
        news = self._deliver(pgconn)
        while self._in_flight is not None and not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if pgconn.status != _OK:
                    raise psycopg.OperationalError("the connection is lost")
            elif result.status == _SYNC:
                self._in_flight.answered += 1
                if self._in_flight.answered < len(self._in_flight.groups):
                    continue
                news |= self._deliver(pgconn)
                self._in_flight.done.set()
                self._in_flight = None
                self._set_deadline(self._heartbeat_s)
                if self._next is not None:
                    self._send_next()
            elif self._in_flight.answered >= len(self._in_flight.groups):
                raise psycopg.OperationalError("the server ends the connection")
            else:
                group = self._in_flight.groups[self._in_flight.answered]
                if result.status in _FAILED:
                    group.refused = True
                group.values.append(result.get_value(0, 0) if result.ntuples else None)
        if self._in_flight is not None:
            self._set_deadline(self._silence_s)  # a long burst of notifications is not silence
        return news

    def _deliver(self, pgconn: pq.abc.PGconn) -> bool:
        news = False
        while (notification := pgconn.notifies()) is not None:
            channel = notification.relname.decode()
            if channel in self._channels:
                news |= self._on_notify(channel, notification.extra.decode())
        return news

    def _give_up(self) -> None:
        """Close the connection and fail whoever waits for an answer on it."""
        if self._conn is not None:
            self._closed_trips += self._conn.trips
            self._conn.close()
            self._conn = None
        for waiting in (self._in_flight, self._next):
            if waiting is not None:
                waiting.lost = True
                waiting.done.set()
        self._in_flight = self._next = None

    async def _connect(self, limiter: trio.CapacityLimiter) -> Connection:
        """A connection with LISTEN in force on every channel, proved by an announcement from another one."""
        conn = await Connection.open(
            self._dsn, origin=self._origin, connect_timeout_s=self._silence_s, limiter=limiter, prove_session=True
        )
        try:
            echo = f"fusefs_echo_{uuid.uuid4().hex}"
            for channel in (Channel(echo), *self._channels.values()):
                for command, values in channel.listen(self._origin):
                    conn.pgconn.send_query_params(command, values)
            conn.pgconn.pipeline_sync()
            with self._answering():
                results = await conn.finish_round()
            if any(result.status in _FAILED for result in results):
                raise Unavailable("the server refused LISTEN")
            await self._announce(echo, limiter)
            with trio.move_on_after(_ECHO_S):
                while not self._has_arrived(conn, echo):
                    await trio.lowlevel.wait_readable(conn.fd)
                    conn.pgconn.consume_input()
                return conn
            raise Unavailable(
                "announcements from Postgres do not arrive",
                hint="Connect to the server itself, or to a pooler in session mode."
                if self._announce_dsn == self._dsn
                else "--listen-dsn must lead to the server of --dsn and to the same database there.",
            )
        except psycopg.Error as exc:
            conn.close()
            raise NotConnected("the connection for announcements was lost") from exc
        except BaseException:
            conn.close()
            raise

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """A server that is silent on a new connection is given up as well: no heartbeat watches it yet."""
        try:
            with trio.fail_after(self._silence_s):
                yield
        except trio.TooSlowError:
            raise Unavailable("Postgres does not answer") from None

    async def _announce(self, channel: str, limiter: trio.CapacityLimiter) -> None:
        """From a second connection: a pooler that swallows LISTEN may still pass on what the same server
        connection announces to itself."""
        other = await Connection.open(
            self._announce_dsn, origin=self._origin, connect_timeout_s=self._silence_s, limiter=limiter
        )
        try:
            with self._answering():
                await other.run(_ANNOUNCE, (channel,))
        finally:
            other.close()

    def _has_arrived(self, conn: Connection, channel: str) -> bool:
        """Whether the echo is there. Other announcements that come before `on_live` are dropped: nothing is
        trusted before it, and everything is loaded afresh after it."""
        while (notification := conn.pgconn.notifies()) is not None:
            if notification.relname.decode() == channel:
                return True
        return False
