"""The stack: the order of its slots (HF-20), and the span around every call."""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence

import pytest
import trio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fusefs import telemetry
from fusefs.harness.stack import Middleware, Slot, Stack
from fusefs.rules.errors import BadConfig, StaleVersion
from fusefs.rules.scope import Principal, Scope
from fusefs.services.tooling import Handler, Tool, ToolCall, ToolResult
from tests.loop.support import echo, tool

SCOPE = Scope(str(uuid.uuid4()), str(uuid.uuid4()), "s1", Principal.AGENT)


def middleware_at(slot: Slot, name: str, order: list[str]) -> Middleware:
    class Named(Middleware):
        def tools(self) -> Sequence[Tool]:
            return (tool(f"tool_{name}", echo),)

        def prompt(self) -> str:
            return f"prompt {name}"

        def wrap(self, handler: Handler) -> Handler:
            async def wrapped(given: ToolCall) -> ToolResult:
                order.append(name)
                return await handler(given)

            return wrapped

        def end_batch(self) -> None:
            order.append(f"end {name}")

    Named.slot = slot
    return Named()


async def test_the_order_of_the_stack_is_fixed() -> None:
    assert [slot.name for slot in sorted(Slot)] == ["FILESYSTEM", "OFFLOAD", "SUBAGENTS", "SUMMARISATION"]
    order: list[str] = []
    shuffled = [Slot.SUMMARISATION, Slot.OFFLOAD, Slot.FILESYSTEM, Slot.SUBAGENTS]
    stack = Stack([middleware_at(slot, slot.name, order) for slot in shuffled], [tool("own", echo)])
    result = await stack.call(ToolCall("1", "own", {}))
    stack.end_batch()
    assert result.for_llm == "own: {}"
    names = ["FILESYSTEM", "OFFLOAD", "SUBAGENTS", "SUMMARISATION"]
    assert order == [*names, *(f"end {name}" for name in names)]
    assert stack.prompt() == tuple(f"prompt {name}" for name in names)
    assert list(stack.tools) == [*(f"tool_{name}" for name in names), "own"]


def test_a_slot_holds_one() -> None:
    with pytest.raises(BadConfig, match="same slot"):
        Stack([middleware_at(Slot.OFFLOAD, "a", []), middleware_at(Slot.OFFLOAD, "b", [])])
    with pytest.raises(BadConfig, match="two tools are called own"):
        Stack([], [tool("own", echo), tool("own", echo)])


async def test_a_middleware_that_raises_is_an_error_result(log: io.StringIO) -> None:
    class Failing(Middleware):
        slot = Slot.OFFLOAD

        def wrap(self, handler: Handler) -> Handler:
            async def wrapped(given: ToolCall) -> ToolResult:
                raise OSError("/secret/place")

            return wrapped

    result = await Stack([Failing()], [tool("own", echo)]).call(ToolCall("1", "own", {}))
    assert (result.is_error, result.for_llm) == (True, "Error: internal error (OSError)")
    assert "secret" not in log.getvalue()


# -- Spans ---------------------------------------------------------------------------------------------


async def test_the_span_of_a_call(spans: InMemorySpanExporter) -> None:
    async def read(_given: ToolCall) -> ToolResult:
        with telemetry.operation("read", SCOPE, "/a"):
            await trio.lowlevel.checkpoint()
        telemetry.add_event("tool.noted", {"hango.fs.path": "/a"})
        return ToolResult("x")

    stack = Stack([], [tool("read_file", read)])
    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(stack.call, ToolCall(f"toolu_{number}" + "\ud800" * 200, "read_file", {}))
    by_id = {span.context.span_id: span for span in spans.get_finished_spans() if span.context}
    calls = [span for span in by_id.values() if span.name == "execute_tool read_file"]
    reads = [span for span in by_id.values() if span.name == "fs.read"]
    assert {span.parent.span_id for span in reads if span.parent} == {
        span.context.span_id for span in calls if span.context
    }
    assert {str(dict(span.attributes or {})["gen_ai.tool.call.id"])[:9] for span in calls} == {"toolu_0??", "toolu_1??"}
    for span in calls:
        attributes = dict(span.attributes or {})
        assert len(str(attributes.pop("gen_ai.tool.call.id"))) == 128
        assert attributes == {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "read_file"}
        assert [(noted.name, dict(noted.attributes or {})) for noted in span.events] == [
            ("tool.noted", {"hango.fs.path": "/a"})
        ]


@pytest.mark.parametrize(
    ("raised", "error_type", "status"),
    [
        (None, "refused", StatusCode.UNSET),
        (StaleVersion(path="/a"), "StaleVersion", StatusCode.UNSET),
        (ValueError("secret"), "ValueError", StatusCode.ERROR),
    ],
    ids=["refused", "stale", "fault"],
)
async def test_the_span_of_a_call_that_fails(
    spans: InMemorySpanExporter, log: io.StringIO, raised: Exception | None, error_type: str, status: StatusCode
) -> None:
    def fail(_given: ToolCall) -> ToolResult:
        if raised is None:
            return ToolResult("No.", is_error=True)
        raise raised

    await Stack([], [tool("own", fail)]).call(ToolCall("1", "own", {}))
    (span,) = spans.get_finished_spans()
    assert dict(span.attributes or {})["error.type"] == error_type
    assert span.status.status_code is status
    assert "secret" not in span.to_json() + log.getvalue()


async def test_a_model_does_not_name_spans(spans: InMemorySpanExporter) -> None:
    await Stack([]).call(ToolCall("1", "invented by a model", {}))
    assert [span.name for span in spans.get_finished_spans()] == ["execute_tool unknown"]
