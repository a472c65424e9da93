"""`fusefs mcp-proxy`: run a stdio MCP server, and store its tools' oversized results.

Decided here and only here: what keeps the proxy from starting (a scope that names nobody), and what does not (a
database that does not answer: results are cut until it does).
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import database, options, target
from fusefs.cli.groups import FsCommand
from fusefs.cli.offload import mounted_store, storing
from fusefs.cli.output import printable
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadScope, Unavailable, outcome
from fusefs.rules.scope import Principal, valid_session

if TYPE_CHECKING:
    from fusefs.services.mounted_results import MountedResults
    from fusefs.services.offload import ResultStore
    from fusefs.tools.mcp_child import Child

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
"""As shells say it."""


@click.command("mcp-proxy", cls=FsCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@storing
@options.option(
    "--stop-timeout",
    metavar="SECONDS",
    type=options.Number(0.1, 300.0),
    default=5.0,
    show_default=True,
    help="How long the server may take to end once its client is gone, before each harder signal.",
)
def mcp_proxy(command: tuple[str, ...], token_limit: int, **values: Any) -> int:
    """Run a stdio MCP server, and store what its tools give that is too long for a model.

    Stands between an MCP client and the server COMMAND. An oversized tool result is stored, and the client gets a
    preview with the path; every other byte passes as it is. Results go through the mounted directory that --dir or the
    current directory lies in, as that mount's session; with --agent into the database, as --session. Ends with the
    server's exit code.

    \b
    Example:
      fusefs mcp-proxy --dir ~/work -- npx -y some-mcp-server
      fusefs mcp-proxy --tenant acme --agent coder --session s-1 -- ./server --flag
    """
    from fusefs.tools.mcp_child import Child

    store = mounted_store(values)
    if store is None and not valid_session(values["session"] or ""):
        raise BadScope("no session was named", hint="Pass --session: results belong to one.")
    try:
        server = Child(command)
    except OSError as exc:
        click.echo(f"fusefs: {printable(command[0])}: {exc.strerror}", err=True)
        return _NOT_FOUND if isinstance(exc, FileNotFoundError) else _NOT_EXECUTABLE
    # The server starts up while we import.
    with server:
        import trio

        return trio.run(_serve, server, store, token_limit, values)


async def _serve(server: Child, store: MountedResults | None, token_limit: int, values: dict[str, Any]) -> int:
    import trio

    from fusefs.tools.mcp_proxy import Proxy

    if store is not None:
        store = replace(store, call=trio.to_thread.run_sync)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        place = _Place(store, token_limit, values, stack)
        nursery.start_soon(place.open_early)
        proxy = Proxy(
            server,
            place.keep,
            limit_tokens=token_limit,
            run_id=secrets.token_hex(4),
            grace_s=values["stop_timeout"],
        )
        code = await proxy.serve(0, 1)
        nursery.cancel_scope.cancel()
    return code


class _Place:
    """Where results go: the mounted directory, or the database, opened while the server starts up."""

    def __init__(
        self, store: ResultStore | None, token_limit: int, values: dict[str, Any], stack: AsyncExitStack
    ) -> None:
        import trio

        self._store = store
        self._token_limit = token_limit
        self._values = values
        self._stack = stack
        self._opening = trio.Lock()

    async def open_early(self) -> None:
        """Open the database. Raises what is wrong for good: an agent that does not exist, a schema that does not
        fit."""
        try:
            await self._opened()
        except Unavailable as exc:
            click.echo(f"fusefs: {outcome(exc).text}; results are cut until it can be reached", err=True)

    async def keep(self, name: str, tool: str, text: str) -> str:
        """Store one result; its preview, or what is left of it where it cannot be stored."""
        from fusefs.services.offload import Offload, Unopened, unobserved

        try:
            store = await self._opened()
        except Unavailable as exc:
            store = Unopened(exc)
        offload = Offload(store, limit_tokens=self._token_limit, observe=unobserved)
        return (await offload.text(name, tool, text)).text

    async def _opened(self) -> ResultStore:
        async with self._opening:
            if self._store is None:
                self._store = await self._open()
        return self._store

    async def _open(self) -> ResultStore:
        import trio

        from fusefs.services.database_results import DatabaseResults

        values = self._values
        dsn = await trio.to_thread.run_sync(database.resolve_dsn, values["dsn"], values["data_dir"])
        db = await self._stack.enter_async_context(database.opened(dsn, size=1))
        agent = await target.find(db, target.Target(dsn, values["tenant"], values["agent"], "/"))
        scope = target.scope_of(agent, values, Principal.SYSTEM)
        return DatabaseResults(
            db, scope, Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])
        )
