"""The preview of a text that was stored instead of shown: where it is, how to read it, its start and its end.

Decided here and only here (HF-10): the wording, that it stays under 1000 characters whatever the text and whatever
the path, and how bytes that are no text are shown. A `Digest` gathers what it needs from a stream of any length.

Marks: a line that is cut ends in `…`; a control character is shown by its picture (NUL as `␀`), bytes that are not
UTF-8 and characters that would break or turn the line as `�`. The stored file holds the bytes as they were.

Threading: pure; a `Digest` belongs to one task.
"""

from __future__ import annotations

import codecs
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fusefs.rules.tokens import BYTES_PER_TOKEN

PREVIEW_CHARS = 999
EDGE_LINES = 5
"""Lines of the start, and of the end, that are shown."""

_LINE_BYTES = 1024
"""So much of a line is held: more than could be shown of it."""

_PATH_CHARS = 200
"""A path that `rules.results` makes has 198 at most; of a longer one start and end are shown."""

_MARKS: dict[int, int] = {code: 0x2400 + code for code in range(32) if code != 9} | {127: 0x2421}
_MARKS |= dict.fromkeys((*range(0x80, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


def encode(text: str) -> bytes:
    """The bytes of any text. Surrogates that stand for bytes (PEP 383) become those bytes again; with any other lone
    one in the text, each becomes the three bytes that it would have in UTF-8, were it allowed there."""
    for errors in ("strict", "surrogateescape"):
        try:
            return text.encode(errors=errors)
        except UnicodeEncodeError:
            continue
    return text.encode(errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text was stored.

    Args:
        path: of the file in the namespace, or of the directory with its parts.
        parts: how many files, `PATH/001` and so on; 0 where `path` is the file itself.
        missing: bytes between the start and the end that are not kept.
        root: the directory of this machine at which the namespace is mounted; None where that is not known.
    """

    path: str
    parts: int = 0
    missing: int = 0
    root: str | None = None


class Digest:
    """Size, lines, start and end of a text that comes in pieces; holds a few KB, however long it is.

    Only `\\n` ends a line, as for read_file and grep.
    """

    __slots__ = ("_decoder", "_has_nul", "_head", "_open", "_tail", "_undecodable", "newlines", "size")

    def __init__(self) -> None:
        self.size = 0
        self.newlines = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=EDGE_LINES)
        self._open = b""
        self._has_nul = False
        self._undecodable = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    @classmethod
    def of(cls, data: bytes) -> Digest:
        digest = cls()
        digest.feed(data)
        return digest

    @property
    def lines(self) -> int:
        """How many lines there are; one that was not ended counts."""
        return self.newlines + bool(self._open)

    @property
    def tokens(self) -> int:
        """As `tokens.estimate` has it for a text."""
        return -(-self.size // BYTES_PER_TOKEN)

    @property
    def is_text(self) -> bool:
        """Whether all of it is UTF-8 without NUL: what read_file shows and a column of text holds."""
        return not (self._has_nul or self._undecodable or self._decoder.getstate()[0])

    def feed(self, data: bytes) -> None:
        self._judge(data)
        self.size += len(data)
        self.newlines += data.count(b"\n")
        start = 0
        while len(self._head) < EDGE_LINES and (end := data.find(b"\n", start)) >= 0:
            self._head.append(self._line(data, start, end))
            self._open = b""
            start = end + 1
        ends: list[int] = []
        end = len(data)
        # Of a piece with many lines only the last few are looked at.
        while len(ends) <= EDGE_LINES and (end := data.rfind(b"\n", start, end)) >= 0:
            ends.append(end)
        if len(ends) > EDGE_LINES:
            start = ends.pop() + 1
            self._open = b""
        for end in reversed(ends):
            self._tail.append(self._line(data, start, end))
            self._open = b""
            start = end + 1
        self._open = self._line(data, start, len(data))

    def edges(self) -> tuple[list[bytes], list[bytes]]:
        """The first and the last lines, at most 1024 bytes of each; no line is in both."""
        last = [self._open] if self._open else []
        if len(self._head) < EDGE_LINES:
            return [*self._head, *last], []
        return self._head, [*self._tail, *last][-EDGE_LINES:]

    def _line(self, data: bytes, start: int, end: int) -> bytes:
        """The open line and what comes to it, as far as it is held."""
        return self._open + data[start : min(end, start + _LINE_BYTES - len(self._open))]

    def _judge(self, data: bytes) -> None:
        self._has_nul = self._has_nul or b"\0" in data
        if not self._undecodable:
            try:
                self._decoder.decode(data)
            except UnicodeDecodeError:
                self._undecodable = True


def shown(line: bytes) -> str:
    """A line as one line of harmless text; see the marks above."""
    return line.removesuffix(b"\r").decode(errors="replace").translate(_MARKS)


def preview(digest: Digest, place: Place) -> str:
    """What a model sees instead of the text: at most 999 characters."""
    above = f"{_size(digest, place)}\n{_reading(digest, place)}\n"
    head, tail = digest.edges()
    numbers = [*range(1, len(head) + 1), *range(digest.lines - len(tail) + 1, digest.lines + 1)]
    labels = [f"{number:6d}\t" for number in numbers]
    left_out = digest.lines - len(head) - len(tail)
    gap = f"[… {count(left_out, 'line')} …]\n" if left_out else ""
    room = PREVIEW_CHARS + 1 - len(above) - len(gap) - sum(len(label) + 1 for label in labels)
    texts = _fitted([shown(line) for line in (*head, *tail)], room)
    lines = [f"{label}{text}\n" for label, text in zip(labels, texts, strict=True)]
    return (above + "".join([*lines[: len(head)], gap, *lines[len(head) :]])).removesuffix("\n")


def cut_in_place(digest: Digest, edges: tuple[bytes, bytes], reason: str) -> str:
    """What a model sees of a text that could not be stored: its start and its end.

    Args:
        edges: as much of both as may be shown.
        reason: why it was not stored.
    """
    head, tail = (edge.decode(errors="replace").replace("\0", "␀") for edge in edges)
    first = f"[{_measures(digest)}; it could not be stored ({reason})."
    missing = digest.size - len(edges[0]) - len(edges[1])
    if not missing:
        return f"{first}]\n{head}"
    lost = count(missing, "byte")
    return f"{first} {lost} of its middle are not shown.]\n{head}\n[… {lost} …]\n{tail}"


def count(number: int, noun: str) -> str:
    """`1 line`, `12,000 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(digest: Digest, place: Place) -> str:
    kept = f"all but {count(place.missing, 'byte')} of its middle" if place.missing else "all of it"
    return f"[{_measures(digest)}; {kept} is stored.]"


def _measures(digest: Digest) -> str:
    return (
        f"Too long to show: {count(digest.size, 'byte')}, {count(digest.lines, 'line')}, "
        f"about {count(digest.tokens, 'token')}"
    )


def _reading(digest: Digest, place: Place) -> str:
    """Two or three lines: the path, how a tool reads it, how a shell does. With few lines these are long, and lines are
    no measure for reading on."""
    path, is_whole = _short(place.path)
    where = f"Path: {path}" + (f"/001 to /{place.parts:03d}, one text in {place.parts} files" if place.parts else "")
    if not digest.is_text:
        tool = "It is not all text: NUL is shown as ␀, other bytes as �. read_file does not show it."
        words = ("xxd", "strings", "grep -a -n TEXT")
    elif digest.lines > 2 * EDGE_LINES:
        tool = "Tool: read_file with this path, offset=101, limit=100 (in lines)."
        words = ("sed -n '101,200p'", "grep -n TEXT", "head -c 4000")
    else:
        tool = "Tool: read_file with this path; of a long line it shows a part, and how to go on."
        words = ("head -c 4000", "tail -c 4000", "grep -oE '.{0,99}TEXT.{0,99}'")
    if not is_whole:
        return f"{where}\n{tool}"
    file, note = _for_shell(place)
    first = f'cat "$F"/* | {words[0]}' if place.parts else f'{words[0]} "$F"'
    others = "; ".join(f'{word} "$F"{"/*" if place.parts else ""}' for word in words[1:])
    return f"{where}\n{tool}\nShell{note}: F={file}; {first}; {others}"


def _short(path: str) -> tuple[str, bool]:
    text = shown(encode(path))
    if len(text) <= _PATH_CHARS:
        return text, text == path
    half = _PATH_CHARS // 2 - 1
    return f"{text[:half]}…{text[-half:]}", False


def _for_shell(place: Place) -> tuple[str, str]:
    """The path as a word of a shell, and where that holds."""
    if place.root is not None:
        absolute = shlex.quote(place.root.rstrip("/") + place.path)
        if _short(absolute) == (absolute, True):
            return absolute, ""
    return shlex.quote(place.path.lstrip("/")), " (in the mounted directory)"


def _fitted(texts: Sequence[str], room: int) -> list[str]:
    """The texts cut to one length, the longest with which all of them fit into `room` characters."""
    width, left = 0, room
    for position, length in enumerate(sorted(map(len, texts))):
        share = left // (len(texts) - position)
        if length > share:
            width = share
            break
        width, left = length, left - length
    return [text if len(text) <= width else text[: max(width - 1, 0)] + "…" for text in texts]
