"""`fusefs mount` and `fusefs host`: from options to a running daemon, in the background or not.

Decided here and only here: which layout the options ask for, and the order of a daemon's life as its
surroundings see it: mount point checked, served, noted in the registry, announced (ready line, systemd),
and forgotten again when it ends in good order.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import background, configfile, mountpoint, options, processes, registry, systemd
from fusefs.cli.groups import CONFIG_META, FsCommand
from fusefs.cli.output import printable
from fusefs.rules.config import Consistency, Durability, Limits, Settings, VersionCheck
from fusefs.rules.errors import BadConfig, BadScope
from fusefs.rules.scope import Principal

if TYPE_CHECKING:
    from fusefs.daemon import MountSpec, Ready
    from fusefs.rules.address import Address

SECRET = frozenset({"dsn", "listen_dsn"})
"""Parameters that a daemon gets by environment: everybody may read a command line."""


@click.command(cls=FsCommand)
@click.argument("mountpoint_", metavar="MOUNTPOINT")
@options.database
@options.scope
@options.mount_session
@options.option("--create", is_flag=True, help="Make the tenant and the agent if they do not exist.")
@options.mount_principal
@options.option("--all", "all_", is_flag=True, help="Show all tenants and agents, or those of --tenant; read-only.")
@options.option("--rw", is_flag=True, help="With --all: allow changes.")
@options.mounting
@click.pass_context
def mount(ctx: click.Context, **values: Any) -> None:
    """Mount the files of an agent as a directory.

    Runs in the background and returns when the directory is ready.

    \b
    Example:
      fusefs mount ~/work --tenant acme --agent coder --create
      fusefs mount /mnt/files --all
    """
    _mount(ctx, "mount", values)


@click.command(cls=FsCommand)
@click.argument("mountpoint_", metavar="MOUNTPOINT")
@options.database
@options.host_principal
@options.mounting
@click.pass_context
def host(ctx: click.Context, **values: Any) -> None:
    """Mount every session of every agent, for the containers of this machine.

    MOUNTPOINT/<tenant>/<agent>/<session>/ is a namespace as one session sees it; bind-mount that folder into
    the session's container. Implies --allow-other.

    \b
    Example:
      fusefs host /srv/agents --dsn postgresql://db.internal/files
      docker run --mount type=bind,src=/srv/agents/acme/coder/s-1,dst=/work …
    """
    values.update(tenant=None, agent=None, session=None, create=False, all_=False, rw=False, allow_other=True)
    _mount(ctx, "host", values)


def _mount(ctx: click.Context, command: str, values: dict[str, Any]) -> None:
    values["mountpoint_"] = mountpoint.canonical(values["mountpoint_"])
    for name in ("log_file", "data_dir", "rescue_dir"):
        if values[name] is not None:
            values[name] = os.path.abspath(values[name])
    _check(ctx, command, values)
    if values["foreground"]:
        _hide_password(ctx, command, values)
        _serve(ctx.obj, command, values)
    else:
        _start(ctx, command, values)


def _check(ctx: click.Context, command: str, values: dict[str, Any]) -> None:
    """Refuse options that cannot be followed or do not go together, before a daemon is started for them."""
    _address(values["metrics"])
    if command == "host":
        return
    given = click.core.ParameterSource.COMMANDLINE
    if values["all_"]:
        for name in ("agent", "session"):
            if values[name] is not None and ctx.get_parameter_source(name) is given:
                raise click.UsageError(f"--all and --{name} do not go together", ctx)
            values[name] = None
        if values["as_"] in ("agent", "member"):
            raise BadConfig("--all is for administrators", hint="Leave out --as, or pass --as admin.")
    elif values["tenant"] is None:
        raise BadScope(
            "no tenant was named",
            hint="Pass --tenant and --agent (and --create for new ones), or --all for everything.",
        )
    elif values["agent"] is None and values["session"] is not None and ctx.get_parameter_source("session") is given:
        raise BadScope("--session needs --agent")


def _start(ctx: click.Context, command: str, values: dict[str, Any]) -> None:
    log = Path(values["log_file"]) if values["log_file"] else registry.log_path(values["mountpoint_"])
    arguments, environment = _for_daemon(ctx, command, values)
    ready = background.start([*arguments, "--foreground", "--", values["mountpoint_"]], environment, log)
    of = [
        f"{name} {printable(str(ready[name]))}"
        for name in ("tenant", "agent", "session", "metrics")
        if ready.get(name) is not None
    ]
    click.echo(f"mounted {printable(values['mountpoint_'])}" + (f" ({', '.join(of)})" if of else ""))


def _for_daemon(ctx: click.Context, command: str, values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a daemon with the same options.

    Only what was given: the daemon reads the same defaults. The mount point goes last, after `--`.
    """
    arguments, environment = [command], {}
    for param in ctx.command.params:
        name = param.name or ""
        value = values.get(name)
        if not isinstance(param, click.Option) or value is None or value is False or name == "foreground":
            continue
        if ctx.get_parameter_source(name) is click.core.ParameterSource.DEFAULT:
            continue
        if name in SECRET:
            environment[str(param.envvar)] = str(value)
        else:
            flag = max(param.opts, key=len)
            arguments += [flag] if param.is_flag else [flag, str(value)]
    config = ctx.meta.get(CONFIG_META)
    if config is not None:
        environment["HANGO_FS_CONFIG"] = os.path.abspath(config)
    return arguments, environment


