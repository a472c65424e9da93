"""Middleware: what is put around the tools of a loop, and in which order.

Decided here and only here (HF-20): the slots and their order, outermost first; which tool a call means; that no tool
gets what breaks its schema; and what becomes of a call that raises. The offload is just inside the file tools, and the
slots for sub-agents and summarisation inside of it, so that both see results that are offloaded already.

Threading: a stack belongs to one loop; `call` may run several times at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import ClassVar

from fusefs import telemetry
from fusefs.rules.errors import BadConfig, FsError
from fusefs.services.answers import error_result
from fusefs.services.inputs import BadInput, Inputs, unknown_tool
from fusefs.services.tooling import Handler, Tool, ToolCall, ToolResult, invalid_input

_log = telemetry.get_logger()


class Slot(IntEnum):
    """The places in a stack; the lowest is the outermost."""

    FILESYSTEM = 1
    OFFLOAD = 2
    SUBAGENTS = 3
    SUMMARISATION = 4


class Middleware:
    """What one slot holds. Each of its parts may be empty."""

    slot: ClassVar[Slot]

    def tools(self) -> Sequence[Tool]:
        """The tools that it brings."""
        return ()

    def prompt(self) -> str:
        """Its part of the system prompt: what no tool's description can say."""
        return ""

    def wrap(self, handler: Handler) -> Handler:
        """What runs every call instead of `handler`, those of others' tools included."""
        return handler

    def end_batch(self) -> None:
        """All calls of one reply were answered."""


class Stack:
    """Middlewares in the order of their slots, and the tools of all of them.

    Args:
        middlewares: at most one for each slot, in any order.
        tools: further tools, which every middleware wraps as well.

    Raises BadConfig for a slot that is taken twice or two tools of one name.
    """

    def __init__(self, middlewares: Iterable[Middleware], tools: Iterable[Tool] = ()) -> None:
        self.middlewares = tuple(sorted(middlewares, key=lambda middleware: middleware.slot))
        slots = [middleware.slot for middleware in self.middlewares]
        if len(set(slots)) < len(slots):
            raise BadConfig("two middlewares want the same slot")
        self.tools: dict[str, Tool] = {}
        for tool in [*(tool for middleware in self.middlewares for tool in middleware.tools()), *tools]:
            if tool.name in self.tools:
                raise BadConfig(f"two tools are called {tool.name}")
            self.tools[tool.name] = tool
        self._inputs = {name: Inputs(tool.input_schema) for name, tool in self.tools.items()}
        self._handler: Handler = self._dispatch
        for middleware in reversed(self.middlewares):
            self._handler = middleware.wrap(self._handler)

    def prompt(self) -> tuple[str, ...]:
        """The parts of the system prompt, those that are empty left out."""
        return tuple(part for part in (middleware.prompt() for middleware in self.middlewares) if part)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call through every wrapper. Never raises for what a tool or a middleware did."""
        name = call.name if call.name in self.tools else "unknown"
        with telemetry.tool_call(name, call.id) as span:
            try:
                result = await self._handler(call)
            except Exception as error:  # noqa: BLE001  (a tool is anybody's code; the model is told, the loop goes on)
                if not isinstance(error, FsError):
                    # Its kind alone: the tool may be anybody's, and what its message holds nobody knows.
                    _log.warning("tool.failed", tool=name, error=type(error).__name__)
                return error_result(error, span)
            if result.is_error:
                span.failed("refused")
            return result

    async def _dispatch(self, call: ToolCall) -> ToolResult:
        tool = self.tools.get(call.name)
        if tool is None:
            return unknown_tool(call.name, self.tools)
        try:
            arguments = self._inputs[call.name].check(call.arguments)
        except BadInput as error:
            return invalid_input(tool, str(error))
        return await tool.handler(replace(call, arguments=arguments))

    def end_batch(self) -> None:
        """Tell every middleware that all calls of one reply were answered."""
        for middleware in self.middlewares:
            middleware.end_batch()
