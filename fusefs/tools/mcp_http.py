"""MCP over streamable HTTP.

Decided here and only here: who may ask. By default only this machine can, at the loopback; a page in a browser cannot
(DNS rebinding: `Host` and `Origin` must be names of this server), and where a token is set, nobody without it. All
clients are one session of fusefs.

Threading: all in one nursery of the trio thread.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import hypercorn.trio
import trio
from hypercorn.config import Config
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings

from fusefs.rules.address import Address
from fusefs.rules.errors import BadConfig
from fusefs.tools.streams import MAX_LINE_BYTES

PATH = "/mcp"
_MAX_SESSIONS = 200
_GRACE_S = 1.0
"""How long requests that run may take once the server is to stop."""
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve(
    server: Server[Any],
    address: Address,
    *,
    token: str | None,
    names: Sequence[str],
    stop: trio.Event,
    ready: Callable[[str], None],
) -> None:
    """Serve until `stop` is set.

    Args:
        token: that each request must carry as `Authorization: Bearer …`; None for none.
        names: further names of this server, HOST or HOST:PORT, as a proxy in front of it passes them on.
        ready: is called once with the URL.

    Raises BadConfig for an address beyond this machine without a token, OSError where it cannot be opened.
    """
    if token is None and not is_loopback(address.host):
        raise BadConfig(
            f"{address} is reached from other machines, and there is no token",
            hint="Pass --token-file, or serve on the loopback behind a proxy that asks who is there.",
        )
    hosts = [variant for name in (*_LOOPBACK, _bracketed(address.host), *names) for variant in (name, f"{name}:*")]
    app: Any = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_LINE_BYTES,
        max_sessions=_MAX_SESSIONS,
        transport_security=TransportSecuritySettings(
            allowed_hosts=hosts,
            allowed_origins=[f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts],
        ),
    )
    if token is not None:
        app = _guarded(app, token)
    config = Config()
    config.bind = [str(address)]
    config.graceful_timeout = _GRACE_S
    config.accesslog = config.errorlog = None
    config.include_server_header = False
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait))
        ready(f"{url}{PATH}")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _guarded(app: Any, token: str) -> Any:
    """The application for those who have the token."""
    wanted = f"Bearer {token}".encode()

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], wanted):
                headers = [(b"www-authenticate", b'Bearer realm="fusefs"'), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
        await app(scope, receive, send)

    return guarded
