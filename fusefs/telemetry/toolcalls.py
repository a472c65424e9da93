"""The span around one call of a tool, and what is noted on it.

Decided here and only here: the names of that span and of its attributes, after OpenTelemetry's conventions for
generative AI. The spans `fs.{op}` of what the tool does lie below it. Neither arguments nor results are recorded.

A call may be wrapped twice, by the loop that asked for it and by the tool itself: it is one call, and has one span.

Threading: one call belongs to one task; the span is current in that task and in those that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fusefs.telemetry import metrics

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_ID_MAX = 128
"""Characters of a call's id that are recorded: it is the model's own, and may be anything."""


class ToolCallSpan:
    """One running call of a tool."""

    __slots__ = ("_error_type", "_is_fault", "_opened", "_token", "call_id", "name")

    def __init__(self, name: str, call_id: str) -> None:
        self.name = name
        self.call_id = call_id
        self._error_type = ""
        self._is_fault = False
        self._opened: tuple[Span, Token[Context]] | None = None
        self._token: Token[ToolCallSpan | None] | None = None

    def failed(self, error_type: str, *, is_fault: bool = False) -> None:
        """The call gave an error. What is said first stays: that is who knows most of it.

        Args:
            is_fault: ours or Postgres's. Only such a one makes a failed span: a refusal is an answer.
        """
        if not self._error_type:
            self._error_type = error_type
            self._is_fault = is_fault

    def __enter__(self) -> Self:
        if metrics.active is not None:
            self._token = _running.set(self)
            self._opened = metrics.active.start_span(f"execute_tool {self.name}")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, _tb: TracebackType | None
    ) -> None:
        if self._token is not None:
            _running.reset(self._token)
        if self._opened is None or metrics.active is None:
            return
        if exc_type is not None:
            self.failed(exc_type.__name__, is_fault=isinstance(exc, Exception))
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self.name,
            "gen_ai.tool.call.id": self.call_id[:_ID_MAX].encode(errors="replace").decode(),
        }
        if self._error_type:
            attributes["error.type"] = self._error_type
        metrics.active.end_span(self._opened, attributes, self._is_fault)


_running: ContextVar[ToolCallSpan | None] = ContextVar("fusefs_tool_call", default=None)


def tool_call(name: str, call_id: str) -> AbstractContextManager[ToolCallSpan]:
    """Wrap one call: `with tool_call("read_file", call.id) as span: …`.

    Args:
        name: of a tool that exists: a model's invention is no name for a span.
        call_id: the model's.
    """
    running = _running.get()
    if running is not None and (running.name, running.call_id) == (name, call_id):
        return nullcontext(running)
    return ToolCallSpan(name, call_id)


def add_event(name: str, attributes: Mapping[str, str | int]) -> None:
    """Note something on the span that is open in this task."""
    if metrics.active is not None:
        metrics.active.add_event(name, attributes)
