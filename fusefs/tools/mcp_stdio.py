"""MCP on standard input and output, in trio.

Decided here and only here: what becomes of a line that is no message. The official package's own transport reads in a
thread, which keeps a process from ending while its stdin is open, and drops such a line without an answer, so that a
client waits for ever. Here each line that asks for something is answered:

- no JSON, too deep or over 32 MiB: a parse error, without an id;
- JSON, but no message (nor a batch, which the protocol no longer has): an invalid request, with its id if it has one;
- half of a surrogate pair in a string: the message goes on as it is, and whoever gets the string refuses it by name.

A client that closes our stdin still gets the answers to what it asked, for up to 10 s.

Threading: two tasks of the trio thread.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import trio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server
from mcp.shared.message import SessionMessage

from fusefs.tools.streams import MAX_LINE_BYTES, Lines, each_line, open_stream

Incoming = SessionMessage | Exception

_LAST_ANSWERS_S = 10.0
"""How long requests that run may take once the client has closed our stdin."""


async def serve(server: Server[Any], stdin: int, stdout: int) -> None:
    """Serve one client until it closes our stdin, or reads our stdout no more.

    Args:
        stdin, stdout: file descriptors; they stay open.
    """
    async with _transport(stdin, stdout) as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


@asynccontextmanager
async def _transport(
    stdin: int, stdout: int
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    to_server, incoming = anyio.create_memory_object_stream[Incoming](0)
    outgoing, from_server = anyio.create_memory_object_stream[SessionMessage](0)
    async with open_stream(stdin) as reading, open_stream(stdout) as writing, trio.open_nursery() as nursery:
        unanswered = _Unanswered()
        nursery.start_soon(_read, Lines(reading.receive_some), to_server, outgoing.clone(), unanswered)
        nursery.start_soon(_write, from_server, writing, unanswered, nursery.cancel_scope)
        yield incoming, outgoing


class _Unanswered:
    """The requests that run, so that a client which has said all it wanted (`printf … | fusefs mcp`) is answered."""

    def __init__(self) -> None:
        self._ids: set[types.RequestId] = set()
        self._changed = trio.Condition()

    def note(self, message: types.JSONRPCMessage) -> None:
        """A message from the client."""
        if isinstance(message, types.JSONRPCRequest):
            self._ids.add(message.id)
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            cancelled = (message.params or {}).get("requestId")
            if isinstance(cancelled, int | str):
                self._ids.discard(cancelled)

    async def answered(self, message: types.JSONRPCMessage) -> None:
        """A message to the client is on its way."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
            self._ids.discard(message.id)
            async with self._changed:
                self._changed.notify_all()

    async def wait_none(self) -> None:
        async with self._changed:
            while self._ids:
                await self._changed.wait()


async def _read(
    lines: Lines,
    to_server: MemoryObjectSendStream[Incoming],
    answers: MemoryObjectSendStream[SessionMessage],
    unanswered: _Unanswered,
) -> None:
    is_overlong = False
    async with to_server, answers:
        while True:
            found, whole = await lines.next()
            if not found:
                with trio.move_on_after(_LAST_ANSWERS_S):
                    await unanswered.wait_none()
                return
            if not whole:
                if not is_overlong:
                    await answers.send(_error(None, types.PARSE_ERROR, f"A line has over {MAX_LINE_BYTES} bytes"))
                is_overlong = not found.endswith(b"\n")
                continue
            for line in filter(bytes.strip, each_line(found)):
                try:
                    message = parse(line)
                except NoMessage as exc:
                    await answers.send(_error(exc.request_id, exc.code, str(exc)))
                else:
                    unanswered.note(message)
                    await to_server.send(SessionMessage(message))


class NoMessage(Exception):
    """A line that is no message; the text is for the client."""

    def __init__(self, text: str, code: int, request_id: types.RequestId | None = None) -> None:
        self.code, self.request_id = code, request_id
        super().__init__(text)


def parse(line: bytes) -> types.JSONRPCMessage:
    """The message in a line. Raises NoMessage."""
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass  # the package's parser does not say why; Python's takes what JSON's grammar allows
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise NoMessage("Not JSON in UTF-8", types.PARSE_ERROR) from None
    if not isinstance(found, dict):
        raise NoMessage("A message is one JSON object", types.INVALID_REQUEST)
    request_id = found.get("id")
    if isinstance(request_id, str) and not _is_text(request_id):
        raise NoMessage("The id is no text that an answer could carry", types.INVALID_REQUEST)
    try:
        return types.jsonrpc_message_adapter.validate_python(found, by_name=False)
    except (ValueError, RecursionError):
        is_usable = isinstance(request_id, int | str) and not isinstance(request_id, bool)
        raise NoMessage("Not a JSON-RPC message", types.INVALID_REQUEST, request_id if is_usable else None) from None


def _is_text(value: str) -> bool:
    return value.encode(errors="replace").decode() == value


def _error(request_id: types.RequestId | None, code: int, text: str) -> SessionMessage:
    error = types.ErrorData(code=code, message=text)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


async def _write(
    messages: MemoryObjectReceiveStream[SessionMessage],
    writing: trio.lowlevel.FdStream,
    unanswered: _Unanswered,
    serving: trio.CancelScope,
) -> None:
    async with messages:
        async for each in messages:
            try:
                await writing.send_all(_line(each.message))
            except trio.BrokenResourceError:
                serving.cancel()  # nobody reads our stdout any more
            await unanswered.answered(each.message)


def _line(message: types.JSONRPCMessage) -> bytes:
    try:
        return message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
    except ValueError:
        # What a client made up comes back to it (a progress token), half of a surrogate pair in it.
        plain = message.model_dump(by_alias=True, exclude_unset=True)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace") + b"\n"
