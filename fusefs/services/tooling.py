"""What a tool is: its definition, a call of it, and its result.

Decided here and only here: the shape that passes between the six file tools, the offload, the
middleware and the doors that serve tools, and what a model is told of input that a tool cannot take.

Threading: frozen values, safe anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave.

    `for_llm` goes into the model's context. `for_user` is for the person who watches; None where it is the same.
    """

    for_llm: str
    for_user: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One request of a model. `id` is the model's own and may be anything, also empty or hostile;
    `arguments` is what its JSON held, not yet checked."""

    id: str
    name: str
    arguments: object


Handler = Callable[[ToolCall], Awaitable[ToolResult]]
"""Runs one call. Refusals are results with `is_error`; nothing is raised for what a model did wrong."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as a model sees it, and what runs it.

    Args:
        description: with the policy of the tool (HF-20), since nothing of it stands in the system prompt.
        input_schema: JSON Schema of the arguments, an object.
        read_only, destructive: the hints of MCP's annotations of these names.
    """

    name: str
    description: str
    input_schema: Mapping[str, object]
    handler: Handler
    read_only: bool
    destructive: bool


def invalid_input(tool: Tool, why: str) -> ToolResult:
    """The answer to arguments that a tool cannot take: what is wrong with them, and what it expects (DE-03).

    Args:
        why: a clause without a full stop, which quotes nothing long.
    """
    schema = json.dumps(tool.input_schema, ensure_ascii=False)
    return ToolResult(f"Invalid input for {tool.name}: {why}. Its schema: {schema}", is_error=True)
