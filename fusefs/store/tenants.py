"""Tenants and agents: finding them by slug or UUID, adding and removing them.

Decided here and only here: what a slug may be, that a name which fits nothing or more than one agent is an error,
never a default (HF-15), and that a name which reads as a UUID is one. Adding and removing needs a database login that
owns the tables; the daemon's role may only read them.

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from fusefs.db.pool import Database
from fusefs.db.queries import query
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadConfig, Exists, FsError, UnknownScope
from fusefs.rules.paths import check_name
from fusefs.rules.scope import valid_session
from fusefs.store import namespaces

_LIST_TENANTS = query("list_tenants")
_FIND_TENANT = query("find_tenant")
_INSERT_TENANT = query("insert_tenant")
_DELETE_TENANT = query("delete_tenant")
_LIST_AGENTS = query("list_agents")
_FIND_AGENTS = query("find_agents")
_INSERT_AGENT = query("insert_agent")
_DELETE_AGENT = query("delete_agent")
_SET_QUOTAS = query("set_quotas")
_MEASURE_NAMESPACE = query("measure_namespace")

_NAMES = Limits()

NO_QUOTA = -1
"""Given to `set_quotas` to remove a quota; None leaves it as it is."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant; `created_at` in seconds since 1970. A tenant made by another program may have no slug."""

    id: str
    slug: str | None
    created_at: float
    agents: int

    @property
    def name(self) -> str:
        return _name(self.slug, self.id)


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent of a tenant; `created_at` in seconds since 1970."""

    tenant_id: str
    id: str
    slug: str | None
    created_at: float

    @property
    def name(self) -> str:
        return _name(self.slug, self.id)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a namespace holds. Bytes are of contents, before compression; a quota of None is none."""

    files: int
    bytes: int
    history_bytes: int
    changes: int
    conflicts: int
    quota_bytes: int | None
    history_quota_bytes: int | None


def as_uuid(name: str) -> str | None:
    """A UUID in its one form, or None for any other text."""
    try:
        return str(uuid.UUID(name))
    except ValueError:
        return None


def _name(slug: str | None, known_id: str) -> str:
    """What a tenant or an agent is called, also as a folder: its slug, unless another program set one that cannot
    name a folder (one such name would spoil the listing of all) or that reads as a UUID, perhaps somebody else's."""
    if not slug or as_uuid(slug) is not None:
        return known_id
    try:
        check_name(slug, _NAMES)
    except FsError:
        return known_id
    return slug


def check_slug(what: str, slug: str) -> None:
    """Refuse a slug that cannot name a folder of a host mount, or that reads as a UUID. Raises BadConfig."""
    if not valid_session(slug) or as_uuid(slug) is not None:
        raise BadConfig(
            f"not a valid slug for a {what}: {slug}",
            hint="Up to 64 of A-Z a-z 0-9 . _ -, starting with a letter or digit, not ending in .md, not a UUID.",
        )


async def list_tenants(db: Database) -> list[Tenant]:
    return [Tenant(*row) for row in await db.run(None, _LIST_TENANTS)]


async def find_tenant(db: Database, name: str) -> Tenant:
    """A tenant by slug or UUID. Raises UnknownScope."""
    rows = await db.run(None, _FIND_TENANT, as_uuid(name), name)
    if not rows:
        raise UnknownScope(f"there is no tenant {name}")
    return Tenant(*rows[0])


async def add_tenant(db: Database, slug: str) -> Tenant:
    """A new tenant. Raises Exists, BadConfig."""
    check_slug("tenant", slug)
    async with db.transaction(None) as tx:
        rows = await tx.run(_INSERT_TENANT, str(uuid.uuid4()), slug)
    if not rows:
        raise Exists(f"there is a tenant {slug} already")
    return Tenant(*rows[0])


async def remove_tenant(db: Database, tenant_id: str) -> None:
    """Delete a tenant with its agents, their files and their history. Raises UnknownScope."""
    async with db.transaction(tenant_id) as tx:
        if not await tx.run(_DELETE_TENANT, tenant_id):
            raise UnknownScope(f"there is no tenant {tenant_id}")


async def list_agents(db: Database, tenant_id: str) -> list[Agent]:
    return [Agent(*row) for row in await db.run(tenant_id, _LIST_AGENTS, tenant_id)]


async def find_agent(db: Database, tenant_id: str | None, name: str) -> Agent:
    """An agent by slug or UUID, of one tenant or, for an administrator, of any.

    Raises UnknownScope when there is none, BadConfig when several tenants have one of that slug.
    """
    rows = await db.run(tenant_id, _FIND_AGENTS, tenant_id, as_uuid(name), name)
    if not rows:
        raise UnknownScope(f"there is no agent {name}")
    if len(rows) > 1:
        raise BadConfig(f"{len(rows)} tenants have an agent {name}", hint="Name the tenant with --tenant.")
    return Agent(*rows[0])


async def add_agent(db: Database, tenant_id: str, slug: str) -> Agent:
    """A new agent with an empty namespace. Raises Exists, BadConfig."""
    check_slug("agent", slug)
    async with db.transaction(tenant_id) as tx:
        rows = await tx.run(_INSERT_AGENT, tenant_id, str(uuid.uuid4()), slug)
    if not rows:
        raise Exists(f"there is an agent {slug} already")
    agent = Agent(*rows[0])
    await namespaces.prepare(db, agent.tenant_id, agent.id)
    return agent


async def ensure(db: Database, tenant: str, agent: str) -> Agent:
    """The agent, made with its tenant where they do not exist. Raises UnknownScope for a UUID that is not there."""
    try:
        found_tenant = await find_tenant(db, tenant)
    except UnknownScope:
        if as_uuid(tenant) is not None:
            raise
        found_tenant = await _won_or_lost(db, tenant)
    try:
        return await find_agent(db, found_tenant.id, agent)
    except UnknownScope:
        if as_uuid(agent) is not None:
            raise
    try:
        return await add_agent(db, found_tenant.id, agent)
    except Exists:
        # Somebody else made it at the same time.
        return await find_agent(db, found_tenant.id, agent)


async def _won_or_lost(db: Database, slug: str) -> Tenant:
    try:
        return await add_tenant(db, slug)
    except Exists:
        return await find_tenant(db, slug)


async def remove_agent(db: Database, agent: Agent) -> None:
    """Delete an agent with its files and their history. Raises UnknownScope."""
    async with db.transaction(agent.tenant_id) as tx:
        if not await tx.run(_DELETE_AGENT, agent.tenant_id, agent.id):
            raise UnknownScope(f"there is no agent {agent.name}")


async def set_quotas(db: Database, agent: Agent, quota_bytes: int | None, history_quota_bytes: int | None) -> None:
    """Set the quotas of a namespace, in bytes; see NO_QUOTA."""
    await db.run(agent.tenant_id, _SET_QUOTAS, agent.tenant_id, agent.id, quota_bytes, history_quota_bytes)


async def measure(db: Database, agent: Agent) -> Usage:
    """What a namespace holds, its history included."""
    rows = await db.run(agent.tenant_id, _MEASURE_NAMESPACE, agent.tenant_id, agent.id)
    return Usage(*rows[0])
