"""What the proxy does to a message of MCP: it finds oversized tool results in a line, and rewrites them.

Decided here and only here: which messages are looked at, what counts as the text of a result, and what a result
looks like afterwards. A line is edited where it must change; every other byte of it stays.

- A result is looked at when it answers a `tools/call` (or `tasks/result`) that went by before. Any other line, and
  one that is no longer than the limit in bytes (JSON is never shorter than its text), is not even parsed.
- The text of a result is that of its text blocks and embedded resources, in their order. Over the limit it is
  stored once, the preview takes the place of the first such block, and the others go. Images, audio, links and binary
  resources stay.
- `structuredContent` over the limit on its own is stored too, unless the text says the same, and shortened in place: a
  client checks it against the tool's `outputSchema`, so strings stay strings and lists stay lists. What is still too
  large then becomes empty.

Threading: `Calls` belongs to one task; everything else is pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusefs.rules import paths, tokens

# PHP's encoder writes the slash as \/.
_ASKS = re.compile(rb"tools\\?/call|tasks\\?/result")
_STORED = paths.LARGE_RESULTS.lstrip("/").encode()
_METHODS = ("tools/call", "tasks/result")
_PLAIN_ID = re.compile(r"(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9._-]{1,48}")
_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

_REMEMBERED = 65_536
"""Calls without an answer at most. An answer that is not parsed leaves its call here, at about 150 bytes."""
_NAME_CHARS = 128

_LONG_STRING = 1_000
_KEPT_OF_STRING = 200
_KEPT_ITEMS = 10
"""Of a list: half of them from its beginning, half from its end."""
_KEPT_MEMBERS = 50

Edit = tuple[int, int, str]
"""Replace the characters from here to there by this text."""
Member = tuple[Any, int, int]
"""A value, and where its JSON begins and ends."""


def id_text(request_id: object) -> str:
    """A name for a JSON-RPC id, for paths: another one for every other id, `1` and `"1"` included."""
    if isinstance(request_id, int) and not isinstance(request_id, bool) and abs(request_id) < 10**18:
        return str(request_id)
    if isinstance(request_id, str) and _PLAIN_ID.fullmatch(request_id):
        return request_id
    return f"x{hashlib.sha256(json.dumps(request_id).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call on its way.

    Args:
        tool: which was called; empty where nobody knows.
        reads_stored: it names the folder of stored results, so that its own result must not become another (L15).
    """

    tool: str
    reads_stored: bool


class Calls:
    """The tool calls that went to the server, so that their answers are known."""

    def __init__(self, at_most: int = _REMEMBERED) -> None:
        self._at_most = at_most
        self._calls: dict[str, Call] = {}

    def note(self, lines: bytes) -> None:
        """Look at lines on their way to the server."""
        if _ASKS.search(lines) is None:
            return
        for line in lines.split(b"\n"):
            if _ASKS.search(line) is not None:
                for message in _messages(line):
                    self._note(message, _STORED in line)

    def _note(self, message: object, reads_stored: bool) -> None:
        if not isinstance(message, dict) or message.get("method") not in _METHODS:
            return
        request_id, params = message.get("id"), message.get("params")
        if not isinstance(request_id, int | str):
            return
        name = params.get("name") if isinstance(params, dict) else None
        if len(self._calls) >= self._at_most:
            del self._calls[next(iter(self._calls))]
        self._calls[_key(request_id)] = Call(name[:_NAME_CHARS] if isinstance(name, str) else "", reads_stored)

    def take(self, request_id: object) -> Call | None:
        """The call that has its answer now; None for any other request."""
        return self._calls.pop(_key(request_id), None) if isinstance(request_id, int | str) else None


def _key(request_id: int | str) -> str:
    """Ids by their text: some servers answer `1` with `"1"`."""
    text = str(request_id)
    return text if len(text) <= _NAME_CHARS else id_text(text)


