"""The pool of connections, and what is repeated when one is lost.

Decided here and only here: how many connections there are, who gets one next, what may be sent again
after a failure, and how a write that must not happen twice is settled.

Who waits for a connection waits in the queue of its flow (`flow`; a session of a mount is one), and the
flows take turns: one that floods the pool delays the others by one statement, not by its whole queue.

- `run` is for statements that may run twice (reads, idempotent updates): repeated after a lost
  connection, a deadlock or a serialization failure.
- `write` is for one statement that must happen exactly once. After a connection is lost in flight the
  old backend is terminated first: until it is gone it may still commit, and whatever `confirm` finds
  would prove nothing.
- `transaction` never repeats by itself.

Threading: belongs to the trio thread; any number of tasks at once. A task that waits for a connection
holds none.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter

import outcome
import trio

from fusefs.db.connection import DAEMON_ROLE, Backend, Connection, Row
from fusefs.db.failures import LostInFlight, NotConnected, Retryable
from fusefs.db.group_commit import IMPATIENT, LARGEST_BYTES, PATIENT, Attempt, Line, Member, Pace
from fusefs.db.queries import Query
from fusefs.db.values import Param
from fusefs.rules.errors import Exists, FsError, Unavailable
from fusefs.rules.events import FileEvent

_RETRIES = 5
"""How often a deadlock or serialization failure is repeated."""
_BACKOFF_FIRST_S = 0.02
_BACKOFF_MAX_S = 1.0
_SETTLE_S = 2.0
"""What settling a write may take beyond the write timeout, if that is not shorter: otherwise nobody knew whether it
happened."""
_ROLLBACK_S = 2.0
_SLOWEST_BYTES_PER_S = 8 << 20
_HUNG_MARGIN_S = 5.0
"""How long after its own statement timeout the server may stay silent before the connection is given up."""

# The server waits up to 500 ms for the backend to end; true also when there is none any more.
_TERMINATE = Query(
    "terminate_backend",
    "select coalesce(bool_and(pg_terminate_backend(pid, 500)), true) from pg_stat_activity"
    " where pid = $1::int and (extract(epoch from backend_start) * 1000000)::bigint = $2::bigint",
)
# A commit that waits as the server is configured to, for its disk and for the synchronous standby where there is one:
# when it returns, these have everything that was committed before, on any connection. Costs a few bytes of WAL.
_SYNC = Query(
    "sync",
    "with durable as materialized (select set_config('synchronous_commit', current_setting('fusefs.durable'), true))"
    " select pg_logical_emit_message(true, 'fusefs', '')::text from durable",
)
_CANCEL_S = 1.0


class Unsettled(LostInFlight):
    """A write was lost in flight, and nobody could find out in time whether it was applied. `backend` may still
    apply it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """`open` connections of which `idle` are free; `waiting` tasks; `trips` and `reconnects` so far."""

    open: int
    idle: int
    waiting: int
    trips: int
    reconnects: int


flow: ContextVar[int] = ContextVar("flow", default=0)
"""For whom the current task works; set by a door before it asks anything."""


_SIZED = (str, bytes)


class _Turns:
    """Tasks that wait, by flow: first come, first served within one, and the flows in turn."""

    def __init__(self) -> None:
        # The order of the keys is the order of the turns.
        self._queues: dict[int, deque[trio.lowlevel.Task]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, of: int, task: trio.lowlevel.Task) -> None:
        self._queues.setdefault(of, deque()).append(task)
        self._count += 1

    def remove(self, of: int, task: trio.lowlevel.Task) -> None:
        queue = self._queues[of]
        queue.remove(task)
        if not queue:
            del self._queues[of]
        self._count -= 1

    def pop(self) -> trio.lowlevel.Task:
        """The next task; its flow's next turn comes after everybody else's."""
        of = next(iter(self._queues))
        queue = self._queues.pop(of)
        task = queue.popleft()
        if queue:
            self._queues[of] = queue
        self._count -= 1
        return task


def _longest(params: Sequence[Param]) -> int:
    """The length of the longest parameter: the content, if that is large."""
    longest = 0
    for value in params:
        if isinstance(value, _SIZED) and len(value) > longest:
            longest = len(value)
    return longest


