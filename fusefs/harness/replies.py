"""How the events of a streamed reply become one reply.

Decided here and only here: what a reply is once its stream ended, however it ended (DE-07). The stream is that of
Anthropic's Messages API; kinds of events, blocks and deltas that are not known here are passed over, as that API asks
of its clients. A reply is complete when `message_stop` came; a call of a tool is whole when its block was closed and
its JSON can be read. What the reply says of itself (`stop_reason`) is kept and decides nothing.

Threading: an `Assembly` belongs to one task; replies are frozen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusefs.rules.errors import ModelFailed


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call that the model asks for. `broken` says why its arguments cannot be read; they are None then."""

    id: str
    name: str
    arguments: object
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a stream held.

    Args:
        blocks: as they go into the next request; a broken call has the empty object as its input there. A block of
            text that is blank is left out: the API refuses it.
        complete: the stream's last event came.
    """

    blocks: tuple[Mapping[str, Any], ...]
    calls: tuple[ToolUse, ...]
    complete: bool
    stop_reason: str | None

    @property
    def text(self) -> str:
        return "".join(block["text"] for block in self.blocks if block["type"] == "text")


class Assembly:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self.started = False
        self._blocks: dict[int, dict[str, Any]] = {}
        self._json: dict[int, list[str]] = {}
        self._closed: set[int] = set()
        self._complete = False
        self._stop_reason: str | None = None
        self._error = ""

    def feed(self, event: object) -> None:
        """Take one event. It never raises: an error among them is told by `reply`."""
        match event:
            case {"type": "message_start"}:
                self.started = True
            case {"type": "content_block_start", "index": int(index), "content_block": {"type": str()} as block}:
                self._blocks[index] = dict(block)
            case {"type": "content_block_delta", "index": int(index), "delta": delta} if index in self._blocks:
                self._grow(self._blocks[index], self._json.setdefault(index, []), delta)
            case {"type": "content_block_stop", "index": int(index)}:
                self._closed.add(index)
            case {"type": "message_delta", "delta": {"stop_reason": str(reason)}}:
                self._stop_reason = reason
            case {"type": "message_stop"}:
                self._complete = True
            case {"type": "error"}:
                self._error = error_type(event)

    def _grow(self, block: dict[str, Any], json_parts: list[str], delta: object) -> None:
        match delta:
            case {"type": "text_delta", "text": str(text)}:
                block["text"] = block.get("text", "") + text
            case {"type": "input_json_delta", "partial_json": str(part)}:
                json_parts.append(part)
            case {"type": "thinking_delta", "thinking": str(text)}:
                block["thinking"] = block.get("thinking", "") + text
            case {"type": "signature_delta", "signature": str(signature)}:
                block["signature"] = signature

    def reply(self) -> Reply:
        """What came until now. Raises ModelFailed where an error was among it."""
        if self._error:
            raise ModelFailed(f"the model's API broke off its reply with {self._error}")
        blocks: list[Mapping[str, Any]] = []
        calls: list[ToolUse] = []
        for index, block in sorted(self._blocks.items()):
            if block["type"] == "tool_use":
                call = self._call(index, block)
                calls.append(call)
                arguments = call.arguments if isinstance(call.arguments, dict) else {}
                blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
            elif block["type"] != "text":
                # Thinking is valid with its signature only, which comes last.
                if index in self._closed:
                    blocks.append(block)
            elif str(block.get("text", "")).strip():
                blocks.append(block)
        return Reply(tuple(blocks), tuple(calls), self._complete, self._stop_reason)

    def _call(self, index: int, block: Mapping[str, Any]) -> ToolUse:
        id_, name = str(block.get("id", "")), str(block.get("name", ""))
        if index not in self._closed:
            return ToolUse(id_, name, None, "the reply broke off inside it")
        text = "".join(self._json.get(index, []))
        if not text:
            # Of a tool without arguments no delta comes at all.
            return ToolUse(id_, name, block.get("input", {}))
        try:
            return ToolUse(id_, name, json.loads(text))
        except ValueError as error:
            where = f" ({error.msg} at character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
            return ToolUse(id_, name, None, f"it is not valid JSON{where}")
        except RecursionError:
            return ToolUse(id_, name, None, "it is nested too deeply")


def error_type(body: object) -> str:
    """The API's name for an error, as its body gives it. Its message is left out: it may quote the request."""
    match body:
        case {"error": {"type": str(kind)}} if kind.replace("_", "").isalnum():
            return kind[:64]
    return "an error without a name"
