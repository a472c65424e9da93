"""The table of cases' door through MCP, the command as its clients start it, and queries that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import mcp_types as types
import psycopg
import trio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from fusefs.db.pool import open_database
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.services.toolset import Toolset
from fusefs.tools.mcp import Door, uri_of
from tests import harness
from tests.services.cases import Refused, numbered
from tests.services.doors import ToolsDoor


def text_of(result: types.CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, types.TextContent)
    return block.text


class McpDoor(ToolsDoor):
    """The tools and resources of one session, through the official client."""

    def __init__(self, client: Client, backend: Backend) -> None:
        super().__init__(Toolset(backend))
        self.client = client

    async def call(self, name: str, **arguments: object) -> str:
        result = await self.client.call_tool(name, arguments)
        if result.is_error:
            raise Refused.from_text(text_of(result))
        return text_of(result)

    async def read(self, path: str) -> str:
        """By tool and as a resource, which must agree."""
        shown = numbered(await self.call("read_file", path=path))
        (contents,) = (await self.client.read_resource(uri_of(path))).contents
        assert isinstance(contents, types.TextResourceContents)
        assert shown.removesuffix("\n") == contents.text.removesuffix("\n").replace("\r\n", "\n")
        return contents.text


@asynccontextmanager
async def in_memory(namespace: harness.Namespace, *sessions: str) -> AsyncIterator[tuple[McpDoor, ...]]:
    """Doors of some sessions, each with a server and a client of its own, in this process."""
    async with open_database(namespace.dsn, origin="test", size=4) as db:
        ids = namespace.tenant_id, namespace.agent_id
        backends = [Backend(db, Scope(*ids, session, Principal.AGENT)) for session in sessions]
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(Door(backend).server())) for backend in backends]
            yield tuple(McpDoor(client, backend) for client, backend in zip(clients, backends, strict=True))


def arguments(namespace: harness.Namespace, *more: str) -> list[str]:
    return ["mcp", "--tenant", namespace.tenant, "--agent", namespace.agent, "--session", "s1", *more]


def over_stdio(namespace: harness.Namespace, env: dict[str, str]) -> Client:
    """A client that starts the command."""
    parameters = StdioServerParameters(command=str(harness.FUSEFS), args=arguments(namespace), env=env)
    return Client(stdio_client(parameters))


@contextmanager
def locked(namespace: harness.Namespace) -> Iterator[psycopg.Connection[Any]]:
    """Keep everybody else from the files until the end, or a rollback."""
    with psycopg.connect(namespace.dsn) as connection:
        connection.execute("lock table agent_files in access exclusive mode")
        yield connection


def waiting(namespace: harness.Namespace) -> int:
    """How many backends wait for a lock."""
    ((count,),) = namespace.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
    return int(count)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.02)


async def cancel_a_query(client: Client, namespace: harness.Namespace) -> None:
    """Cancel a call whose query waits for a lock, and see the query end while the lock is still held."""
    with locked(namespace):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call_tool, "grep", {"pattern": "x"})
            await until(lambda: waiting(namespace) == 1)
            nursery.cancel_scope.cancel()
        await until(lambda: waiting(namespace) == 0)
