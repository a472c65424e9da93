"""The files of one scope for code that is not on trio: ordinary threads, and asyncio through them.

Decided here and only here: where the trio of the adapters runs. Each `Portal` has one thread of its own, with a pool
of connections to Postgres on it; a call from any thread is carried there and waits for its answer. A thread that
asyncio or a library made is as good as the main one. Code on trio needs none of this: it uses `services.backend`
itself, and is told so when it tries.

Threading: every method may be called from any thread but one that runs trio, several at once. The thread is a daemon: a
program that forgets to close ends all the same, and what was answered is committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import trio

from fusefs.db import migrate
from fusefs.db.pool import open_database
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadScope, Unavailable
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.store import tenants

P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """The way to one agent's files. Open it with `with`, or close it.

    Args:
        dsn: of the database.
        tenant, agent, session: whose files; the names or ids of the first two.
        principal: who acts: `agent`, `member`, `admin` or `owner`. An agent cannot write `/memories` and `/skills`.
        limits: of files and paths.

    Raises BadScope, UnknownScope, Unavailable, SchemaMismatch when it cannot be opened.
    """

    def __init__(
        self,
        dsn: str,
        *,
        tenant: str,
        agent: str,
        session: str,
        principal: str = "agent",
        limits: Limits | None = None,
    ) -> None:
        self._process = os.getpid()
        self._closing = trio.Event()
        opened: Future[tuple[trio.lowlevel.TrioToken, Backend]] = Future()
        serve = partial(self._serve, dsn, (tenant, agent, session), _principal(principal), limits, opened)
        self._thread = threading.Thread(target=_run, args=(serve, opened), name="fusefs-portal", daemon=True)
        self._thread.start()
        self._token, self.backend = opened.result()

    def call(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an async function on the portal's thread, mostly a method of `backend`.

        Raises what it raises; Unavailable once the portal is closed, and in a process that was forked since it was
        opened; RuntimeError on a thread that runs trio.
        """
        if os.getpid() != self._process:
            # The thread stayed behind: nobody would answer.
            raise Unavailable("the way to the files belongs to the parent process", hint="Open one in each process.")
        try:
            return trio.from_thread.run(partial(work, *args, **kwargs), trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the way to the files is closed", hint="Open a new one.") from None

    def close(self) -> None:
        """End the thread and its connections. May be called again."""
        try:
            self._token.run_sync_soon(self._closing.set)
        except trio.RunFinishedError:
            pass
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _serve(
        self,
        dsn: str,
        names: tuple[str, str, str],
        principal: Principal,
        limits: Limits | None,
        opened: Future[tuple[trio.lowlevel.TrioToken, Backend]],
    ) -> None:
        tenant_name, agent_name, session = names
        async with open_database(dsn, origin=f"portal-{os.getpid()}") as db:
            await migrate.require_current_on(db)
            tenant = await tenants.find_tenant(db, tenant_name)
            agent = await tenants.find_agent(db, tenant.id, agent_name)
            scope = Scope(tenant.id, agent.id, session, principal)
            opened.set_result((trio.lowlevel.current_trio_token(), Backend(db, scope, limits)))
            await self._closing.wait()


def _principal(name: str) -> Principal:
    """Raises BadScope. `system` is the harness's own, and no adapter's."""
    if name not in ("agent", "member", "admin", "owner"):
        raise BadScope("the principal is not one of agent, member, admin, owner")
    return Principal(name)


def _run(serve: Callable[[], Awaitable[None]], opened: Future[tuple[trio.lowlevel.TrioToken, Backend]]) -> None:
    try:
        trio.run(serve)
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)
