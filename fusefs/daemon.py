"""The daemon of one mount: what is started, in which order, and how it ends (layer 7).

Decided here and only here: the order of start (Postgres, announcements, core, kernel, then "ready")
and of stop (kernel requests, buffers, sessions, unmount).

Threading: one trio nursery; the kernel's caches are told by threads of `fuse.notify`.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import trio

from fusefs import telemetry
from fusefs.core.filesystem import Filesystem
from fusefs.core.layout import LayoutFs, Shape
from fusefs.core.mounted import Mounted
from fusefs.db import migrate
from fusefs.db.listen import Listener
from fusefs.db.pool import Database, open_database
from fusefs.fuse.notify import KernelCaches
from fusefs.fuse.serving import KernelMount
from fusefs.rules.config import Settings
from fusefs.rules.errors import BadScope, MountFailed, Unavailable
from fusefs.rules.scope import Principal, Scope, new_session
from fusefs.store import tenants

_STOP_S = 4.0
"""How long the last commits may take beyond the write timeout: the watch's second, settling one that was lost, and the
last steps. With the default write timeout a daemon ends within 10 s, whatever Postgres does."""

_log = telemetry.get_logger()


class Layout(Enum):
    """What the mount point shows; see docs/index.md."""

    AGENT = "agent"
    HOST = "host"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class MountSpec:
    """What to mount, as the command line says it. Tenant and agent are slugs or UUIDs. `listen_dsn` is for
    announcements, where they need another way to the same database than the statements."""

    mountpoint: str
    dsn: str
    listen_dsn: str | None
    layout: Layout
    tenant: str | None
    agent: str | None
    session: str | None
    create: bool
    principal: Principal
    settings: Settings
    allow_other: bool
    foreground: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """What a mount turned out to be. `connection` is its number under /sys/fs/fuse/connections."""

    session: str | None
    tenant_id: str | None
    agent_id: str | None
    connection: int


async def serve(spec: MountSpec, on_ready: Callable[[Ready], None]) -> None:
    """Mount, and serve until unmounted or told to stop by SIGTERM, SIGINT or SIGHUP.

    Raises Unavailable, SchemaMismatch, UnknownScope or MountFailed before `on_ready`; after the unmount
    Unavailable when Postgres did not take everything; in between only a fault of ours, and then the mount
    point stays: an empty directory in its place would look like "nothing there".
    """
    try:
        await _serve(spec, on_ready)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


async def _serve(spec: MountSpec, on_ready: Callable[[Ready], None]) -> None:
    if spec.layout is Layout.HOST and os.geteuid() != 0:
        raise MountFailed(
            "a host's mount needs root", hint="Only root can keep its own view from following agents' symlinks."
        )
    origin = uuid.uuid4().hex[:12]
    async with open_database(spec.dsn, origin=origin, write_timeout_s=spec.settings.write_timeout_s) as db:
        await migrate.require_current_on(db)
        caches = KernelCaches()
        mounted = Mounted(db, caches, spec.settings, origin, keeps_sessions=spec.layout is Layout.HOST)
        listener = mounted.listener = Listener(
            spec.listen_dsn or spec.dsn,
            announce_dsn=spec.dsn,
            origin=origin,
            on_notify=mounted.on_notify,
            on_lost=mounted.on_lost,
            on_live=mounted.on_live,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(listener.run)
            root, scope = await _root(spec, db, mounted)
            host = spec.layout is Layout.HOST
            kernel = KernelMount(
                spec.mountpoint,
                mounted,
                root,
                allow_other=spec.allow_other or host,
                nosymfollow=spec.layout is not Layout.AGENT,
            )
            caches.start()
            forget_counts = telemetry.register_file_count(mounted.file_counts)
            clean = False
            try:
                async with trio.open_nursery() as serving:
                    serving.start_soon(_stop_on_signal, kernel)
                    serving.start_soon(mounted.work_in_background)
                    serving.start_soon(_say_ready, kernel, scope, on_ready)
                    await kernel.serve()
                    serving.cancel_scope.cancel()
                clean = True
            finally:
                with trio.CancelScope(shield=True):
                    not_taken = await mounted.close(trio.current_time() + spec.settings.write_timeout_s + _STOP_S)
                forget_counts()
                caches.stop()
                kernel.close(unmount=clean)
                _log.info("daemon.stopped", clean=clean and not not_taken)
            nursery.cancel_scope.cancel()
            if not_taken:
                raise Unavailable(
                    f"the mount ended with {not_taken} writes that Postgres did not take",
                    hint="See `fusefs rescue list`, and the log for what could not be kept.",
                )


async def _root(spec: MountSpec, db: Database, mounted: Mounted) -> tuple[Filesystem, Scope | None]:
    """What the mount shows at its root, and the scope of a mount of one session."""
    if spec.layout is not Layout.AGENT:
        only = None if spec.tenant is None else (await tenants.find_tenant(db, spec.tenant)).id
        shape = Shape(spec.layout is Layout.HOST, spec.principal, only)
        return LayoutFs(mounted, shape), None
    if spec.tenant is None or spec.agent is None:
        raise BadScope("name a tenant and an agent")
    if spec.create:
        # The daemon's role may not make tenants: the login's own role does.
        async with open_database(spec.dsn, origin=mounted.origin, size=1, role=None) as admin:
            agent = await tenants.ensure(admin, spec.tenant, spec.agent)
    else:
        tenant = await tenants.find_tenant(db, spec.tenant)
        agent = await tenants.find_agent(db, tenant.id, spec.agent)
    scope = Scope(agent.tenant_id, agent.id, spec.session or new_session(), spec.principal)
    return await mounted.open_session(scope, index=0), scope


async def _say_ready(kernel: KernelMount, scope: Scope | None, on_ready: Callable[[Ready], None]) -> None:
    connection = await kernel.wait_answer()
    if scope is None:
        on_ready(Ready(None, None, None, connection))
    else:
        on_ready(Ready(scope.session, scope.tenant_id, scope.agent_id, connection))


async def _stop_on_signal(kernel: KernelMount) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            _log.info("daemon.stopping")
            kernel.stop()