class _Backoff:
    """Waits that double, with jitter, until a deadline in trio's time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._next_s = _BACKOFF_FIRST_S

    async def pause(self, exc: FsError) -> None:
        """Wait once more; raise `exc` when the deadline would pass meanwhile."""
        wait_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311  (spreads reconnects, guards nothing)
        if trio.current_time() + wait_s >= self.deadline:
            raise exc
        self._next_s = min(self._next_s * 2, _BACKOFF_MAX_S)
        await trio.sleep(wait_s)


class Transaction:
    """A transaction of one tenant; made by `Database.transaction`. The first statement carries the BEGIN."""

    def __init__(self, conn: Connection, tenant_id: str | None) -> None:
        self._conn = conn
        self._tenant_id = tenant_id
        self._begun = False

    async def run(self, query: Query, *params: Param) -> list[Row]:
        """Run one statement. Raises as `Connection.run`; after an error only a rollback is possible."""
        begin, self._begun = not self._begun, True
        return await self._conn.run(query, params, self._tenant_id, begin=begin)

    async def commit(self) -> None:
        """End it; called by `Database.transaction`.

        Raises LostInFlight when the connection broke on the way; FsError when a statement had failed and the
        caller went on.
        """
        begun, self._begun = self._begun, False  # whatever comes of it, there is nothing to roll back afterwards
        if begun and await self._conn.command(b"commit") != "COMMIT":
            self._conn.forget_tenant()
            raise FsError("the transaction was rolled back, since a statement in it had failed")

    async def rollback(self) -> None:
        """Undo it; called by `Database.transaction`. A connection that does not manage it is closed."""
        if not self._begun or self._conn.broken:
            return
        self._conn.forget_tenant()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _ROLLBACK_S):
            try:
                await self._conn.command(b"rollback")
            except FsError:
                self._conn.close()


class Database:
    """All statements of one program against one DSN. Made by `open_database`, which closes it.

    Attributes:
        on_event: told by `store/` of each change that this program committed, in place; it must not block.
        wait_in_place: called with the descriptor of a connection that awaits an answer; it may wait a moment for that
            where nothing else is to be done, and returns whether it is there; otherwise the task waits.
    """

    def __init__(
        self,
        dsn: str,
        *,
        origin: str,
        role: str | None,
        size: int,
        write_timeout_s: float,
        statement_timeout_s: float,
        relaxed: bool,
    ) -> None:
        self.on_event: Callable[[FileEvent], None] | None = None
        self.wait_in_place: Callable[[int], bool] | None = None
        self._dsn = dsn
        self._origin = origin
        self._role = role
        self._size = size
        self._write_timeout_s = write_timeout_s
        self._statement_timeout_s = statement_timeout_s
        self._relaxed = relaxed
        self._limiter = trio.CapacityLimiter(size + 1)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._slots = 0  # connections that are open or being opened
        self._waiting = _Turns()
        self._lines: dict[str | None, Line] = {}
        self._pace = Pace()
        self._closed = False
        self._closed_trips = 0
        self._lost = 0
        self._reconnects = 0
        self._watch_scope = trio.CancelScope()
        self._proved = False  # that connections of this DSN keep their backends

    @property
    def trips(self) -> int:
        """Round trips so far, those of connections that are closed by now included."""
        return self._closed_trips + sum(conn.trips for conn in list(self._all))

    def statistics(self) -> PoolStatistics:
        """Any thread may ask: nothing here iterates over what the trio thread changes."""
        return PoolStatistics(len(self._all), len(self._idle), len(self._waiting), self.trips, self._reconnects)

    async def run(self, tenant_id: str | None, query: Query, *params: Param) -> list[Row]:
        """Run a statement that may safely run twice, and return its rows.

        Repeats it after a lost connection until the write timeout has passed, and up to 5 times after a
        deadlock or serialization failure. Raises Unavailable after that, else what the SQLSTATE stands for.
        """
        return await self.repeat(lambda: self._once(tenant_id, query, params))

    async def repeat(self, work: Callable[[], Awaitable[list[Row]]]) -> list[Row]:
        """Do what may safely be done twice, as `run` does a statement."""
        try:
            return await work()
        except (NotConnected, LostInFlight, Retryable) as exc:
            failed: FsError = exc
        backoff = _Backoff(trio.current_time() + self._write_timeout_s)
        conflicts = 0
        while True:
            if isinstance(failed, Retryable):
                conflicts += 1
                if conflicts > _RETRIES:
                    raise failed
            await backoff.pause(failed)
            with trio.move_on_at(backoff.deadline):
                try:
                    return await work()
                except (NotConnected, LostInFlight, Retryable) as exc:
                    failed = exc
                    continue
            raise failed

    async def write(
        self,
        tenant_id: str | None,
        query: Query,
        params: Sequence[Param],
        confirm: Callable[[], Awaitable[list[Row] | None]],
        attempt: Attempt | None = None,
        beside: tuple[str, str] | None = None,
    ) -> list[Row]:
        """Run one statement exactly once, and return its rows.

        Args:
            attempt: has a backend afterwards if the outcome is not known, whatever ended the call, a
                cancellation included; see `settle`.
            confirm: asks whether the statement was applied (by its `write_id`): the rows that it would have
                returned, or None. Called only when no backend can apply it any more, or when a repetition
                met the unique index.
            beside: agent and path of the row that it changes, where it may share a transaction with others
                (`db/group_commit.py`): it sets nothing for its transaction.

        Raises Unavailable when it was not applied within the write timeout, which is longer for much content;
        Unsettled when that could not be found out; else what the SQLSTATE stands for.
        """
        attempt = attempt or Attempt("")
        longest = _longest(params)
        # A server that is busy with 100 MB is not away.
        deadline = trio.current_time() + self._write_timeout_s + longest / _SLOWEST_BYTES_PER_S
        if beside is None or longest > LARGEST_BYTES:
            return await self._write_alone(tenant_id, query, params, confirm, attempt, deadline)

        async def alone() -> list[Row]:
            began, rows = self._pace.begin(), []
            try:
                rows = await self._write_alone(tenant_id, query, params, confirm, attempt, deadline)
                return rows
            finally:
                self._pace.end(began, rows)

        if not (attempt.announced or self._pace.quick):
            return await alone()
        line = self._lines.setdefault(tenant_id, Line())
        line.writes += 1
        member = Member(query, params, beside, longest, attempt)
        try:
            leads = await line.enter(member)
            if leads and len(members := line.take(member)) > 1:
                await self._write_together(tenant_id, members, deadline)
                line.leave(member)  # if it goes alone now, nobody waits for that
            return await alone() if member.rows is None else member.rows
        finally:
            line.leave(member)
            line.writes -= 1
            if not line.writes:
                del self._lines[tenant_id]

    async def _write_together(self, tenant_id: str | None, members: list[Member], deadline: float) -> None:
        """Apply all of them, or none; each is told in `rows` and its attempt."""
        ordered = sorted(members, key=attrgetter("place"))
        statements = [(IMPATIENT, ()), *[(member.query, member.params) for member in ordered], (PATIENT, ())]
        try:
            conn = await self._acquire_by(deadline)
            if conn is None:
                return
            for member in members:
                member.attempt.backend = conn.backend
            self._pace.begin()
            try:
                (_, *found, _) = await conn.run_together(statements, tenant_id)
                for member, rows in zip(ordered, found, strict=True):
                    member.rows, member.attempt.backend = rows, None
            except LostInFlight:
                pass  # each finds out for itself
            except FsError:
                for member in members:
                    member.attempt.backend = None  # the server's answer, or nothing was sent
            finally:
                self._pace.end(None, [])
                self._release(conn)
        except NotConnected:
            pass  # each tries for itself
        finally:
            for member in members[1:]:
                member.wake(leads=False)

    async def _write_alone(
        self,
        tenant_id: str | None,
        query: Query,
        params: Sequence[Param],
        confirm: Callable[[], Awaitable[list[Row] | None]],
        attempt: Attempt,
        deadline: float,
    ) -> list[Row]:
        """As `write`, which see. Where the attempt has a backend already, it may have been applied."""
        backoff = _Backoff(deadline)
        conflicts = 0
        doubtful = False
        while True:
            failed: FsError | None = None
            try:
                conn = await self._acquire_by(deadline) if attempt.backend is None else None
                if conn is not None:
                    attempt.backend = conn.backend
                    try:
                        rows = await conn.run(query, params, tenant_id)
                        attempt.backend = None
                        return rows
                    except LostInFlight:
                        raise
                    except FsError:
                        attempt.backend = None  # the server's answer, or nothing was sent
                        raise
                    finally:
                        self._release(conn)
            except (LostInFlight, NotConnected) as exc:
                failed = exc
            except Retryable as exc:
                failed = exc
                conflicts += 1
                if conflicts > _RETRIES:
                    raise
            except Exists:
                if doubtful and (found := await confirm()) is not None:
                    return found
                raise
            if attempt.backend is not None:  # a connection broke with the statement on its way
                doubtful = True
                until = max(deadline, trio.current_time()) + min(_SETTLE_S, self._write_timeout_s)
                settled = await self._settle(attempt, until, confirm)
                if settled is not None:
                    return settled
                failed = Unavailable("Postgres did not take the write in time; it was not applied")
            await backoff.pause(failed or Unavailable("Postgres did not take the write in time"))

    async def sync(self) -> None:
        """Return when everything that was committed before is on the server's disk, whoever committed it and however.
        Raises as `run`."""
        await self.run(None, _SYNC)

    async def settle(self, attempt: Attempt, confirm: Callable[[], Awaitable[list[Row] | None]]) -> list[Row] | None:
        """Find out, as `write` does, what became of a write whose outcome is not known: its rows if it was
        applied, None if it was not and cannot be any more. Raises Unsettled after the write timeout."""
        return await self._settle(attempt, trio.current_time() + self._write_timeout_s, confirm)

    async def end(self, backend: Backend) -> None:
        """Return when a backend can apply nothing any more. Raises Unsettled after the write timeout."""

        async def nothing() -> None:
            return None

        await self.settle(Attempt("", backend), nothing)

    @asynccontextmanager
    async def transaction(self, tenant_id: str | None) -> AsyncIterator[Transaction]:
        """A transaction: committed at the end of the block, rolled back when it raises.

        Raises Retryable or LostInFlight from its statements or its commit: whether to repeat is the
        caller's decision.
        """
        conn = await self._acquire_patiently()
        try:
            tx = Transaction(conn, tenant_id)
            try:
                yield tx
                await tx.commit()
            except BaseException:
                await tx.rollback()
                raise
        finally:
            self._release(conn)

    async def open_first(self) -> None:
        """Connect once, without patience, so that a wrong DSN is an error at the start; start the watch."""
        self._release(await self._acquire())
        trio.lowlevel.spawn_system_task(self._watch, name="fusefs.db.pool.watch")

    def close(self) -> None:
        """Close every connection; tasks that wait get Unavailable."""
        self._closed = True
        self._watch_scope.cancel()
        for conn in list(self._all):
            self._drop(conn)
        self._idle.clear()
        while self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop(), outcome.Value(None))

    async def _once(self, tenant_id: str | None, query: Query, params: Sequence[Param]) -> list[Row]:
        conn = await self._acquire()
        conn.wait_in_place = self.wait_in_place
        try:
            return await conn.run(query, params, tenant_id)
        finally:
            self._release(conn)

    async def _settle(
        self, attempt: Attempt, deadline: float, confirm: Callable[[], Awaitable[list[Row] | None]]
    ) -> list[Row] | None:
        backend = attempt.backend
        assert backend is not None
        failed: FsError | None = None
        with trio.move_on_at(deadline):
            backoff = _Backoff(deadline)
            while True:
                try:
                    if await self._terminate(backend):
                        rows = await confirm()
                        if rows is not None:
                            await self._await_standby()
                        attempt.backend = None
                        return rows
                    failed = LostInFlight("the old connection's backend does not end")
                except FsError as exc:
                    failed = exc  # whatever it is, it does not say what became of the write
                await backoff.pause(Unsettled(backend))
        raise Unsettled(backend) from failed

    async def _terminate(self, backend: Backend) -> bool:
        """End the server's process if it still exists, by pid and start; whether it is gone.

        On a connection of its own that stays the login: the daemon's role may not signal the login's
        backends, and the pool's other connections may be as lost as this one.
        """
        async with self._connection_aside() as conn:
            ((gone,),) = await conn.run(_TERMINATE, (backend.pid, backend.started_us))
            return bool(gone)

    async def _await_standby(self) -> None:
        """Return when a synchronous standby has what is committed; at once where none is configured.

        A backend that is ended while it waits for its standby has committed, and here only: to answer "written"
        then would be undone by the next failover. Whoever gives up waiting takes the question back, since a
        backend in that wait does not notice that its client is gone.
        """
        async with self._connection_aside() as conn:
            cancel = conn.pgconn.get_cancel()
            try:
                await conn.run(_SYNC)
            except trio.Cancelled:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CANCEL_S):
                    await trio.to_thread.run_sync(cancel.cancel, abandon_on_cancel=True)
                raise

    @asynccontextmanager
    async def _connection_aside(self) -> AsyncIterator[Connection]:
        conn = await Connection.open(
            self._dsn,
            origin=self._origin,
            role=None,
            connect_timeout_s=self._write_timeout_s,
            limiter=self._limiter,
        )
        self._closed_trips += 1
        try:
            yield conn
        finally:
            conn.close()

    async def _acquire_patiently(self) -> Connection:
        try:
            return await self._acquire()
        except NotConnected as exc:
            failed = exc
        backoff = _Backoff(trio.current_time() + self._write_timeout_s)
        while True:
            await backoff.pause(failed)
            try:
                return await self._acquire()
            except NotConnected as exc:
                failed = exc

    async def _acquire_by(self, deadline: float) -> Connection | None:
        """A connection for a write that is given up at a deadline, in trio's time; None: there was none until then."""
        conn = self._take_idle()
        if conn is None:
            with trio.move_on_at(deadline):
                conn = await self._acquire()
        if conn is not None:
            conn.deadline = deadline
            conn.wait_in_place = self.wait_in_place
        return conn

    async def _acquire(self) -> Connection:
        """The connection used last (its caches are warm), a new one, or, in turn, the next that is given back."""
        conn = self._take_idle()
        if conn is not None:
            return conn
        self._check_open()
        if self._slots >= self._size:
            given = await self._wait_turn()
            if given is not None:
                if given.alive():
                    return given
                self._drop(given, lost=True)
        else:
            self._slots += 1
        # From here on this task holds a slot without a connection.
        try:
            self._check_open()
            conn = await Connection.open(
                self._dsn,
                origin=self._origin,
                role=self._role,
                connect_timeout_s=self._write_timeout_s,
                statement_timeout_s=self._statement_timeout_s,
                limiter=self._limiter,
                prove_session=not self._proved,
                relaxed=self._relaxed,
            )
            self._proved = True
            if self._closed:
                conn.close()
            self._check_open()
        except BaseException:
            self._pass_slot()
            raise
        self._all.add(conn)
        if self._lost:
            self._lost -= 1
            self._reconnects += 1
        return conn

    def _take_idle(self) -> Connection | None:
        while self._idle:
            conn = self._idle.pop()
            if conn.alive():
                return conn
            self._drop(conn, lost=True)
            self._slots -= 1
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the program is closing its connections to Postgres")

    async def _wait_turn(self) -> Connection | None:
        """A connection that was given back, or None: a slot to open one in."""
        task, of = trio.lowlevel.current_task(), flow.get()
        self._waiting.add(of, task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._waiting.remove(of, task)
            return trio.lowlevel.Abort.SUCCEEDED

        given: Connection | None = await trio.lowlevel.wait_task_rescheduled(abort)
        return given

    def _release(self, conn: Connection) -> None:
        conn.deadline = math.inf
        if self._closed or not conn.idle:
            self._drop(conn, lost=True)
            self._pass_slot()
        elif self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop(), outcome.Value(conn))
        else:
            self._idle.append(conn)

    def _pass_slot(self) -> None:
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop(), outcome.Value(None))
        else:
            self._slots -= 1

    def _drop(self, conn: Connection, *, lost: bool = False) -> None:
        conn.close()
        if conn in self._all:
            self._all.remove(conn)
            self._closed_trips += conn.trips
            self._lost += lost

    async def _watch(self) -> None:
        """Give up connections whose write is out of time, and those whose server is silent beyond the
        statement timeout (a frozen host).

        One look a second instead of a deadline around each statement: that would cost 50 us each.
        """
        limit_s = self._statement_timeout_s + _HUNG_MARGIN_S if self._statement_timeout_s else math.inf
        with self._watch_scope:
            while True:
                await trio.sleep(1)
                now = trio.current_time()
                for conn in list(self._all):
                    if conn.busy_since is not None and (now > conn.deadline or now - conn.busy_since > limit_s):
                        conn.close()


@asynccontextmanager
async def open_database(
    dsn: str,
    *,
    origin: str,
    size: int = 8,
    write_timeout_s: float = 5.0,
    statement_timeout_s: float = 30.0,
    role: str | None = DAEMON_ROLE,
    relaxed: bool = False,
) -> AsyncIterator[Database]:
    """Open a pool on the DSN and connect once; everything is closed at the end.

    Args:
        origin: who announces; announcements of these connections carry it.
        size: connections at most; they are opened as they are needed.
        write_timeout_s: how long a write, or a read after a lost connection, is repeated.
        statement_timeout_s: after which the server ends a statement; 0 for never (long maintenance).
        role, relaxed: see `Connection.open`.

    Raises NotConnected at once when the first connection cannot be made; BadConfig for a pooler in transaction
    mode.
    """
    database = Database(
        dsn,
        origin=origin,
        role=role,
        size=size,
        write_timeout_s=write_timeout_s,
        statement_timeout_s=statement_timeout_s,
        relaxed=relaxed,
    )
    try:
        await database.open_first()
        yield database
    finally:
        database.close()
