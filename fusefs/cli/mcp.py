"""`fusefs mcp`: serve an agent's files to MCP clients.

Decided here and only here: that a server is one session, and that a token is never an argument, where every user of the
machine could read it.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import database, options, target
from fusefs.cli.groups import FsCommand
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadConfig, BadScope
from fusefs.rules.scope import Principal, valid_session

if TYPE_CHECKING:
    import trio

    from fusefs.db.pool import Database

_TOKEN_FROM = "HANGO_FS_MCP_TOKEN"  # noqa: S105  (a name)
_TOKEN = re.compile(r"[!-~]{16,4096}")
_CONNECTIONS = 4
"""To Postgres: so many requests run at once, the others wait."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@click.command(cls=FsCommand)
@options.option(
    "--http",
    metavar="ADDR",
    help="Serve streamable HTTP at HOST:PORT, path /mcp; :PORT is on the loopback. Default: stdin and stdout.",
)
@options.option(
    "--token-file",
    metavar="PATH",
    type=click.Path(),
    help=f"File with the token that HTTP clients must send. Default: the variable {_TOKEN_FROM}, else none.",
)
@options.option(
    "--http-name",
    metavar="NAME",
    multiple=True,
    help="A further name by which HTTP clients may call this server, as HOST or HOST:PORT. Repeatable.",
)
@options.database
@options.scope
@options.serving
@options.limits
def mcp(http: str | None, token_file: str | None, http_name: tuple[str, ...], **values: Any) -> None:
    """Serve an agent's files to MCP clients, as tools and resources.

    On stdin and stdout for one client, or over HTTP for any number; all are one session. Needs fusefs[mcp].

    \b
    Example:
      fusefs mcp --tenant acme --agent coder
      fusefs mcp --tenant acme --agent coder --http :8765 --token-file /run/secrets/mcp
    """
    import trio

    from fusefs.rules.address import Address
    from fusefs.services.backend import Backend

    if values["session"] is not None and not valid_session(values["session"]):
        raise BadScope(f"{values['session']!r} is no session id")
    address = Address.parse(http) if http is not None else None
    token = _token(token_file) if address is not None else None
    named = target.whole_agent(None, values)
    try:
        from fusefs.tools import mcp_http, mcp_stdio
        from fusefs.tools.mcp import Door
    except ModuleNotFoundError as exc:
        raise BadConfig(f"the package {exc.name} is not installed", hint="Install fusefs[mcp].") from None

    _silence_package()

    async def serve(db: Database) -> None:
        agent = await target.find(db, named)
        scope = target.scope_of(agent, values, Principal(values["as_"] or "agent"))
        limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])
        server = Door(Backend(db, scope, limits)).server()
        async with trio.open_nursery() as nursery:
            stop = trio.Event()
            nursery.start_soon(_set_on_signal, stop)
            if address is None:
                nursery.start_soon(_cancel_when, stop, nursery.cancel_scope)
                await mcp_stdio.serve(server, 0, 1)
            else:
                await mcp_http.serve(server, address, token=token, names=http_name, stop=stop, ready=_say_where)
            nursery.cancel_scope.cancel()

    dsn = database.resolve_dsn(named.dsn, values["data_dir"])
    database.run(dsn, serve, size=_CONNECTIONS)


def _token(path: str | None) -> str | None:
    """The token that clients must send. Raises BadConfig for one that cannot be read, or is none."""
    if path is None:
        token = os.environ.get(_TOKEN_FROM)
        if token is None:
            return None
    else:
        try:
            token = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise BadConfig(f"the token cannot be read ({type(exc).__name__})", path=path) from None
    if not _TOKEN.fullmatch(token):
        raise BadConfig("a token has 16 characters at least, none of them blank", path=path)
    return token


def _silence_package() -> None:
    """The official package's log quotes what clients sent, contents of files included."""
    import logging

    package = logging.getLogger("mcp")
    package.addHandler(logging.NullHandler())
    package.propagate = False


def _say_where(url: str) -> None:
    click.echo(f"serving MCP at {url}", err=True)


async def _set_on_signal(stop: trio.Event) -> None:
    import trio

    with trio.open_signal_receiver(*_SIGNALS) as signals:
        async for _ in signals:
            stop.set()


async def _cancel_when(stop: trio.Event, scope: trio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()
