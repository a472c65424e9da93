"""The proxy between an MCP client and a stdio MCP server: oversized tool results are stored, all else passes as it is.

Decided here and only here: how the bytes flow, what is held of them, and how the two ends come down together. What is
done to a message is `mcp_messages`'.

- Bytes go on in the order in which they came, both ways, as soon as a line is whole. A line that the server does not
  mean as a message (a stray print) is passed on too: the client would have got it without us.
- A line of up to 32 MiB is held, and its text while it is looked at. A longer one is passed on in pieces, unread.
- The client closes our stdin: the server's is closed; after a time of grace SIGTERM, after another SIGKILL, to its
  process group. SIGTERM, SIGINT and SIGHUP are handed to that group, and SIGKILL follows them.
- The server ends, however it does: what it printed is delivered, and its exit code is ours (128 + n after signal n).

Threading: all in one nursery of the trio thread.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

from fusefs.rules import tokens
from fusefs.tools.mcp_child import Child
from fusefs.tools.mcp_messages import Call, Calls, LargeLine, find_large
from fusefs.tools.streams import CHUNK_BYTES, Lines, each_line, open_stream

Store = Callable[[str, str, str], Awaitable[str]]
"""Stores a text, given a name for its call and the tool; returns what stands for it. Raises nothing: where the text
cannot be stored, it is cut."""

_SILENCE_S = 0.5
"""The server has ended: how long its stdout may stay silent, held open by a child of its own, before we end too."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Proxy:
    """Passes messages between a client and a started server.

    Args:
        limit_tokens: a result with more is stored (HF-10).
        run_id: goes into the names of stored results, since every client counts its ids from the beginning.
        grace_s: how long the server may take to end before a harder signal (DE-04).
    """

    def __init__(self, server: Child, store: Store, *, limit_tokens: int, run_id: str, grace_s: float) -> None:
        self._server = server
        self._store = store
        self._limit_tokens = limit_tokens
        self._run_id = run_id
        self._grace_s = grace_s
        self._calls = Calls()
        self._ending = trio.Event()
        self._ended = trio.Event()
        self._reading = trio.CancelScope()
        self._steps = [signal.SIGTERM, signal.SIGKILL]

    async def serve(self, stdin: int, stdout: int) -> int:
        """Pass messages until the server has ended; returns its exit code.

        Args:
            stdin, stdout: file descriptors of the client; they stay open.
        """
        from_server, to_server = open_stream(self._server.stdout), open_stream(self._server.stdin)
        self._server.close_pipes()
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            async with from_server, to_server, open_stream(stdin) as client, open_stream(stdout) as answers:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hand_on_signals, signals, nursery.cancel_scope)
                    nursery.start_soon(self._from_client, client, to_server)
                    nursery.start_soon(self._end_in_order, to_server)
                    nursery.start_soon(self._watch)
                    await self._from_server(from_server, answers)
                    await self._ended.wait()
                    nursery.cancel_scope.cancel()
        return self._server.reap()

    async def _from_client(self, client: trio.lowlevel.FdStream, to_server: trio.lowlevel.FdStream) -> None:
        lines = Lines(client.receive_some)
        is_read = True
        while True:
            found, whole = await lines.next()
            if not found:
                break
            if whole:
                self._calls.note(found)
            if is_read:
                try:
                    await to_server.send_all(found)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    is_read = False  # it wants no more, but may have something to say
        self._ending.set()

    async def _from_server(self, server: trio.lowlevel.FdStream, answers: trio.lowlevel.FdStream) -> None:
        async def receive(at_most: int) -> bytes:
            deadline = trio.current_time() + _SILENCE_S if self._ended.is_set() else math.inf
            with trio.CancelScope(deadline=deadline) as self._reading:
                return bytes(await server.receive_some(at_most))
            return b""

        lines = Lines(receive)
        try:
            while True:
                found, whole = await lines.next()
                if not found:
                    self._ending.set()  # it can answer nothing any more, even if it still runs
                    return
                await self._pass_on(found, whole, answers)
        except trio.BrokenResourceError:
            self._ending.set()  # nobody reads our stdout any more
        while await receive(CHUNK_BYTES):
            pass

    async def _pass_on(self, lines: bytes, whole: bool, answers: trio.lowlevel.FdStream) -> None:
        if not whole or len(lines) <= self._limit_tokens * tokens.BYTES_PER_TOKEN:
            await answers.send_all(lines)
            return
        for line in each_line(lines):
            large = find_large(line, self._calls, self._limit_tokens)
            await answers.send_all(line if large is None else await self._stored(large))

    async def _stored(self, large: LargeLine) -> bytes:
        for result in large.results:
            name = f"mcp-{self._run_id}-{result.call_id}"
            result.replace([await self._stand_in(name, result.call, text) for text in result.texts])
        return large.rewritten()

    async def _stand_in(self, name: str, call: Call, text: str) -> str:
        if not call.reads_stored:
            return await self._store(name, call.tool, text)
        # A character is four bytes at most, a token four bytes: what is left is within the limit.
        head, tail = text[: self._limit_tokens * 4 // 5], text[-(self._limit_tokens // 5) :]
        left_out = len(text) - len(head) - len(tail)
        return f"{head}\n[... {left_out} characters left out, of what is stored already; read less at once ...]\n{tail}"

    async def _watch(self) -> None:
        handle = self._server.exit_handle()
        try:
            await trio.lowlevel.wait_readable(handle)
        finally:
            os.close(handle)
        self._ended.set()
        self._reading.deadline = trio.current_time() + _SILENCE_S

    async def _end_in_order(self, to_server: trio.lowlevel.FdStream) -> None:
        await self._ending.wait()
        await to_server.aclose()
        for step in self._steps:
            with trio.move_on_after(self._grace_s):
                await self._ended.wait()
            if self._ended.is_set():
                return
            self._server.signal(step)

    async def _hand_on_signals(self, signals: AsyncIterator[int], everything: trio.CancelScope) -> None:
        async for number in signals:
            self._server.signal(number)
            if not self._ending.is_set():
                self._steps = [signal.SIGKILL]
                self._ending.set()
            # A client that does not read must not keep us: the server's last words get their time, no more.
            everything.deadline = min(everything.deadline, trio.current_time() + 3 * self._grace_s)
