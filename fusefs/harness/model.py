"""A model behind Anthropic's Messages API: one request, one streamed reply.

Decided here and only here: how a request travels, where the key comes from, and what of the API's errors is passed on.
The key is read from the environment and leaves this process in the request's header only; an error carries the API's
name for it and the status, never its message or the request.

Threading: trio. A `Model` may be used by several tasks at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from fusefs.harness.replies import Assembly, Reply, error_type
from fusefs.rules.errors import BadConfig, ModelFailed

_API_VERSION = "2023-06-01"
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how long to wait.

    Args:
        name: the API's id of the model.
        max_tokens: of one reply.
        silence_s: how long the stream may say nothing, in seconds; the API sends a `ping` now and then.
    """

    name: str
    max_tokens: int = 8192
    silence_s: float = 120.0


class Model:
    """Made by `open_model`, which closes it."""

    def __init__(self, settings: ModelSettings, client: httpx2.AsyncClient) -> None:
        self.settings = settings
        self._client = client

    def request(self, body: Mapping[str, object]) -> dict[str, object]:
        """The whole body of a request, of its `system`, `messages` and `tools`."""
        return {"model": self.settings.name, "max_tokens": self.settings.max_tokens, "stream": True, **body}

    async def ask(self, request: Mapping[str, object]) -> Reply:
        """Send a request and collect the reply.

        A stream that breaks off after its first event gives what came, as a reply that is not complete.
        Raises ModelFailed where no reply began, or the stream holds an error.
        """
        # The API refuses a lone surrogate, and the file or the output of a command may hold one.
        content = json.dumps(request, ensure_ascii=False).encode(errors="replace")
        assembly = Assembly()
        try:
            async with self._client.stream("POST", "/v1/messages", content=content) as response:
                await _check_status(response)
                async for event in httpx2.EventSource(response):
                    assembly.feed(_decoded(event.data))
        except httpx2.RequestError as error:
            if not assembly.started:
                raise ModelFailed(f"the model's API gave no stream ({type(error).__name__})") from error
        return assembly.reply()


@asynccontextmanager
async def open_model(settings: ModelSettings) -> AsyncIterator[Model]:
    """A model, with the key and the address of the environment: `ANTHROPIC_API_KEY`, `ANTHROPIC_BASE_URL`.

    Raises BadConfig where there is no key, or one that no header can hold.
    """
    key = os.environ.get("ANTHROPIC_API_KEY", "").strip()
    # The HTTP library would quote what it refuses.
    if not key or not key.isascii() or not key.isprintable():
        raise BadConfig("ANTHROPIC_API_KEY is not set, or not a key")
    headers = {"x-api-key": key, "anthropic-version": _API_VERSION, "content-type": "application/json"}
    timeout = httpx2.Timeout(settings.silence_s, connect=_CONNECT_S)
    base_url = os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com"
    try:
        client = httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=timeout)
    except httpx2.InvalidURL as error:
        raise BadConfig("ANTHROPIC_BASE_URL is no address") from error
    async with client:
        yield Model(settings, client)


async def _check_status(response: httpx2.Response) -> None:
    if response.status_code == httpx2.codes.OK:
        return
    kind = error_type(_decoded(await response.aread()))
    raise ModelFailed(f"the model's API answered {response.status_code} with {kind}")


def _decoded(data: str | bytes) -> object:
    """The JSON of an event or of an error; None, which stands for nothing, where it is none."""
    try:
        decoded: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return decoded
