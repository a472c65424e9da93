"""Stored results: what they are called, which are stored, how much of one is kept, and in which pieces.

Decided here and only here (HF-10): that a call's id becomes a name that cannot leave the session's folder and is
never another call's, the tools whose results are never stored, and what happens to a text over the file limit.

A text over the file limit is stored in parts, files `001`, `002`, … of a directory, cut after a line where one ends
in the last quarter of the part, else after a character. At most 32 MiB of a text are kept: the first 24 MiB and the
last 8 MiB. The parts in order are the text, but for the middle that is not kept.

Threading: pure, apart from random names; a `Held` belongs to one task.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fusefs.rules.config import MIB
from fusefs.rules.paths import LARGE_RESULTS
from fusefs.rules.preview import Digest

NEVER_STORED = frozenset(("ls", "read_file", "write_file", "edit_file", "glob", "grep", "delete"))
"""The file tools. They bound their own results, and reading a stored result must not store another (L15)."""

KEPT_HEAD_BYTES = 24 * MIB
KEPT_TAIL_BYTES = 8 * MIB
MAX_PARTS = 64
"""With a file limit below 512 KiB less than 32 MiB is kept: a result is not to fill a directory."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]+")
_SLUG_CHARS = 40


def folder(session: str) -> str:
    """The folder of a session's results."""
    return f"{LARGE_RESULTS}/{session}"


def names(tool_call_id: str) -> Iterator[str]:
    """Names for the result of a call, to be tried in turn until one is not taken.

    The first is the id itself where that is harmless; else what is harmless of it and a digest of the whole, so that
    two ids do not meet in one name. An empty id says nothing, and a repeated one not which of its calls: those get a
    random end. Endless; the second is free already, save by a chance of 1 in 2^48.
    """
    if not tool_call_id:
        stem = "call"
    elif _PLAIN.fullmatch(tool_call_id):
        yield (stem := tool_call_id)
    else:
        import hashlib  # 5 ms of a filter's start, and for odd ids alone

        slug = _OTHER.sub("_", tool_call_id)[:_SLUG_CHARS].strip("_-") or "call"
        digest = hashlib.sha256(tool_call_id.encode(errors="surrogatepass")).hexdigest()[:16]
        yield (stem := f"{slug}-{digest}")
    while True:
        yield f"{stem}-{os.urandom(6).hex()}"


def part_name(number: int) -> str:
    """The name of a part, counted from 1."""
    return f"{number:03d}"


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What became of one result.

    Args:
        text: for the model.
        path: where the whole is; None where it was short enough, or could not be stored.
        tokens_before, tokens_after: of the result and of `text`, by estimate.
        error_type: the error for which it was not stored; '' without one.
    """

    text: str
    path: str | None
    tokens_before: int
    tokens_after: int
    error_type: str = ""

    @property
    def was_long(self) -> bool:
        return self.path is not None or bool(self.error_type)


class Held:
    """A text that comes in pieces: its digest, and as much of it as is ever kept.

    Args:
        head_bytes, tail_bytes: how much of the start and of the end is held; the default is all that could be stored.
    """

    __slots__ = ("_head", "_head_bytes", "_tail", "_tail_bytes", "digest")

    def __init__(self, head_bytes: int = KEPT_HEAD_BYTES, tail_bytes: int = KEPT_TAIL_BYTES) -> None:
        self.digest = Digest()
        self._head = bytearray()
        self._tail = bytearray()
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes

    @classmethod
    def of(cls, data: bytes) -> Held:
        held = cls()
        held.feed(data)
        return held

    def feed(self, data: bytes) -> None:
        self.digest.feed(data)
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, len(data) - self._tail_bytes) :]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    @property
    def size(self) -> int:
        """Of the whole text, in bytes."""
        return self.digest.size

    def edges(self, head_bytes: int, tail_bytes: int) -> tuple[bytes, bytes]:
        """The whole text and nothing, where it fits into both bounds together; else its start and its end, with no
        character cut.

        Args:
            head_bytes, tail_bytes: at most those of the constructor.
        """
        if self.size <= head_bytes + tail_bytes:
            return bytes(self._head + self._tail), b""
        head = bytes(self._head[:head_bytes])
        # The end may reach back into what is held as the start.
        behind = self._tail if len(self._tail) >= tail_bytes else self._head[head_bytes:] + self._tail
        tail = bytes(behind[len(behind) - tail_bytes :])
        return head[: whole_characters(head)], tail[_next_character(tail) :]


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a text is stored: one file, or several parts of at most the file limit each.

    `missing` is how many bytes of its middle are in none.
    """

    parts: tuple[bytes, ...]
    missing: int


def plan(held: Held, max_file_bytes: int) -> Plan:
    """How a text is stored where a file may have so many bytes."""
    if held.size <= max_file_bytes:
        return Plan(held.edges(held.size, 0)[:1], 0)
    # A part has three quarters of the limit at least: this many make no more than MAX_PARTS.
    most = MAX_PARTS * max_file_bytes * 3 // 4
    head, tail = held.edges(min(KEPT_HEAD_BYTES, most * 3 // 4), min(KEPT_TAIL_BYTES, most // 4))
    parts = (*_cut(head, max_file_bytes), *_cut(tail, max_file_bytes))
    return Plan(parts, held.size - len(head) - len(tail))


def _cut(data: bytes, max_bytes: int) -> Iterator[bytes]:
    start = 0
    while len(data) - start > max_bytes:
        piece = data[start : start + max_bytes]
        end = piece.rfind(b"\n", max_bytes * 3 // 4) + 1 or whole_characters(piece) or max_bytes
        yield piece[:end]
        start += end
    if start < len(data):
        yield data[start:]


def whole_characters(data: bytes) -> int:
    """The length of the data without a last character that is not whole; of what is not UTF-8, about its length."""
    for back in range(1, min(len(data), 4) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            wanted = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if wanted > back else len(data)
    return len(data)


def _next_character(data: bytes) -> int:
    """Where the first whole character starts; of what is not UTF-8, about the start."""
    skipped = 0
    while skipped < min(len(data), 3) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    return skipped