def _messages(line: bytes) -> Sequence[object]:
    """The messages of a line; none where it is not JSON."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ()
    return found if isinstance(found, list) else (found,)


@dataclass(slots=True)
class LargeResult:
    """One result that is over the limit.

    Attributes:
        call: whose result it is.
        call_id: of the request, by `id_text`.
        texts: to be stored, each on its own: first the text, then the structured content, as far as they are over.
    """

    call: Call
    call_id: str
    texts: list[str]
    _whole: str
    _limit: int
    _content: Member
    _structured: Member | None
    _has_text: bool
    _edits: list[Edit] = field(default_factory=list)

    def replace(self, previews: Sequence[str]) -> None:
        """Put the previews in place.

        Args:
            previews: what stands for each of `texts` now.
        """
        blocks = [self._whole[start:end] for _, start, end in _elements(self._whole, self._content[1])]
        if self._has_text:
            blocks = self._replace_text(blocks, previews[0])
        if len(previews) > self._has_text:
            blocks.append(json.dumps({"type": "text", "text": previews[-1]}))
        self._edits.append((self._content[1], self._content[2], f"[{', '.join(blocks)}]"))
        if self._structured is not None:
            value, start, end = self._structured
            self._edits.append((start, end, _shortened(value, self._limit)))

    def _replace_text(self, raw: list[str], preview: str) -> list[str]:
        kept, placed = [], False
        for block, text in zip(self._content[0], raw, strict=True):
            if text_of(block) is None:
                kept.append(text)
            elif not placed:
                placed = True
                first = block if block["type"] == "text" else {"type": "text"}
                kept.append(json.dumps({**first, "text": preview}))
        return kept

    @property
    def edits(self) -> list[Edit]:
        return self._edits


class LargeLine:
    """A line with at least one result over the limit: store `results`, replace each, then take `rewritten`."""

    def __init__(self, text: str, results: list[LargeResult]) -> None:
        self._text = text
        self.results = results

    def rewritten(self) -> bytes:
        """The line with the previews in it."""
        parts, at = [], 0
        for start, end, new in sorted(edit for result in self.results for edit in result.edits):
            parts += [self._text[at:start], new]
            at = end
        return "".join([*parts, self._text[at:]]).encode()


def find_large(line: bytes, calls: Calls, limit: int) -> LargeLine | None:
    """The results in a line from the server that are over the limit; None when there are none.

    Args:
        limit: in tokens by estimate.
    """
    if len(line) <= limit * tokens.BYTES_PER_TOKEN:
        return None
    try:
        text = line.decode()
        start = _skip_blank(text, 0)
        message, end = _DECODER.raw_decode(text, start)
        if _skip_blank(text, end) < len(text):
            return None
        messages = _elements(text, start) if isinstance(message, list) else ((message, start, end),)
        found = [_large_result(text, one, calls, limit) for one in messages]
    except (ValueError, RecursionError, IndexError):
        return None  # not JSON, or deeper than anything sane: the client's business
    results = [one for one in found if one is not None]
    return LargeLine(text, results) if results else None


def _large_result(text: str, member: Member, calls: Calls, limit: int) -> LargeResult | None:
    message, start, _ = member
    if not isinstance(message, dict) or "method" in message:
        return None
    request_id, result = message.get("id"), message.get("result")
    call = calls.take(request_id)
    if call is None or not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return None
    members = _members(text, _members(text, start)["result"][1])
    content, structured = members["content"], members.get("structuredContent")
    whole = join_texts(content[0])
    texts = [whole] if tokens.estimate(whole) > limit else []
    too_long = structured is not None and tokens.estimate(text[structured[1] : structured[2]]) > limit
    if structured is not None and too_long and not _says_the_same(whole, structured[0]):
        texts.append(text[structured[1] : structured[2]])
    if not texts and not too_long:
        return None
    return LargeResult(
        call, id_text(request_id), texts, text, limit, content, structured if too_long else None, whole in texts
    )


def text_of(block: object) -> str | None:
    """The text of a content block; None for one that has none."""
    if isinstance(block, dict):
        kind, resource = block.get("type"), block.get("resource")
        holder = block if kind == "text" else resource if kind == "resource" else None
        text = holder.get("text") if isinstance(holder, dict) else None
        return text if isinstance(text, str) else None
    return None


def join_texts(content: Sequence[object]) -> str:
    """The text of a result: exactly that of its only block, or all of them with an empty line between."""
    found = [(block, text) for block in content if (text := text_of(block)) is not None]
    if len(found) == 1:
        return found[0][1]
    return "\n\n".join(
        f"{block['resource'].get('uri')}\n{text}" if "resource" in block else text
        for block, text in found
        if isinstance(block, dict)
    )


def _says_the_same(text: str, structured: object) -> bool:
    """Whether nothing of the structured content is missing in the text: it is the text itself as the only member (so
    the official Python package wraps it), or what the text's JSON says."""
    if isinstance(structured, dict) and list(structured.values()) == [text]:
        return True
    try:
        return bool(json.loads(text) == structured)
    except (ValueError, RecursionError):
        return False


def _shortened(value: object, limit: int) -> str:
    """JSON of the same shape within the limit, or of the same type and empty."""
    short = json.dumps(_shorten(value))
    if tokens.estimate(short) <= limit:
        return short
    return "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else '""'


def _shorten(value: object) -> object:
    if isinstance(value, str) and len(value) > _LONG_STRING:
        return f"{value[:_KEPT_OF_STRING]}[... cut; {len(value)} characters in all, see the text of this result]"
    if isinstance(value, list):
        half = _KEPT_ITEMS // 2
        kept = value if len(value) <= _KEPT_ITEMS else value[:half] + value[-half:]
        return [_shorten(item) for item in kept]
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in list(value.items())[:_KEPT_MEMBERS]}
    return value


def _skip_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def _members(text: str, start: int) -> dict[str, Member]:
    """The members of the object that begins here; of a repeated key the last one, as everywhere."""
    found: dict[str, Member] = {}
    at = _skip_blank(text, start + 1)
    while text[at] != "}":
        _after(text, at, '"')
        key, at = _DECODER.raw_decode(text, at)
        at = _skip_blank(text, _after(text, _skip_blank(text, at), ":"))
        value, end = _DECODER.raw_decode(text, at)
        found[key] = (value, at, end)
        at = _next(text, end, "}")
    return found


def _elements(text: str, start: int) -> Iterator[Member]:
    """The elements of the array that begins here."""
    at = _skip_blank(text, start + 1)
    while text[at] != "]":
        value, end = _DECODER.raw_decode(text, at)
        yield value, at, end
        at = _next(text, end, "]")


def _next(text: str, at: int, closing: str) -> int:
    """Where the next member or element begins; at the closing bracket after the last one."""
    at = _skip_blank(text, at)
    if text[at] == closing:
        return at
    return _skip_blank(text, _after(text, at, ","))


def _after(text: str, at: int, expected: str) -> int:
    if text[at] != expected:
        raise ValueError(f"not JSON at {at}")
    return at + 1
