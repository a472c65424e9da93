"""One connection to Postgres, waited on from trio: prepared statements through `psycopg.pq`.

Decided here and only here: how a statement travels. A connection stays in libpq's pipeline mode: the
tenant (only when it differs from the last one), the PREPARE (only the first time) and the statement, or several of one
transaction, leave together and cost one round trip.

A statement whose task is cancelled, or that fails in any way but by the server's own error, leaves the
connection in the middle of a result: it is closed then, and never used again.

Threading: belongs to the trio thread; one task at a time. Only connecting happens in a worker thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import trio
from psycopg import pq
from psycopg.conninfo import make_conninfo

from fusefs.db import dsn as dsns
from fusefs.db.failures import LostInFlight, NotConnected, from_result
from fusefs.db.queries import Query
from fusefs.db.values import Decoder, Param, decoder, encode
from fusefs.rules.errors import BadConfig, Unavailable

Row = tuple[Any, ...]

DAEMON_ROLE = "fusefs_daemon"
"""The role that row-level security binds; a login that may, becomes it on every pooled connection."""

_SET_TENANT = b"fusefs_set_tenant"
_IDLE = int(pq.TransactionStatus.IDLE)
_IN_ERROR = int(pq.TransactionStatus.INERROR)
_OK = int(pq.ConnStatus.OK)
_COMMAND_OK = int(pq.ExecStatus.COMMAND_OK)
_TUPLES_OK = int(pq.ExecStatus.TUPLES_OK)
_SYNC = int(pq.ExecStatus.PIPELINE_SYNC)

# A dead peer is noticed within 10 + 3 * 5 s when idle, and 20 s with data on the way (milliseconds here).
_CONNECTION_DEFAULTS = {
    "application_name": "fusefs",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}

# One round trip. No sequential scans: a connection keeps the plan of a statement until the next ANALYZE, and one made
# while a table had a page or two would read all that comes into it until then. Read committed: who is told of a change
# is looked up after the lock for it was taken (fusefs_announce_v1). pg_stat_get_activity, since the view
# pg_stat_activity takes 3 ms to plan on a fresh connection.
_SET_UP = """
select pid, (extract(epoch from backend_start) * 1000000)::bigint,
  case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end,
  set_config('fusefs.origin', %(origin)s, false), set_config('fusefs.tenant', '', false),
  set_config('fusefs.durable', current_setting('synchronous_commit'), false),
  case when %(relaxed)s then set_config('synchronous_commit', 'off', false) end,
  set_config('default_transaction_isolation', 'read committed', false),
  set_config('jit', 'off', false), set_config('enable_seqscan', 'off', false),
  set_config('statement_timeout', %(timeout_ms)s, false),
  set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
  set_config('tcp_keepalives_count', '3', false),
  case when pg_has_role(session_user, to_regrole(%(role)s), %(how)s) then set_config('role', %(role)s, false) end
