"""The files of one session for MCP clients: tools and resources, by the official package, on any transport of its.

Decided here and only here: what of the tools and files is shown as what of MCP, and which mistakes are whose. What a
model gets wrong (a tool's name, its arguments, a path) is a result with `isError`, which the model reads. What a client
gets wrong (a message, a cursor, a resource's URI) is an error of the protocol. Neither ever holds a traceback.

- Calls that run at the same time are one batch (HF-08): MCP has no other.
- A cancelled request ends its query: the connection is dropped, and Postgres looks once a second whether it is there.
- A call that takes longer than a second sends progress each second, where the client gave a token.
- Nothing is stored for being long: the tools bound their answers, and reading must not store (L15).
- A resource that was read counts as seen, as with read_file: a client puts it into the model's context.

Threading: belongs to the trio thread; any number of requests at once.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import wraps
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import mcp_types as types
import trio
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from fusefs import telemetry
from fusefs.rules import paths
from fusefs.rules.config import MIB
from fusefs.rules.errors import TooLarge, outcome
from fusefs.rules.model import NodeRow
from fusefs.services.backend import Backend
from fusefs.services.history import History
from fusefs.services.inputs import unknown_tool
from fusefs.services.tooling import Tool, ToolCall
from fusefs.services.toolset import Toolset
from fusefs.store import search

URI_PREFIX = "fusefs://"
PAGE_FILES = 200
"""Resources on one page of a listing."""
MAX_RESOURCE_BYTES = 4 * MIB
"""A resource is one message; a larger file is read by lines with read_file."""
_PROGRESS_S = 1.0
_IDEMPOTENT = frozenset(("write_file", "restore_version"))
_INSTRUCTIONS = (
    "Files that stay when the conversation ends, shared with other sessions. Paths are absolute. A write is refused "
    "when the file changed since it was read. Old versions and deleted files can be read and restored."
)

Context = ServerRequestContext[Any, Any]
P = TypeVar("P")
R = TypeVar("R")

_log = telemetry.get_logger()


def _answered(
    handler: Callable[[Door, Context, P], Awaitable[R]],
) -> Callable[[Door, Context, P], Awaitable[R]]:
    """A handler out of which come only results and errors that may be read by anybody."""

    @wraps(handler)
    async def answer(door: Door, ctx: Context, params: P) -> R:
        try:
            return await handler(door, ctx, params)
        except MCPError:
            raise
        except Exception as exc:  # noqa: BLE001  (whatever it is, a client gets an answer and no traceback)
            told = outcome(exc)
            if told.http == 500:
                _log.exception("mcp.failed", method=ctx.method)
            code = types.INVALID_PARAMS if told.http < 500 else types.INTERNAL_ERROR
            raise MCPError(code, _clean(told.sentence_for_model)) from None

    return answer


class Door:
    """What MCP sees of one session.

    Args:
        backend: of the session's scope.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._toolset = Toolset(backend)
        history = History(backend, self._toolset.seen)
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in (*self._toolset.tools, *history.tools)}
        self._running = 0

    def server(self) -> Server[Any]:
        """A server for any number of connections of this session."""
        server: Server[Any] = Server(
            "fusefs",
            version=version("fusefs"),
            title="fusefs: files of this agent",
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        server.middleware.append(self._take_any_arguments)
        return server

    @_answered
    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_tool(tool) for tool in self._tools.values()])

    @_answered
    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await self._run(ctx, params.name, {} if params.arguments is None else params.arguments)

    async def _take_any_arguments(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Answer a call whose arguments are no object: the package would call that the client's mistake, and the model
        would not learn of it."""
        params = ctx.params or {}
        name, arguments = params.get("name"), params.get("arguments")
        if ctx.method != "tools/call" or not isinstance(name, str) or isinstance(arguments, dict | None):
            return await call_next(ctx)
        return await self._run(ctx, name, arguments)

    async def _run(self, ctx: Context, name: str, arguments: object) -> types.CallToolResult:
        tool = self._tools.get(name)
        if tool is None:
            result = unknown_tool(name, self._tools)
        else:
            self._running += 1
            try:
                async with _progress(ctx, name):
                    result = await tool.handler(ToolCall(str(ctx.request_id), name, arguments))
            finally:
                self._running -= 1
                if not self._running:
                    self._toolset.end_batch()
        text = types.TextContent(type="text", text=_clean(result.for_llm))
        return types.CallToolResult(content=[text], is_error=result.is_error)

    @_answered
    async def _list_resources(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        after = _path_of_cursor(params.cursor) if params is not None and params.cursor is not None else ""
        found = await search.list_files(self._backend.db, self._backend.scope, after, PAGE_FILES)
        following = _cursor(found.found[-1].path) if found.truncated else None
        return types.ListResourcesResult(resources=[_resource(node) for node in found.found], next_cursor=following)

    @_answered
    async def _list_templates(
        self, ctx: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="file", uri_template=f"{URI_PREFIX}/{{+path}}", description="A file by its absolute path."
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    @_answered
    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        path = self._backend.path(_path_of_uri(params.uri))
        _check_size(await self._backend.stat(path))
        found = await self._backend.read_bytes(path)
        _check_size(found.node)  # a symlink has led to it
        self._toolset.seen.note(path, found.seen)
        mime = mimetypes.guess_type(path)[0] or ("application/octet-stream" if found.text is None else "text/plain")
        contents: types.TextResourceContents | types.BlobResourceContents
        if found.text is not None:
            contents = types.TextResourceContents(uri=params.uri, mime_type=mime, text=found.text)
        else:
            blob = base64.b64encode(found.data).decode()
            contents = types.BlobResourceContents(uri=params.uri, mime_type=mime, blob=blob)
        return types.ReadResourceResult(contents=[contents])


@asynccontextmanager
async def _progress(ctx: Context, name: str) -> AsyncIterator[None]:
    """Tell the client each second that the call goes on, where it asked for that."""
    if not ctx.meta or ctx.meta.get("progress_token") is None:
        yield
        return

    async def tell() -> None:
        seconds = 0
        while True:
            await trio.sleep(_PROGRESS_S)
            seconds += 1
            await ctx.session.report_progress(seconds, message=f"{name}: {seconds} s")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        yield
        nursery.cancel_scope.cancel()


def _check_size(node: NodeRow) -> None:
    if node.size > MAX_RESOURCE_BYTES:
        raise TooLarge(
            f"a resource of {node.size} bytes is over {MAX_RESOURCE_BYTES}",
            path=node.path,
            hint="Read it in parts with the tool read_file.",
        )


def _tool(tool: Tool) -> types.Tool:
    annotations = types.ToolAnnotations(
        read_only_hint=tool.read_only,
        destructive_hint=tool.destructive,
        idempotent_hint=tool.read_only or tool.name in _IDEMPOTENT,
        open_world_hint=False,
    )
    return types.Tool(
        name=tool.name, description=tool.description, input_schema=dict(tool.input_schema), annotations=annotations
    )


def _resource(node: NodeRow) -> types.Resource:
    changed = datetime.fromtimestamp(node.mtime_ns / 1e9, UTC).isoformat(timespec="seconds")
    return types.Resource(
        uri=uri_of(node.path),
        name=paths.split(node.path)[1],
        title=node.path,
        mime_type=mimetypes.guess_type(node.path)[0],
        size=node.size,
        annotations=types.Annotations(last_modified=changed),
    )


def uri_of(path: str) -> str:
    """The URI of a file: `fusefs:///notes/plan.md`."""
    return f"{URI_PREFIX}{quote(path)}"


def _path_of_uri(uri: str) -> str:
    try:
        if not uri.startswith(f"{URI_PREFIX}/"):
            raise ValueError
        return unquote(uri.removeprefix(URI_PREFIX), errors="strict")
    except ValueError:
        raise MCPError(types.INVALID_PARAMS, f"Not a resource of this server: they begin with {URI_PREFIX}/") from None


def _cursor(path: str) -> str:
    return base64.urlsafe_b64encode(path.encode()).decode()


def _path_of_cursor(cursor: str) -> str:
    try:
        path = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
        if not path.startswith("/") or "\0" in path:
            raise ValueError
    except (ValueError, binascii.Error):
        raise MCPError(types.INVALID_PARAMS, "Not a cursor of this server: begin anew without one") from None
    return path


def _clean(text: str) -> str:
    """Text that JSON can carry."""
    return text.encode(errors="replace").decode()
