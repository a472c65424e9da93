"""`fusefs tenant` and `fusefs agent`: adding, listing and removing them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options, registry
from fusefs.cli.database import resolve_dsn, run
from fusefs.cli.groups import OrderedGroup
from fusefs.cli.output import confirm, human_bytes, plural, print_json, print_table, printable
from fusefs.rules.errors import BadScope, MountFailed

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.store.tenants import Agent, Tenant, Usage

quota = options.option("--quota", metavar="BYTES", type=click.IntRange(-1), help="Limit on all files; -1: none.")
history_quota = options.option(
    "--history-quota",
    metavar="BYTES",
    type=click.IntRange(-1),
    help="Limit on the history, kept by `fusefs gc`; -1: none.",
)


@click.group(cls=OrderedGroup)
def tenant() -> None:
    """Add, list and remove tenants.

    \b
    Example:
      fusefs tenant add acme
    """


@tenant.command("add")
@click.argument("slug")
@options.database
@options.as_json
def tenant_add(slug: str, dsn: str | None, data_dir: str | None, as_json: bool) -> None:
    """Add a tenant.

    \b
    Example:
      fusefs tenant add acme
    """

    async def work(db: Database) -> Tenant:
        from fusefs.store import tenants

        return await tenants.add_tenant(db, slug)

    made = run(resolve_dsn(dsn, data_dir), work, owner=True)
    if as_json:
        print_json({"id": made.id, "slug": made.slug})
    else:
        click.echo(f"added tenant {made.slug} ({made.id})")


@tenant.command("list")
@options.database
@options.as_json
def tenant_list(dsn: str | None, data_dir: str | None, as_json: bool) -> None:
    """List the tenants.

    \b
    Example:
      fusefs tenant list
    """

    async def work(db: Database) -> list[Tenant]:
        from fusefs.store import tenants

        return await tenants.list_tenants(db)

    found = run(resolve_dsn(dsn, data_dir), work)
    if as_json:
        print_json(
            [{"id": one.id, "slug": one.slug, "created_at": one.created_at, "agents": one.agents} for one in found]
        )
    else:
        print_table(
            ("TENANT", "AGENTS", "SINCE", "ID"),
            [(one.name, one.agents, _date(one.created_at), one.id) for one in found],
        )


@tenant.command("remove")
@click.argument("name", metavar="TENANT")
@options.database
@options.yes
def tenant_remove(name: str, dsn: str | None, data_dir: str | None, yes: bool) -> None:
    """Delete a tenant with its agents, their files and their history.

    \b
    Example:
      fusefs tenant remove acme --yes
    """

    async def look(db: Database) -> tuple[Tenant, list[tuple[Agent, Usage]]]:
        from fusefs.store import tenants

        found = await tenants.find_tenant(db, name)
        return found, [(one, await tenants.measure(db, one)) for one in await tenants.list_agents(db, found.id)]

    chosen = resolve_dsn(dsn, data_dir)
    found, agents = run(chosen, look)
    _refuse_mounted([one.id for one, _ in agents])
    what = f"{plural(len(agents), 'agent')}, {_holdings([usage for _, usage in agents])}"
    confirm(f"Delete tenant {found.name} with {what}?", yes)

    async def remove(db: Database) -> None:
        from fusefs.store import tenants

        await tenants.remove_tenant(db, found.id)

    run(chosen, remove, owner=True)
    click.echo(f"deleted tenant {printable(found.name)}: {what}")


@click.group(cls=OrderedGroup)
def agent() -> None:
    """Add, list and remove agents.

    \b
    Example:
      fusefs agent add coder --tenant acme
    """


@agent.command("add")
@click.argument("slug")
@options.database
@options.tenant
@quota
@history_quota
@options.as_json
def agent_add(slug: str, as_json: bool, **values: Any) -> None:
    """Add an agent with an empty namespace.

    \b
    Example:
      fusefs agent add coder --tenant acme --quota 1073741824
    """
    of = _required(values["tenant"])

    async def work(db: Database) -> Agent:
        from fusefs.store import tenants

        made = await tenants.add_agent(db, (await tenants.find_tenant(db, of)).id, slug)
        await tenants.set_quotas(db, made, values["quota"], values["history_quota"])
        return made

    made = run(resolve_dsn(values["dsn"], values["data_dir"]), work, owner=True)
    if as_json:
        print_json({"id": made.id, "slug": made.slug, "tenant_id": made.tenant_id})
    else:
        click.echo(f"added agent {made.slug} ({made.id})")


@agent.command("list")
@options.database
@options.tenant
@options.as_json
def agent_list(dsn: str | None, data_dir: str | None, tenant: str | None, as_json: bool) -> None:
    """List the agents of a tenant, or of all.

    \b
    Example:
      fusefs agent list --tenant acme
    """

    async def work(db: Database) -> list[tuple[Tenant, Agent]]:
        from fusefs.cli.target import agents_of

        return await agents_of(db, tenant, None)

    found = run(resolve_dsn(dsn, data_dir), work)
    if as_json:
        print_json(
            [
                {"id": one.id, "slug": one.slug, "created_at": one.created_at, "tenant_id": of.id, "tenant": of.slug}
                for of, one in found
            ]
        )
    else:
        print_table(
            ("TENANT", "AGENT", "SINCE", "ID"),
            [(of.name, one.name, _date(one.created_at), one.id) for of, one in found],
        )


@agent.command("remove")
@click.argument("name", metavar="AGENT")
@options.database
@options.tenant
@options.yes
def agent_remove(name: str, dsn: str | None, data_dir: str | None, tenant: str | None, yes: bool) -> None:
    """Delete an agent with its files and their history.

    \b
    Example:
      fusefs agent remove coder --tenant acme --yes
    """
    of = _required(tenant)

    async def look(db: Database) -> tuple[Tenant, Agent, Usage]:
        from fusefs.store import tenants

        owner = await tenants.find_tenant(db, of)
        found = await tenants.find_agent(db, owner.id, name)
        return owner, found, await tenants.measure(db, found)

    chosen = resolve_dsn(dsn, data_dir)
    owner, found, usage = run(chosen, look)
    _refuse_mounted([found.id])
    what = _holdings([usage])
    confirm(f"Delete agent {owner.name}/{found.name} with {what}?", yes)

    async def remove(db: Database) -> None:
        from fusefs.store import tenants

        await tenants.remove_agent(db, found)

    run(chosen, remove, owner=True)
    click.echo(f"deleted agent {printable(f'{owner.name}/{found.name}')}: {what}")


@agent.command("quota")
@click.argument("name", metavar="AGENT")
@options.database
@options.tenant
@quota
@history_quota
def agent_quota(name: str, **values: Any) -> None:
    """Set an agent's quotas. Mounts obey at once; what they show follows within a second.

    \b
    Example:
      fusefs agent quota coder --tenant acme --quota 1073741824
    """
    of = _required(values["tenant"])

    async def work(db: Database) -> Usage:
        from fusefs.store import tenants

        found = await tenants.find_agent(db, (await tenants.find_tenant(db, of)).id, name)
        await tenants.set_quotas(db, found, values["quota"], values["history_quota"])
        return await tenants.measure(db, found)

    usage = run(resolve_dsn(values["dsn"], values["data_dir"]), work)
    click.echo(f"quota {human_bytes(usage.quota_bytes)}, history {human_bytes(usage.history_quota_bytes)}")


def _required(tenant: str | None) -> str:
    if tenant is None:
        raise BadScope("no tenant was named", hint="Pass --tenant.")
    return tenant


def _refuse_mounted(agent_ids: list[str]) -> None:
    for record in registry.all_records():
        if record.alive and record.agent_id in agent_ids:
            raise MountFailed(
                f"the agent is mounted on {record.mountpoint}", hint=f"Run `fusefs umount {record.mountpoint}` first."
            )


def _holdings(usages: list[Usage]) -> str:
    files, size = sum(one.files for one in usages), sum(one.bytes for one in usages)
    changes, kept = sum(one.changes for one in usages), sum(one.history_bytes for one in usages)
    return (
        f"{plural(files, 'file')} ({human_bytes(size)}) and "
        f"{plural(changes, 'change')} of history ({human_bytes(kept)})"
    )


def _date(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()
