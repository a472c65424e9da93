"""How many tokens a text and a whole model request are, by estimate (HF-19).

Decided here and only here: the heuristic, four bytes of UTF-8 a token; what of a request is counted, and the fixed
overheads around it. Decisions about a budget look at whole requests, in the form of Anthropic's Messages API.

An exact counter takes the heuristic's place wherever an `Estimator` is asked for; one that knows single texts only is
`functools.partial(estimate_request, count=exact)`.

Threading: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

BYTES_PER_TOKEN = 4

TOOLS_TOKENS = 346
"""What the API puts in front of a request that has tools, as its documentation says for the current models."""
TOOL_TOKENS = 12
"""The frame of one tool's definition."""
MESSAGE_TOKENS = 4
"""The frame and the role of one message."""
BLOCK_TOKENS = 4
"""The frame of one block of a message or of the system prompt, the ids of tool calls not counted."""
FRAGMENT_TOKENS = 8
"""The frame of one injected fragment."""
IMAGE_TOKENS = 1600
"""The most that one picture costs: the API scales larger ones down to width x height / 750 of about this."""
VALUE_TOKENS = 1
"""The punctuation around one value of a JSON object or array; with it a number, true, false or null."""


class Estimator(Protocol):
    """Counts the tokens of one request.

    Args:
        request: the body of a request: `system`, `messages`, `tools`.
        injected: texts that are added to the request after it was counted, such as reminders.

    Never raises for the shape of a request: what it does not know it counts as text.
    """

    def __call__(self, request: Mapping[str, object], injected: Iterable[str] = ()) -> int: ...


def estimate(text: str) -> int:
    """Tokens of a text, rounded up. Lone surrogates count as what would stand for them."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def estimate_request(
    request: Mapping[str, object], injected: Iterable[str] = (), *, count: Callable[[str], int] = estimate
) -> int:
    """Tokens of a whole request: an `Estimator`.

    Args:
        count: the tokens of one text. With one that never shrinks when its text grows, neither does the sum.
    """
    total = _blocks(request.get("system"), count)
    for message in _items(request.get("messages")):
        content = message.get("content") if isinstance(message, Mapping) else message
        total += MESSAGE_TOKENS + _blocks(content, count)
    tools = _items(request.get("tools"))
    if tools:
        total += TOOLS_TOKENS + sum(TOOL_TOKENS + _value(tool, count) for tool in tools)
    return total + sum(FRAGMENT_TOKENS + count(text) for text in injected)


def _items(value: object) -> list[object]:
    """The entries of an array; anything else but null stands for an array of one."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _blocks(content: object, count: Callable[[str], int]) -> int:
    """A system prompt or the content of a message: a text, or blocks. The results of tools hold blocks again, so that
    a picture in one counts as a picture."""
    total = 0
    pending = _items(content)
    while pending:
        block = pending.pop()
        total += BLOCK_TOKENS
        match block:
            case {"type": "image"}:
                total += IMAGE_TOKENS
            case str(text) | {"type": "text", "text": str(text)}:
                total += count(text)
            case {"type": "tool_use", "name": name, **rest}:
                total += _value(name, count) + _value(rest.get("input"), count)
            case {"type": "tool_result", **rest}:
                pending += _items(rest.get("content"))
            case _:
                total += _value(block, count)
    return total


def _value(value: object, count: Callable[[str], int]) -> int:
    """Any JSON value, whatever its depth: its texts and keys, and the punctuation between them."""
    total = 0
    pending = [value]
    while pending:
        item = pending.pop()
        total += VALUE_TOKENS
        if isinstance(item, str):
            total += count(item)
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                total += count(str(key))
                pending.append(inner)
        elif isinstance(item, list | tuple):
            pending += item
    return total
