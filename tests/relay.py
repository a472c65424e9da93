"""A relay in front of Postgres that loses connections on command."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_BACKEND_KEY = re.compile(rb"(K\0\0\0.)....(?=.{4})", re.DOTALL)


class Which(Enum):
    """The connections that a command is for. One counts as the listener's from its first LISTEN on."""

    ALL = "all"
    LISTENER = "listener"
    STATEMENTS = "statements"

    def __contains__(self, pair: Pair) -> bool:
        return self is Which.ALL or (self is Which.LISTENER) == pair.listens


@dataclass(eq=False, slots=True)
class Pair:
    """A client and the server behind it. `stranded`: the server has gone, and the client is not told."""

    client: trio.SocketStream
    server: trio.SocketStream
    listens: bool = False
    stranded: bool = False
    answer_lost: bool = False
    held_up: bool = False

    def close(self) -> None:
        self.client.socket.close()
        self.server.socket.close()


class Relay:
    """Passes bytes between a TCP port on the loopback and Postgres' Unix socket.

    `lose_request` and `lose_answer` hold a marker: the next packet from a client that contains it is not
    passed on, or its answer is not; the connection is cut there. Each happens once. With `shut_after_loss` the
    server is out of reach from that moment on. `freeze_at` is such a marker too: from that packet on nothing is
    passed on, until `thaw`. `hold_answer` is one, too: that packet is passed on, and nothing of its connection comes
    back until `thaw`; with `hold_request` that packet waits as well. With `is_pooler` clients get a key for
    cancelling that names no backend, as poolers give it.
    """

    def __init__(self, dsn: str, nursery: trio.Nursery) -> None:
        self._target = conninfo_to_dict(dsn)
        self._nursery = nursery
        self._pairs: list[Pair] = []
        self._frozen: set[Which] = set()
        self._thawed = trio.Event()
        self.held = 0
        self._listener: trio.SocketListener | None = None
        self._scope = trio.CancelScope()
        self.port = 0
        self.accepted = 0
        self.lose_request: bytes | None = None
        self.lose_answer: bytes | None = None
        self.freeze_at: bytes | None = None
        self.hold_answer: bytes | None = None
        self.hold_request: bytes | None = None
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

    def cut(self, which: Which = Which.ALL) -> None:
        """Close connections: both ends are told."""
        for pair in [pair for pair in self._pairs if pair in which]:
            pair.close()
            self._pairs.remove(pair)
        self.cut_happened.set()

    def strand(self, which: Which = Which.ALL) -> None:
        """Leave connections half open: the server's end is closed, and the client's end takes what is sent and
        never answers. New connections work."""
        for pair in self._pairs:
            if pair in which:
                pair.stranded = True
                pair.server.socket.close()

    def freeze(self, which: Which = Which.ALL) -> None:
        """Pass nothing on any more, of new connections neither: a peer that is there and silent."""
        self._frozen.add(which)

    def thaw(self) -> None:
        """Pass on what was held up, and what comes."""
        self._frozen.clear()
        for pair in self._pairs:
            pair.held_up = False
        self._thawed.set()
        self._thawed = trio.Event()

    async def _pass(self, pair: Pair) -> None:
        """Return when the pair is not frozen."""
        self.held += 1
        try:
            while pair.held_up or any(pair in which for which in self._frozen):
                await self._thawed.wait()
        finally:
            self.held -= 1

    async def _lost(self) -> None:
        if self.shut_after_loss:
            await self.shut()

    async def _accept(self, listener: trio.SocketListener, scope: trio.CancelScope) -> None:
        with scope:
            await trio.serve_listeners(self._serve, [listener], handler_nursery=self._nursery)

    async def _serve(self, client: trio.SocketStream) -> None:
        self.accepted += 1
        scope = self._scope
        server = await trio.open_unix_socket(f"{self._target['host']}/.s.PGSQL.5432")
        if scope.cancel_called:
            # Refused while it was on its way: whoever shuts the relay wants nobody to get through.
            client.socket.close()
            server.socket.close()
            return
        pair = Pair(client, server)
        self._pairs.append(pair)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, pair, True)
                nursery.start_soon(self._pump, pair, False)
        finally:
            pair.close()

    async def _pump(self, pair: Pair, from_client: bool) -> None:
        source, sink = (pair.client, pair.server) if from_client else (pair.server, pair.client)
        try:
            while data := await source.receive_some(65536):
                if from_client and b"listen " in data:
                    pair.listens = True
                if from_client and self.freeze_at is not None and self.freeze_at in data:
                    self.freeze_at = None
                    self.freeze()
                if from_client and self.hold_request is not None and self.hold_request in data:
                    self.hold_request = None
                    pair.held_up = True
                await self._pass(pair)
                if from_client and self.hold_answer is not None and self.hold_answer in data:
                    self.hold_answer = None
                    pair.held_up = True
                if pair.stranded:
                    continue
                if from_client and self.lose_request is not None and self.lose_request in data:
                    self.lose_request = None
                    await self._lost()
                    break
                if from_client and self.lose_answer is not None and self.lose_answer in data:
                    self.lose_answer = None
                    pair.answer_lost = True
                elif not from_client and pair.answer_lost:
                    await self._lost()
                    break
                if not from_client and self.is_pooler:
                    data = _BACKEND_KEY.sub(b"\\g<1>\0\0\0\7", data)
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if pair.stranded and not from_client:
            return
        pair.close()
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

    def open(self) -> None:
        trio.from_thread.run(self.relay.open, trio_token=self._token)

    def thaw(self) -> None:
        trio.from_thread.run_sync(self.relay.thaw, trio_token=self._token)

    def lose(self, *, request: bytes | None = None, answer: bytes | None = None, all_of_it: bool = True) -> None:
        """Lose the next request that contains a marker, or the answer to it; with `all_of_it` the server too."""
        self.relay.lose_request, self.relay.lose_answer, self.relay.shut_after_loss = request, answer, all_of_it

    def cut(self, which: Which = Which.ALL) -> None:
        trio.from_thread.run_sync(self.relay.cut, which, trio_token=self._token)

    def strand(self, which: Which = Which.ALL) -> None:
        trio.from_thread.run_sync(self.relay.strand, which, trio_token=self._token)

    def freeze(self, which: Which = Which.ALL) -> None:
        trio.from_thread.run_sync(self.relay.freeze, which, trio_token=self._token)

    @property
    def held(self) -> int:
        """How many packets a freeze holds up."""
        return self.relay.held

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
