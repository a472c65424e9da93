"""Text as a model reads it: lines, their numbers, and where an answer ends.

Decided here and only here (HF-04): what a line is, how it is numbered, and how much of a file one answer holds. A line
ends with LF or CR LF and with nothing else: form feed, U+2028 or a lone CR are characters of a line, as they are for
`grep -n` and for Postgres. All lengths are in characters.

Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

MAX_LINE_CHARS = 5000
"""What is shown of one line (HF-04)."""
MAX_ANSWER_CHARS = 77_000
"""The lines of one answer with their numbers. With the notes below them, of about 100 characters each, the answer stays
under 80,000, about 20,000 tokens: the limit of a result."""
DEFAULT_LIMIT = 2000
_BREAKS_LINES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_NUMBER_CHARS = 8
"""A number, its tab, and the newline after the line."""


@dataclass(frozen=True, slots=True)
class Page:
    """Consecutive lines of a text.

    Args:
        lines: without their ends; the ones over `MAX_LINE_CHARS` are cut.
        first: number of the first line, from 1.
        total: lines of the whole text.
        column: where in its line the first line begins, from 1.
        cut: (number, length) of the lines that are shown in part.
        next_offset, next_column: where to go on; None at the end of the text. `next_column` is set only within a line.
    """

    lines: tuple[str, ...]
    first: int
    total: int
    column: int
    cut: tuple[tuple[int, int], ...]
    next_offset: int | None
    next_column: int | None

    @property
    def last(self) -> int:
        """Number of the last line; `first - 1` where there is none."""
        return self.first + len(self.lines) - 1


def escaped(char: str) -> str:
    """A character written out, as in a string of Python."""
    if char == "\n":
        return "\\n"
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(path: str) -> str:
    """A path for an answer of several lines: whoever chose a name must not make a line of his own with it, nor turn
    the line around. What only joins characters, as in emoji, stays: the path is to be used again."""
    return _BREAKS_LINES.sub(lambda found: escaped(found[0]), path)


def split_lines(text: str) -> list[str]:
    """The lines of a text, without their ends. An empty text has none."""
    if "\r" in text:  # half of the time of a replacement that finds nothing
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def read_page(text: str, *, offset: int = 1, limit: int = DEFAULT_LIMIT, column: int = 1) -> Page:
    """The part of a text that one answer holds: whole lines, as many as fit.

    Args:
        offset: number of the first line, from 1.
        limit: lines at most.
        column: above 1: only the line at `offset`, from that character on and up to `MAX_ANSWER_CHARS` of it. That is
            how a line that is longer than an answer is read to its end.
    """
    every = split_lines(text)
    total = len(every)
    if column > 1:
        return _piece(every, offset, column)
    lines = every[offset - 1 : offset - 1 + limit]
    lengths = list(map(len, lines))
    cut: list[tuple[int, int]] = []
    if max(lengths, default=0) > MAX_LINE_CHARS:
        cut = [(number, length) for number, length in enumerate(lengths, offset) if length > MAX_LINE_CHARS]
        lines = [line[:MAX_LINE_CHARS] for line in lines]
        lengths = [min(length, MAX_LINE_CHARS) for length in lengths]
    fitting = _fitting(lengths)
    after = offset + fitting
    return Page(
        lines=tuple(lines[:fitting]),
        first=offset,
        total=total,
        column=1,
        cut=tuple(each for each in cut if each[0] < after),
        next_offset=after if after <= total and lines else None,
        next_column=None,
    )


def _fitting(lengths: Sequence[int]) -> int:
    """How many lines of these lengths one answer holds; at least one."""
    if sum(lengths) + _NUMBER_CHARS * len(lengths) <= MAX_ANSWER_CHARS:
        return len(lengths)
    held = 0
    for count, length in enumerate(lengths):
        held += length + _NUMBER_CHARS
        if held > MAX_ANSWER_CHARS:
            return max(count, 1)
    return len(lengths)


def _piece(every: Sequence[str], offset: int, column: int) -> Page:
    line = every[offset - 1] if 1 <= offset <= len(every) else ""
    piece = line[column - 1 : column - 1 + MAX_ANSWER_CHARS]
    after = column + len(piece)
    goes_on = after <= len(line)
    last = offset >= len(every)
    return Page(
        lines=(piece,) if piece else (),
        first=offset,
        total=len(every),
        column=column,
        cut=(),
        next_offset=offset if goes_on else None if last else offset + 1,
        next_column=after if goes_on else None,
    )


def number_lines(lines: Sequence[str], first: int) -> str:
    """Lines as `%6d`, a tab, and the text (HF-04)."""
    thousands = range(first // 1000, (first + len(lines)) // 1000 + 1)
    numbers = chain.from_iterable(map(_numbers, thousands))
    # Two slices and one join take a third of the time that a string for each line took.
    pieces = [""] * (2 * len(lines))
    pieces[::2] = islice(numbers, first % 1000, first % 1000 + len(lines))
    pieces[1::2] = lines
    return "".join(pieces)[1:]


@lru_cache(maxsize=32)
def _numbers(thousand: int) -> tuple[str, ...]:
    """A thousand numbers as they are shown, each after the end of the line before. Kept, since to format them took
    longer than all else of a read."""
    return tuple(f"\n{number:6d}\t" for number in range(thousand * 1000, thousand * 1000 + 1000))


def binary_notice(size_bytes: int) -> str:
    """What is said instead of bytes that are no text (DE-05)."""
    return f"Binary output ({size_bytes} bytes). Pipe to file if needed."