from pg_stat_get_activity(pg_backend_pid())
"""
_ASK_PID = b"select pg_backend_pid()"
_ASKED = 16
# While a statement runs the server looks once a second whether we are still there: a cancelled statement
# would hold its locks to its end otherwise. Refused where the server's system cannot look (not Linux).
_LOOK_FOR_US = "select set_config('client_connection_check_interval', '1s', false)"


@dataclass(frozen=True, slots=True)
class Backend:
    """Which server process serves a connection. A pid is used again in time, the pair is not."""

    pid: int
    started_us: int


class Connection:
    """A connection in pipeline mode. Made by `open`; closed by `close`, or by itself when it breaks.

    Attributes: `backend`, `server_version` (150004 for 15.4), `trips` (round trips so far), `busy_since`
    (trio's time at which the statement in progress was sent, or None), `deadline` (trio's time at which the
    pool gives the statement in progress up), `timeline` (the server's, which a failover changes; None: unknown),
    `wait_in_place` (see `Database.wait_in_place`).
    """

    __slots__ = (
        "_fd",
        "_owner",
        "_pgconn",
        "_poll",
        "_prepared",
        "_tenant",
        "backend",
        "broken",
        "busy_since",
        "deadline",
        "server_version",
        "timeline",
        "trips",
        "wait_in_place",
    )

    def __init__(
        self, owner: psycopg.Connection[Row], backend: Backend, server_version: int, timeline: str | None
    ) -> None:
        self._owner = owner
        self._pgconn = owner.pgconn
        self._fd = owner.pgconn.socket
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        # The statements prepared, by name, with the decoders of their columns once a first result was seen.
        self._prepared: dict[str, tuple[Decoder, ...] | None] = {}
        self._tenant: str | None = ""
        self.backend = backend
        self.server_version = server_version
        self.timeline = timeline
        self.broken = False
        self.trips = 0
        self.busy_since: float | None = None
        self.deadline = math.inf
        self.wait_in_place: Callable[[int], bool] | None = None

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        origin: str,
        role: str | None = DAEMON_ROLE,
        connect_timeout_s: float = 5.0,
        statement_timeout_s: float = 30.0,
        limiter: trio.CapacityLimiter | None = None,
        prove_session: bool = False,
        relaxed: bool = False,
    ) -> Connection:
        """Connect in a worker thread and set the session up.

        Args:
            origin: who announces: announcements of this connection carry it.
            role: become this role if it exists and the login may; None stays the login.
            connect_timeout_s: for each host of the DSN, and once more to set the session up; libpq counts whole
                seconds, at least 2.
            statement_timeout_s: after which the server ends a statement; 0 for never.
            limiter: bounds the threads that connect.
            prove_session: find out whether a pooler in between keeps one backend for this connection; costs
                nothing where there is none.
            relaxed: commits do not wait for the server's disk.

        Raises NotConnected, in one sentence without the password; BadConfig for a DSN that cannot be read, or
        that leads to a pooler in transaction mode.
        """
        attempt = _Attempt(dsn, origin, role, connect_timeout_s, statement_timeout_s, prove_session, relaxed)
        try:
            with trio.fail_after(attempt.bound_s):
                owner, backend, server_version, timeline = await trio.to_thread.run_sync(
                    attempt.connect, abandon_on_cancel=True, limiter=limiter
                )
        except trio.Cancelled:
            attempt.abandon()
            raise
        except trio.TooSlowError as exc:
            attempt.abandon()
            raise NotConnected(dsns.failure_sentence(dsn, exc)) from None
        return cls(owner, backend, server_version, timeline)

    @property
    def backend_pid(self) -> int:
        """The server's process id for this connection."""
        return self.backend.pid

    @property
    def pgconn(self) -> pq.abc.PGconn:
        """libpq's connection, for `listen`."""
        return self._pgconn

    @property
    def fd(self) -> int:
        """The socket, for `listen`."""
        return self._fd

    @property
    def idle(self) -> bool:
        """Whether it is whole and outside a transaction, so that another may use it."""
        return not self.broken and self._pgconn.transaction_status == _IDLE

    @property
    def in_failed_transaction(self) -> bool:
        return not self.broken and self._pgconn.transaction_status == _IN_ERROR

    def alive(self) -> bool:
        """Whether an idle connection still looks usable; costs 1 us when nothing arrived.

        A server that went away has sent a farewell or closed the socket, so there is something to read.
        Asking before sending turns "lost in flight, outcome unknown" into a plain reconnect.
        """
        if self.broken:
            return False
        if self._poll.poll(0):
            try:
                self._pgconn.consume_input()
                self._pgconn.is_busy()  # parses what was read
            except psycopg.Error:
                self.close()
                return False
            if self._pgconn.status != _OK or self._poll.poll(0):
                self.close()
                return False
        return True

    def close(self) -> None:
        """Close the socket; a task that waits on it gets LostInFlight. Safe to call twice."""
        if not self.broken:
            self.broken = True
            with contextlib.suppress(RuntimeError):  # after the end of trio.run there is nobody to tell
                trio.lowlevel.notify_closing(self._fd)
            self._owner.close()

    def forget_tenant(self) -> None:
        """After a rollback the server's setting is back at what it was before the transaction."""
        self._tenant = None

    async def run(
        self, query: Query, params: Sequence[Param] = (), tenant: str | None = None, *, begin: bool = False
    ) -> list[Row]:
        """Run one prepared statement in one round trip and return its rows. See `run_together`."""
        (rows,) = await self.run_together(((query, params),), tenant, begin=begin)
        return rows

    async def run_together(
        self, statements: Sequence[tuple[Query, Sequence[Param]]], tenant: str | None = None, *, begin: bool = False
    ) -> list[list[Row]]:
        """Run prepared statements in one round trip and one transaction, and return the rows of each.

        Args:
            tenant: the tenant that row-level security lets through; None for none.
            begin: open a transaction first and leave it open; else all of them are applied, or none.

        Raises the error that the SQLSTATE stands for; LostInFlight when the connection broke.
        """
        if self.broken:
            raise NotConnected("the connection to Postgres is closed")
        encoded = [(query, *encode(params)) for query, params in statements]
        pgconn, prepared = self._pgconn, self._prepared
        wanted = tenant or ""
        sets_tenant = wanted != self._tenant
        # What is prepared on the way, with the place of the answer to it; and the places of the statements' answers.
        preparing: dict[str, int] = {}
        places: list[int] = []
        place = begin + sets_tenant
        try:
            self.busy_since = trio.current_time()
            if begin:
                pgconn.send_query_params(b"begin", None)
            if sets_tenant:
                pgconn.send_query_prepared(_SET_TENANT, [wanted.encode()])
            for query, values, formats in encoded:
                if query.name not in prepared and query.name not in preparing:
                    pgconn.send_prepare(query.name.encode(), query.text.encode())
                    preparing[query.name] = place
                    place += 1
                pgconn.send_query_prepared(query.name.encode(), values, formats, 1)
                places.append(place)
                place += 1
            pgconn.pipeline_sync()
            results = await self.finish_round()
        except (psycopg.Error, trio.ClosedResourceError) as exc:
            self.close()
            raise LostInFlight() from exc
        except BaseException:
            self.close()
            raise
        finally:
            self.busy_since = None

        for name, at in preparing.items():
            # It stays prepared even when the statement itself failed: PREPARE is not transactional.
            if at < len(results) and results[at].status == _COMMAND_OK:
                prepared[name] = None
        for result in results:
            if result.status not in (_TUPLES_OK, _COMMAND_OK):
                if sets_tenant or begin or pgconn.transaction_status != _IDLE:
                    self._tenant = None
                raise from_result(result)
        self._tenant = wanted
        return [self._rows(results[at], query.name) for at, (query, _) in zip(places, statements, strict=True)]

    async def command(self, text: bytes) -> str:
        """Run a statement without parameters or rows (commit, rollback); its command tag."""
        if self.broken:
            raise NotConnected("the connection to Postgres is closed")
        try:
            self.busy_since = trio.current_time()
            self._pgconn.send_query_params(text, None)
            self._pgconn.pipeline_sync()
            (result,) = await self.finish_round()
        except (psycopg.Error, trio.ClosedResourceError) as exc:
            self.close()
            raise LostInFlight() from exc
        except BaseException:
            self.close()
            raise
        finally:
            self.busy_since = None
        if result.status not in (_COMMAND_OK, _TUPLES_OK):
            raise from_result(result)
        return (result.command_status or b"").decode()

    async def finish_round(self) -> list[pq.abc.PGresult]:
        """Send what is buffered, then read results up to the answer to Sync: one per command sent.

        For `listen`, which sends its own commands. Raises psycopg's errors when the connection is lost.
        """
        pgconn, fd = self._pgconn, self._fd
        self.trips += 1
        # libpq reads by itself when the socket is full, so that the two sides cannot wait for each other.
        while pgconn.flush():
            await trio.lowlevel.wait_writable(fd)
        results: list[pq.abc.PGresult] = []
        wait_in_place = self.wait_in_place
        while True:
            while pgconn.is_busy():
                if wait_in_place is None or not wait_in_place(fd):
                    wait_in_place = None
                    await trio.lowlevel.wait_readable(fd)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:  # the end of one command's results
                if pgconn.status != _OK:
                    raise psycopg.OperationalError("the connection is lost")
                continue
            if result.status == _SYNC:
                return results
            results.append(result)

    def _rows(self, result: pq.abc.PGresult, name: str) -> list[Row]:
        if result.status != _TUPLES_OK:
            return []
        decoders = self._prepared[name]
        if decoders is None:
            decoders = self._prepared[name] = tuple(
                decoder(result.ftype(column), (result.fname(column) or b"?").decode())
                for column in range(result.nfields)
            )
        columns = list(enumerate(decoders))
        value = result.get_value
        return [
            tuple([None if (raw := value(row, column)) is None else decode(raw) for column, decode in columns])
            for row in range(result.ntuples)
        ]


class _Attempt:
    """One attempt to connect, in a worker thread that the waiting task may give up on.

    Whoever comes second closes the connection: the thread, when it finds itself abandoned, or the task,
    when the thread had finished already.
    """

    def __init__(
        self,
        dsn: str,
        origin: str,
        role: str | None,
        connect_timeout_s: float,
        statement_timeout_s: float,
        prove_session: bool,
        relaxed: bool,
    ) -> None:
        self._dsn = dsn
        self._prove_session = prove_session
        self._relaxed = relaxed
        self._origin = origin
        self._role = role
        self._connect_timeout_s = max(2, math.ceil(connect_timeout_s))
        self._statement_timeout_ms = str(round(statement_timeout_s * 1000))
        self._lock = threading.Lock()
        self._abandoned = False
        self._made: psycopg.Connection[Row] | None = None

    @property
    def bound_s(self) -> float:
        """After how many seconds the attempt has failed. libpq bounds the connecting itself, host by host; nothing
        else bounds what is asked on the new connection, where the peer may be there and silent."""
        return self._connect_timeout_s * (dsns.hosts(self._dsn) + 1)

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._made is not None:
                self._made.close()

    def connect(self) -> tuple[psycopg.Connection[Row], Backend, int, str | None]:
        owner = connect_sync(self._dsn, connect_timeout_s=self._connect_timeout_s)
        with self._lock:
            self._made = owner
            if self._abandoned:
                owner.close()
        try:
            return owner, *self._set_up(owner)
        except psycopg.Error as exc:
            owner.close()
            raise NotConnected(dsns.failure_sentence(self._dsn, exc)) from exc
        except BaseException:
            owner.close()
            raise

    def _set_up(self, owner: psycopg.Connection[Row]) -> tuple[Backend, int, str | None]:
        server_version = owner.info.server_version
        values = {
            "origin": self._origin,
            "timeout_ms": self._statement_timeout_ms,
            "role": self._role,
            "relaxed": self._relaxed,
            # Since Postgres 16 a member of a role may lack the right to become it.
            "how": "SET" if server_version >= 160000 else "MEMBER",
        }
        found = owner.execute(_SET_UP, values).fetchone()
        if found is None:
            raise Unavailable("Postgres does not know the backend of this connection")
        # A pooler gives its clients a key for cancelling of its own making: the pid in it is no backend's.
        if self._prove_session and owner.pgconn.backend_pid != found[0]:
            self._require_session(owner)
        with contextlib.suppress(psycopg.errors.InvalidParameterValue):
            owner.execute(_LOOK_FOR_US)
        pgconn = owner.pgconn
        prepared = pgconn.prepare(_SET_TENANT, b"select set_config('fusefs.tenant', $1, false)")
        if prepared.status != _COMMAND_OK:
            # Lost on the way, most likely, which libpq tells without an SQLSTATE; nothing was sent yet, in any case.
            raise psycopg.OperationalError(prepared.error_message.decode("utf-8", "replace"))
        pgconn.nonblocking = 1
        pgconn.enter_pipeline_mode()
        return Backend(*found[:2]), server_version, found[2]

    def _require_session(self, owner: psycopg.Connection[Row]) -> None:
        """Refuse a pooler that gives a backend to a client for a transaction or a statement only.

        What we set (tenant, role, origin) would stay with a backend that goes on to serve others, and our next
        statement would run under what those have set: another tenant's rights, an empty directory, a name in the
        announcements that is not ours. Nor could a lost write be settled, since no backend is its own.

        Told by asking two connections for their backends, in random order: in session mode each has one of its own.
        """
        with connect_sync(self._dsn, connect_timeout_s=self._connect_timeout_s) as other:
            seen: tuple[set[str], set[str]] = (set(), set())
            for _ in range(_ASKED):
                which = random.randrange(2)  # noqa: S311  (guards nothing: a pooler that takes turns must not fool us)
                result = (owner, other)[which].pgconn.exec_(_ASK_PID)
                if result.status != _TUPLES_OK:
                    raise psycopg.OperationalError(result.error_message.decode("utf-8", "replace"))
                seen[which].add((result.get_value(0, 0) or b"").decode())
        if max(map(len, seen)) > 1 or seen[0] & seen[1]:
            raise BadConfig(
                f"{dsns.place(self._dsn)} is a pooler in transaction mode, which cannot be used",
                hint="Connect to the server itself, or to a pooler in session mode.",
            )


def connect_sync(dsn: str, *, connect_timeout_s: int = 5) -> psycopg.Connection[Row]:
    """A plain connection in autocommit, blocking; for worker threads and for what runs outside trio.

    Raises NotConnected, in one sentence without the password; BadConfig for a DSN that cannot be read.
    """
    given = dsns.parse(dsn)
    extra = {key: value for key, value in _CONNECTION_DEFAULTS.items() if key not in given}
    if "gssencmode" not in given and "PGGSSENCMODE" not in os.environ:
        extra["gssencmode"] = "disable"  # else libpq asks for Kerberos first, which costs a connection
    extra.setdefault("connect_timeout", given.get("connect_timeout", str(connect_timeout_s)))
    try:
        return psycopg.connect(make_conninfo(dsn, client_encoding="utf8", **extra), autocommit=True)
    except psycopg.Error as exc:
        raise NotConnected(dsns.failure_sentence(dsn, exc), hint=dsns.failure_hint(exc)) from exc
