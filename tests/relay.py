"""A relay in front of Postgres that loses connections on command."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_BACKEND_KEY = re.compile(rb"(K\0\0\0.)....(?=.{4})", re.DOTALL)


class Relay:
    """Passes bytes between a TCP port on the loopback and Postgres' Unix socket.

    `lose_request` and `lose_answer` hold a marker: the next packet from a client that contains it is not
    passed on, or its answer is not; the connection is cut there. Each happens once. With `shut_after_loss` the
    server is out of reach from that moment on. With `is_pooler` clients get a key for cancelling that names no
    backend, as poolers give it.
    """

    def __init__(self, dsn: str, nursery: trio.Nursery) -> None:
        self._target = conninfo_to_dict(dsn)
        self._nursery = nursery
        self._pairs: list[tuple[trio.abc.Stream, trio.abc.Stream]] = []
        self._flowing = trio.Event()
        self._flowing.set()
        self._listener: trio.SocketListener | None = None
        self._scope = trio.CancelScope()
        self.port = 0
        self.accepted = 0
        self.lose_request: bytes | None = None
        self.lose_answer: bytes | None = None
        self.shut_after_loss = False
        self.is_pooler = False
        self.cut_happened = trio.Event()

    @property
    def dsn(self) -> str:
        rest = {key: value for key, value in self._target.items() if key not in ("host", "port")}
        return make_conninfo("", host="127.0.0.1", port=self.port, **rest)

    async def open(self) -> None:
        """Accept connections, on the same port as before if there was one."""
        (self._listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = self._listener.socket.getsockname()[1]
        self._scope = trio.CancelScope()
        self._nursery.start_soon(self._accept, self._listener, self._scope)

    async def refuse(self) -> None:
        """Refuse new connections, as a server with too many does; those that exist go on."""
        self._scope.cancel()
        assert self._listener is not None
        await self._listener.aclose()

    async def shut(self) -> None:
        """Refuse new connections, and cut those that exist."""
        await self.refuse()
        self.cut()

    def cut(self) -> None:
        for pair in self._pairs:
            for stream in pair:
                stream.socket.close()  # type: ignore[attr-defined]
        self._pairs.clear()
        self.cut_happened.set()

    def freeze(self) -> None:
        """Pass nothing on any more: a peer that is there and silent."""
        self._flowing = trio.Event()

    def thaw(self) -> None:
        self._flowing.set()

    async def _lost(self) -> None:
        if self.shut_after_loss:
            await self.shut()

    async def _accept(self, listener: trio.SocketListener, scope: trio.CancelScope) -> None:
        with scope:
            await trio.serve_listeners(self._serve, [listener], handler_nursery=self._nursery)

    async def _serve(self, client: trio.SocketStream) -> None:
        self.accepted += 1
        server = await trio.open_unix_socket(f"{self._target['host']}/.s.PGSQL.5432")
        pair = (client, server)
        self._pairs.append(pair)
        answer_lost = [False]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, client, server, True, answer_lost, pair)
                nursery.start_soon(self._pump, server, client, False, answer_lost, pair)
        finally:
            client.socket.close()
            server.socket.close()

    async def _pump(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        from_client: bool,
        answer_lost: list[bool],
        pair: tuple[trio.abc.Stream, trio.abc.Stream],
    ) -> None:
        try:
            while data := await source.receive_some(65536):
                await self._flowing.wait()
                if from_client and self.lose_request is not None and self.lose_request in data:
                    self.lose_request = None
                    await self._lost()
                    break
                if from_client and self.lose_answer is not None and self.lose_answer in data:
                    self.lose_answer = None
                    answer_lost[0] = True
                elif not from_client and answer_lost[0]:
                    await self._lost()
                    break
                if not from_client and self.is_pooler:
                    data = _BACKEND_KEY.sub(b"\\g<1>\0\0\0\7", data)
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        for stream in pair:
            stream.socket.close()  # type: ignore[attr-defined]
        if pair in self._pairs:
            self._pairs.remove(pair)
            self.cut_happened.set()


class Line:
    """A relay in a thread of its own, for tests that block. Use as a context manager."""

    def __init__(self, dsn: str) -> None:
        self._of = dsn
        self._started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), name="relay")
        self._stop: trio.Event
        self._token: trio.lowlevel.TrioToken
        self.relay: Relay

    @property
    def dsn(self) -> str:
        return self.relay.dsn

    def __enter__(self) -> Line:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_exc: object) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join(10)

    def shut(self) -> None:
        trio.from_thread.run(self.relay.shut, trio_token=self._token)

    def refuse(self) -> None:
        trio.from_thread.run(self.relay.refuse, trio_token=self._token)

    def freeze(self) -> None:
        trio.from_thread.run_sync(self.relay.freeze, trio_token=self._token)

    def cut(self) -> None:
        trio.from_thread.run_sync(self.relay.cut, trio_token=self._token)

    def open(self) -> None:
        trio.from_thread.run(self.relay.open, trio_token=self._token)

    def thaw(self) -> None:
        trio.from_thread.run_sync(self.relay.thaw, trio_token=self._token)

    def lose(self, *, request: bytes | None = None, answer: bytes | None = None, all_of_it: bool = True) -> None:
        """Lose the next request that contains a marker, or the answer to it; with `all_of_it` the server too."""
        self.relay.lose_request, self.relay.lose_answer, self.relay.shut_after_loss = request, answer, all_of_it

    async def _run(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with open_relay(self._of) as self.relay:
            self._started.set()
            await self._stop.wait()


@asynccontextmanager
async def open_relay(dsn: str) -> AsyncIterator[Relay]:
    async with trio.open_nursery() as nursery:
        relay = Relay(dsn, nursery)
        await relay.open()
        try:
            yield relay
        finally:
            nursery.cancel_scope.cancel()
