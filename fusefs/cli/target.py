"""What a command works on: an agent, and often a path of it.

Decided here and only here: how a path on the command line becomes an agent and a path of its namespace. With
--agent on the command line it is a path of the namespace; else a path inside a mounted directory; else, with an
agent from the environment or the file, again a path of the namespace. What is done inside a mount is done as that
mount's session, unless --session on the command line says another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fusefs.cli import database, mountpoint, options, registry
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadPath, BadScope
from fusefs.rules.scope import Principal, Scope, new_session

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.store.tenants import Agent, Tenant

T = TypeVar("T")

_WIDEST = Limits(max_path_depth=512, max_path_bytes=4096)


@dataclass(frozen=True, slots=True)
class Target:
    """An agent by name, a path of its namespace, and the database that has them. `session`: of the mount that the
    path is in, None where it is in none or in one of every session."""

    dsn: str | None
    tenant: str | None
    agent: str
    path: str
    session: str | None = None


def locate(path: str, values: dict[str, Any]) -> Target:
    """The target of a command with a PATH.

    Args:
        values: the command's options: dsn, tenant, agent.

    Raises BadPath when the path is in no mount of ours and no agent is named.
    """
    if options.was_said("agent"):
        return _named(path, values)
    found = registry.containing(mountpoint.canonical(path))
    if found is not None:
        return _mounted(*found, values)
    if values["agent"] is not None:
        return _named(path, values)
    raise BadPath(
        "not inside a mounted directory",
        path=path,
        hint="Name the agent with --tenant and --agent; PATH is then absolute in its namespace.",
    )


def whole_namespace(values: dict[str, Any]) -> Target:
    """The target of a command on a whole namespace that names no path: as `locate` finds it for the current directory.

    Raises BadScope when that is in no mount of ours and no agent is named.
    """
    if not options.was_said("agent"):
        found = registry.containing(_current_directory())
        if found is not None:
            return replace(_mounted(*found, values), path="/")
    if values["agent"] is None:
        raise BadScope(
            "no agent was named", hint="Pass --tenant and --agent, or change to a mounted directory (`fusefs status`)."
        )
    return whole_agent(None, values)


def _current_directory() -> str:
    try:
        return mountpoint.canonical(".")
    except FileNotFoundError:
        # It was deleted, or its mount is gone: then it is in none.
        return ""


def _named(path: str, values: dict[str, Any]) -> Target:
    return Target(values["dsn"], values["tenant"], values["agent"], paths.normalise(path, _WIDEST))


def _mounted(record: registry.Record, inside: str, values: dict[str, Any]) -> Target:
    dsn = values["dsn"] or record.dsn
    if record.agent_id is not None:
        return Target(dsn, record.tenant_id, record.agent_id, paths.normalise(inside, _WIDEST), record.session)
    parts = [part for part in inside.split("/") if part]
    # <tenant>/<agent>/…, in a host's mount <tenant>/<agent>/<session>/…
    above = 3 if record.layout == "host" else 2
    if len(parts) < above:
        raise BadPath("not inside an agent's directory", path=inside, hint="Name the agent with --tenant and --agent.")
    below = paths.normalise("/" + "/".join(parts[above:]), _WIDEST)
    return Target(dsn, parts[0], parts[1], below, parts[2] if above == 3 else None)


def whole_agent(name: str | None, values: dict[str, Any]) -> Target:
    """The target of a command on a whole namespace. Raises BadScope without an agent."""
    name = name or values["agent"]
    if name is None:
        raise BadScope("no agent was named", hint="Pass --tenant and --agent.")
    tenant, _, agent = name.rpartition("/")
    return Target(values["dsn"], tenant or values["tenant"], agent, "/")


def scope_of(
    agent: Agent, values: dict[str, Any], principal: Principal | None = None, session: str | None = None
) -> Scope:
    """The scope of a command: --as, else an owner who sees every session.

    Args:
        session: of the mount in which the command acts; only --session on the command line goes before it.
    """
    who = principal or Principal(values.get("as_") or "owner")
    if session is None or options.was_said("session"):
        session = values.get("session") or new_session()
    return Scope(agent.tenant_id, agent.id, session, who, all_sessions=who.administers)


async def find(db: Database, target: Target) -> Agent:
    """The agent of a target. Raises UnknownScope, BadConfig for a slug of several tenants."""
    from fusefs.store import tenants

    tenant = await tenants.find_tenant(db, target.tenant) if target.tenant is not None else None
    return await tenants.find_agent(db, tenant.id if tenant else None, target.agent)


def run_on(
    target: Target,
    values: dict[str, Any],
    work: Callable[[Database, Scope, str], Awaitable[T]],
    principal: Principal | None = None,
) -> T:
    """Run `work(db, scope, path)` on a target."""

    async def on_database(db: Database) -> T:
        agent = await find(db, target)
        return await work(db, scope_of(agent, values, principal, target.session), target.path)

    return database.run(database.resolve_dsn(target.dsn, values["data_dir"]), on_database)


async def agents_of(db: Database, tenant: str | None, agent: str | None) -> list[tuple[Tenant, Agent]]:
    """The agents that --tenant and --agent select: one, a tenant's, or all. Raises UnknownScope, BadConfig."""
    from fusefs.store import tenants

    if tenant is not None:
        chosen = [await tenants.find_tenant(db, tenant)]
    else:
        chosen = await tenants.list_tenants(db)
    if agent is not None:
        one = await tenants.find_agent(db, chosen[0].id if tenant is not None else None, agent)
        return [(await tenants.find_tenant(db, one.tenant_id), one)]
    return [(of, one) for of in chosen for one in await tenants.list_agents(db, of.id)]