def _hide_password(ctx: click.Context, command: str, values: dict[str, Any]) -> None:
    """Start over with the DSN in the environment when the command line shows its password."""
    given = click.core.ParameterSource.COMMANDLINE
    spoken = [str(values[name]) for name in SECRET if values[name] and ctx.get_parameter_source(name) is given]
    if not spoken:
        return
    from fusefs.db.dsn import parse

    if not any(key.endswith(("password", "secret")) for dsn in spoken for key in parse(dsn)):
        return
    arguments, environment = _for_daemon(ctx, command, values)
    arguments += ["--foreground", "--", values["mountpoint_"]]
    os.execve(  # noqa: S606  (a list, no shell)
        sys.executable, [sys.executable, "-P", "-m", "fusefs.cli.main", *arguments], {**os.environ, **environment}
    )


def _serve(state: Any, command: str, values: dict[str, Any]) -> None:
    """Be the daemon."""
    state.ready_fd = ready_fd = background.take_ready_fd()
    state.log_path = values["log_file"] or ""
    where = mountpoint.prepare(values["mountpoint_"])
    _check_rescue_dir(where, values)
    if ready_fd is not None:
        state.log_path = values["log_file"] or str(registry.log_path(where))
    elif values["log_file"]:
        _log_to(Path(values["log_file"]))
    # Open until the process ends: it is what keeps a second mount away.
    registry.lock(where)
    spec = _spec(command, where, values)
    _set_up_logging(debug=state.debug)
    noted: list[registry.Record] = []

    def on_ready(ready: Ready) -> None:
        record = _record(spec, ready, state.log_path)
        registry.write(record)
        noted.append(record)
        background.report_ready(ready_fd, _ready_line(spec, ready))
        # Closed by now: the number may soon belong to another file.
        state.ready_fd = None
        systemd.notify("READY=1")

    import trio

    from fusefs.daemon import serve

    try:
        trio.run(serve, spec, on_ready)
    finally:
        systemd.notify("STOPPING=1")
    # Not after an error: then the mount stays, and its record tells the next command how to clear it.
    for record in noted:
        registry.remove(record)


def _check_rescue_dir(where: str, values: dict[str, Any]) -> None:
    """Refuse a rescue directory below the mount point: writing there at the mount's end would wait for itself."""
    chosen = os.path.realpath(values["rescue_dir"] or registry.rescue_directory())
    if os.path.commonpath((chosen, where)) == where:
        raise BadConfig(f"the rescue directory {chosen} is inside the mount point", hint="Choose another --rescue-dir.")


def _set_up_logging(debug: bool) -> None:
    from fusefs.telemetry import setup_logging

    setup_logging(json_lines=True, level="debug" if debug else "info")


def _log_to(path: Path) -> None:
    log_fd = background.open_log(path)
    os.dup2(log_fd, sys.stderr.fileno())
    os.close(log_fd)


def _ready_line(spec: MountSpec, ready: Ready) -> dict[str, Any]:
    return {
        "mountpoint": spec.mountpoint,
        "session": ready.session,
        "pid": os.getpid(),
        "tenant": spec.tenant,
        "agent": spec.agent,
        "tenant_id": ready.tenant_id,
        "agent_id": ready.agent_id,
        "metrics": _text(ready.metrics),
    }


def _address(text: str | None) -> Address | None:
    if text is None:
        return None
    from fusefs.rules.address import Address

    return Address.parse(text)


def _text(address: Address | None) -> str | None:
    return None if address is None else str(address)


def _record(spec: MountSpec, ready: Ready, log_path: str) -> registry.Record:
    from fusefs.db.dsn import redact

    return registry.Record(
        mountpoint=spec.mountpoint,
        pid=os.getpid(),
        process_start=processes.start_time(os.getpid()) or 0,
        connection=ready.connection,
        layout=spec.layout.value,
        tenant=spec.tenant,
        agent=spec.agent,
        tenant_id=ready.tenant_id,
        agent_id=ready.agent_id,
        session=ready.session,
        dsn=redact(spec.dsn),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        log=log_path,
        metrics=_text(ready.metrics),
    )


def _spec(command: str, where: str, values: dict[str, Any]) -> MountSpec:
    from fusefs.cli.database import resolve_dsn
    from fusefs.daemon import Layout, MountSpec

    everything = values["all_"] or (command == "mount" and values["agent"] is None)
    layout = Layout.HOST if command == "host" else Layout.ALL if everything else Layout.AGENT
    default = Principal.ADMIN if layout is Layout.ALL else Principal.AGENT
    return MountSpec(
        mountpoint=where,
        dsn=resolve_dsn(values["dsn"], values["data_dir"], prepare=values["create"]),
        listen_dsn=values["listen_dsn"],
        layout=layout,
        tenant=values["tenant"],
        agent=values["agent"],
        session=values["session"],
        create=values["create"],
        principal=Principal(values["as_"]) if values["as_"] else default,
        hooks=configfile.hooks_of(click.get_current_context().meta.get(CONFIG_META)),
        settings=_settings(values, read_only=layout is Layout.ALL and not values["rw"]),
        allow_other=values["allow_other"],
        foreground=True,
        metrics=_address(values["metrics"]),
    )


def _settings(values: dict[str, Any], read_only: bool) -> Settings:
    return Settings(
        limits=Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"]),
        consistency=Consistency(values["consistency"]),
        version_check=VersionCheck(values["version_check"]),
        durability=Durability(values["durability"]),
        require_read=values["require_read"],
        xattr=values["xattr"],
        read_only=read_only,
        uid=values["uid"],
        gid=values["gid"],
        max_nodes=values["max_nodes"],
        write_timeout_s=values["write_timeout"],
        rescue_dir=values["rescue_dir"] or str(registry.rescue_directory()),
    )
