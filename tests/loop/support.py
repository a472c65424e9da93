"""Stand-in tools and a loop around them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from fusefs.harness.loop import Answer, Loop, LoopSettings
from fusefs.harness.model import ModelSettings, open_model
from fusefs.harness.stack import Middleware, Stack
from fusefs.services.tooling import Handler, Tool, ToolCall, ToolResult

KEY = "sk-test-0123456789"
BOUND_S = 20.0


def tool(name: str, run: Callable[[ToolCall], ToolResult] | Handler, *, read_only: bool = True) -> Tool:
    """A stand-in; `run` may await or not."""

    async def handler(given: ToolCall) -> ToolResult:
        result = run(given)
        return result if isinstance(result, ToolResult) else await result

    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "additionalProperties": False}
    return Tool(name, f"Does {name}.", schema, handler, read_only=read_only, destructive=not read_only)


def echo(given: ToolCall) -> ToolResult:
    return ToolResult(f"{given.name}: {json.dumps(given.arguments)}")


@asynccontextmanager
async def loop_of(
    *tools: Tool, middlewares: Sequence[Middleware] = (), settings: LoopSettings | None = None, **more: Any
) -> AsyncIterator[Loop]:
    async with open_model(ModelSettings("scripted", max_tokens=1000, silence_s=BOUND_S)) as model:
        with trio.fail_after(BOUND_S):
            yield Loop(model, Stack(middlewares, tools), settings=settings, **more)


async def run(*tools: Tool, settings: LoopSettings | None = None) -> tuple[Answer, Loop]:
    async with loop_of(*tools, settings=settings) as loop:
        return await loop.run("go"), loop


def results_of(loop: Loop) -> list[dict[str, object]]:
    """The results in the last message of the transcript that holds any."""
    for message in reversed(loop.messages):
        if isinstance(message["content"], list) and message["role"] == "user":
            return list(message["content"])
    return []


def assert_paired(loop: Loop) -> None:
    """Every call has its result in the very next message, in order, and there is no other result."""
    for message, following in zip(loop.messages, [*loop.messages[1:], {"role": "user", "content": []}], strict=True):
        if message["role"] == "assistant":
            asked = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
            content = following["content"] if asked else []
            assert [block["tool_use_id"] for block in content] == asked
