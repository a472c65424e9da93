"""The daemon of one mount: what is started, in which order, and how it ends (layer 7).

Decided here and only here: the order of start (exporters, Postgres, announcements, core, kernel, then "ready")
and of stop (kernel requests, buffers, sessions, unmount, exporters).

Threading: one trio nursery; the kernel's caches are told by threads of `fuse.notify`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING

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
from fusefs.rules.config import Durability, Settings
from fusefs.rules.errors import BadScope, MountFailed, Unavailable
from fusefs.rules.scope import Principal, Scope, new_session
from fusefs.store import tenants

if TYPE_CHECKING:
    from fusefs.rules.address import Address
    from fusefs.rules.events import HookRule
    from fusefs.telemetry.mounts import MountState

_STOP_S = 4.0
"""How long the last commits may take beyond the write timeout: the watch's second, settling one that was lost, and the
last steps. With the default write timeout a daemon ends within 10 s, whatever Postgres does."""

_PROBE_S = 5.0
"""How often the connection for announcements is asked where somebody looks at the answer: as often as when idle."""

_log = telemetry.get_logger()


class Layout(Enum):
    """What the mount point shows; see docs/index.md."""

    AGENT = "agent"
    HOST = "host"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class MountSpec:
    """What to mount, as the command line says it. Tenant and agent are slugs or UUIDs. `listen_dsn` is for
    announcements, where they need another way to the same database than the statements; `metrics` is where Prometheus
    asks."""

    mountpoint: str
    dsn: str
    listen_dsn: str | None
    layout: Layout
    tenant: str | None
    agent: str | None
    session: str | None
    create: bool
    principal: Principal
    hooks: tuple[HookRule, ...]
    settings: Settings
    allow_other: bool
    foreground: bool
    metrics: Address | None


@dataclass(frozen=True, slots=True)
class Ready:
    """What a mount turned out to be. `connection` is its number under /sys/fs/fuse/connections; `metrics` is where
    Prometheus asks."""

    session: str | None
    tenant_id: str | None
    agent_id: str | None
    connection: int
    metrics: Address | None


async def serve(spec: MountSpec, on_ready: Callable[[Ready], None]) -> None:
    """Mount, and serve until unmounted or told to stop by SIGTERM, SIGINT or SIGHUP.

    Raises BadConfig, Unavailable, SchemaMismatch, UnknownScope or MountFailed before `on_ready`; after the unmount
    Unavailable when Postgres did not take everything; in between only a fault of ours, and then the mount
    point stays: an empty directory in its place would look like "nothing there".
    """
    try:
        with _exporters(spec.metrics) as metrics:
            await _serve(spec, on_ready, metrics)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


def _exporters(address: Address | None) -> contextlib.AbstractContextManager[Address | None]:
    """See `telemetry.exporters`, which is loaded where somebody may want it: a mount starts faster without."""
    if address is None and not any(name.startswith("OTEL_") for name in os.environ):
        return contextlib.nullcontext()
    from fusefs.telemetry.exporters import exporting

    return exporting(address)


async def _serve(spec: MountSpec, on_ready: Callable[[Ready], None], metrics: Address | None) -> None:
    if spec.layout is Layout.HOST and os.geteuid() != 0:
        raise MountFailed(
            "a host's mount needs root", hint="Only root can keep its own view from following agents' symlinks."
        )
    origin = uuid.uuid4().hex[:12]
    async with open_database(
        spec.dsn,
        origin=origin,
        write_timeout_s=spec.settings.write_timeout_s,
        relaxed=spec.settings.durability is Durability.RELAXED,
    ) as db:
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
            if spec.hooks:
                from fusefs.services.hooks import Hooks

                hooks = Hooks(spec.hooks)
                db.on_event = hooks.offer
                nursery.start_soon(hooks.run)
            root, scope = await _root(spec, db, mounted)
            host = spec.layout is Layout.HOST
            kernel = KernelMount(
                spec.mountpoint,
                mounted,
                root,
                allow_other=spec.allow_other or host,
                nosymfollow=spec.layout is not Layout.AGENT,
            )
            caches.start(kernel.device.notify)
            db.wait_in_place = listener.wait_in_place = kernel.device.wait_in_place
            forget_counts = telemetry.register_file_count(mounted.file_counts)
            clean = False
            try:
                async with trio.open_nursery() as serving:
                    serving.start_soon(_stop_on_signal, kernel)
                    serving.start_soon(mounted.work_in_background)
                    serving.start_soon(mounted.attend_to_followers)
                    serving.start_soon(mounted.store_held)
                    if telemetry.is_measuring():
                        serving.start_soon(_observe, mounted, listener, db)
                    serving.start_soon(_say_ready, kernel, scope, metrics, on_ready)
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


async def _say_ready(
    kernel: KernelMount, scope: Scope | None, metrics: Address | None, on_ready: Callable[[Ready], None]
) -> None:
    connection = await kernel.wait_answer()
    if scope is None:
        on_ready(Ready(None, None, None, connection, metrics))
    else:
        on_ready(Ready(scope.session, scope.tenant_id, scope.agent_id, connection, metrics))


class _Probe:
    """Asks the connection for announcements every few seconds and notes how long the answer takes.

    Only where somebody looks at it: it is one more round trip while others are made. `lag_s` and `silent_s` are read in
    the exporter's thread.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._answered_at = perf_counter()
        self.lag_s: float | None = None

    @property
    def silent_s(self) -> float:
        """How long ago the last answer came. It grows while Postgres is silent, and while this thread hangs."""
        return perf_counter() - self._answered_at

    async def run(self) -> None:
        while True:
            asked_at = perf_counter()
            with contextlib.suppress(Unavailable):  # not live: the silence goes on
                await self._listener.barrier()
                self._answered_at = perf_counter()
                self.lag_s = self._answered_at - asked_at
            await trio.sleep(_PROBE_S)


async def _observe(mounted: Mounted, listener: Listener, db: Database) -> None:
    """Show the exporters this mount until it is cancelled."""
    from fusefs.telemetry.mounts import register_mount

    probe = _Probe(listener)
    forget = register_mount(lambda: _state(mounted, listener, db, probe))
    try:
        await probe.run()
    finally:
        forget()


def _state(mounted: Mounted, listener: Listener, db: Database, probe: _Probe) -> MountState:
    """For the exporters, in their thread: nothing here may iterate over what the trio thread changes."""
    from fusefs.telemetry.mounts import MountState

    pool = db.statistics()
    return MountState(
        live=listener.live,
        reconnects=listener.reconnects,
        lag_s=probe.lag_s,
        silent_s=probe.silent_s,
        pool_size=pool.open,
        pool_idle=pool.idle,
        pool_waiting=pool.waiting,
        trips=pool.trips,
        pool_reconnects=pool.reconnects,
        sessions=len(mounted.sessions),
        namespaces=mounted.namespace_count,
        nodes=mounted.node_count,
        inodes=len(mounted.table.inodes),
        handles=len(mounted.table.handles),
        content_cache_bytes=mounted.contents.bytes,
    )


async def _stop_on_signal(kernel: KernelMount) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            _log.info("daemon.stopping")
            kernel.stop()
