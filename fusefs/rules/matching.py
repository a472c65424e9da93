"""Replacing an exact text in a file, and helping a model that nearly got it right.

Decided here and only here (HF-07): what counts as a match, which line ends inserted lines get, and what is said when
there is no match or more than one.

A model knows a file as `read_file` shows it, with LF only, so both texts are compared without the CR of CR LF. What is
replaced is the part in which they differ: everything else keeps its bytes, line ends included.

Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from fusefs.rules.errors import NoMatch, NotUnique
from fusefs.rules.text import number_lines, split_lines

_NUMBERS_SHOWN = 10
_COUNTED = 1000
"""A long text of one character overlaps itself so often that counting on would take minutes."""
_EXCERPT_LINES = 12
_EXCERPT_CHARS = 200
"""Of one line of an excerpt."""
_HELPED_CHARS = 20_000
"""Above this length of the old text nobody looks for what is near it: that takes time in the square of it."""
_COMPARED_LINES = 20_000
_COMPARED_CHARS = 200
_COMPARED_CLOSELY = 100
_WORD = re.compile(r"\w+")
_LOOK_ALIKE = str.maketrans("‘’‚‛“”„‟«»‐‑‒–—−\u00a0\u2007\u202f", '\'\'\'\'""""""------   ')
_NUMBERED = re.compile(r"^ *\d+\t", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Replaced:
    """A text after a replacement.

    Args:
        count: how many places were replaced.
        line: number of the first line that was touched, from 1.
    """

    text: str
    count: int
    line: int


def replace(text: str, old: str, new: str, *, replace_all: bool = False) -> Replaced:
    """Replace the one place of `old`, or with `replace_all` every one from the left.

    Raises NoMatch, with the nearest lines as its excerpt; NotUnique, with the count and the line numbers, where places
    that overlap count too.
    """
    if not old:
        raise NoMatch("the text to replace is empty; to write a whole file, write it")
    plain, old, new = (_without_cr(each) for each in (text, old, new))
    if old == new:
        raise NoMatch("the old and the new text are identical: nothing to change")
    starts = _apart(plain, old) if replace_all else _overlapping(plain, old)
    if not starts:
        raise _no_match(plain, old)
    if len(starts) > 1 and not replace_all:
        count = f"{len(starts)} times" if len(starts) < _COUNTED else f"{_COUNTED} times or more"
        raise NotUnique(f"the text to replace is there {count} ({_lines_of(plain, starts)})")
    changed = _spliced(text, plain, starts, old, new)
    return Replaced(changed, len(starts), plain.count("\n", 0, starts[0]) + 1)


def _without_cr(text: str) -> str:
    return text.replace("\r\n", "\n")


def _apart(text: str, wanted: str) -> list[int]:
    """Where a text is in another, from the left, without overlap."""
    return [found.start() for found in re.finditer(re.escape(wanted), text)]


def _overlapping(text: str, wanted: str) -> list[int]:
    """Every place of it, overlapping ones included; `_COUNTED` of them at most."""
    found: list[int] = []
    at = text.find(wanted)
    while at >= 0 and len(found) < _COUNTED:
        found.append(at)
        at = text.find(wanted, at + 1)
    return found


def _lines_of(plain: str, starts: Sequence[int]) -> str:
    numbers: list[int] = []
    line, counted = 1, 0
    for start in starts[:_NUMBERS_SHOWN]:
        line += plain.count("\n", counted, start)
        counted = start
        numbers.append(line)
    more = " …" if len(starts) > _NUMBERS_SHOWN else ""
    return f"{'line' if len(numbers) == 1 else 'lines'} {', '.join(map(str, numbers))}{more}"


def _spliced(text: str, plain: str, starts: Sequence[int], old: str, new: str) -> str:
    """The text with the differing middle of `old` replaced at each start (of the text without CR)."""
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    removed, inserted = old[head : len(old) - tail], new[head : len(new) - tail]
    spans = [(start + head, start + head + len(removed)) for start in starts]
    if text == plain:
        return _cut_and_paste(text, spans, lambda _: inserted)
    # In the text itself a place lies further by one for each CR LF before it.
    ends = [found.start() - number for number, found in enumerate(re.finditer("\r\n", text))]
    newlines = [found.start() for found in re.finditer("\n", plain)]
    moved = [(start + bisect_left(ends, start), end + bisect_left(ends, end)) for start, end in spans]
    with_cr = frozenset(ends)

    def line_end(number: int) -> str:
        """As that of the line in which something is inserted; the last line goes by the one above it."""
        if not newlines:
            return "\n"
        at = newlines[min(bisect_left(newlines, spans[number][0]), len(newlines) - 1)]
        return "\r\n" if at in with_cr else "\n"

    return _cut_and_paste(text, moved, lambda number: inserted.replace("\n", line_end(number)))


def _cut_and_paste(text: str, spans: Sequence[tuple[int, int]], inserted: Callable[[int], str]) -> str:
    out = []
    done = 0
    for number, (start, end) in enumerate(spans):
        out += [text[done:start], inserted(number)]
        done = end
    return "".join([*out, text[done:]])


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    end = min(len(one), len(other))
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# -- Help ------------------------------------------------------------------------------------------


def _spaces(text: str) -> str:
    return " ".join(text.split())


_DIFFERENCES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("only line ends differ: the file has a lone CR there", lambda text: text.replace("\r", "\n")),
    ("only the Unicode form differs (NFC or NFD)", lambda text: unicodedata.normalize("NFC", text)),
    (
        "only quotes, dashes or blanks that look alike differ",
        lambda text: unicodedata.normalize("NFKC", text).translate(_LOOK_ALIKE),
    ),
    ("only upper and lower case differ", str.casefold),
)


def _no_match(plain: str, old: str) -> NoMatch:
    """What to say when the old text is not there. The file's own lines go into the excerpt alone."""
    if len(old) > _HELPED_CHARS:
        return NoMatch("the text to replace is not in the file; replace a shorter part")
    if old.rstrip("\n") != old and old.rstrip("\n") and plain.endswith(old.rstrip("\n")):
        return NoMatch("the text to replace is not in the file: the file ends without the final newline that it has")
    bare = _NUMBERED.sub("", old)
    if bare != old and bare in plain:
        return NoMatch("the text to replace holds line numbers of read_file, which are not in the file; leave them out")
    for what, form in _DIFFERENCES:
        if form(old) in form(plain):
            return NoMatch(f"the text to replace is not in the file: {what}", excerpt=_near(plain, old, form))
    if _spaces(old) and _spaces(old) in _spaces(plain):
        what = "only white space differs (tabs, blanks, indentation, line breaks)"
        return NoMatch(f"the text to replace is not in the file: {what}", excerpt=_near(plain, old, _spaces))
    return NoMatch("the text to replace is not in the file", excerpt=_near(plain, old, _spaces))


def _near(plain: str, old: str, form: Callable[[str], str]) -> str:
    """The lines of the file that are most like the old text, numbered; '' where none is like it."""
    lines = split_lines(plain)[:_COMPARED_LINES]
    wanted = split_lines(old)
    if not lines or not wanted:
        return ""
    # The longest line of the old text says most about where it was meant to be.
    anchor = max(range(len(wanted)), key=lambda number: len(wanted[number].strip()))
    sought = form(wanted[anchor])[:_COMPARED_CHARS].strip()
    if not sought:
        return ""
    at = _nearest(sought, [form(line)[:_COMPARED_CHARS].strip() for line in lines])
    if at is None:
        return ""
    first = max(0, at - anchor)
    shown = [line[:_EXCERPT_CHARS] for line in lines[first : first + min(len(wanted), _EXCERPT_LINES)]]
    return number_lines(shown, first + 1)


def _nearest(sought: str, lines: Sequence[str]) -> int | None:
    """The index of the line that is the text, else holds it, else is most like it."""
    if sought in lines:
        return lines.index(sought)
    inside = next((number for number, line in enumerate(lines) if sought in line), None)
    if inside is not None:
        return inside
    # To compare letter by letter takes a second for 5000 lines; those with the most words in common take a tenth.
    words = set(_WORD.findall(sought))
    shared = [len(words.intersection(_WORD.findall(line))) for line in lines]
    candidates = nlargest(_COMPARED_CLOSELY, range(len(lines)), key=shared.__getitem__)
    closest = difflib.get_close_matches(sought, [lines[number] for number in candidates], n=1, cutoff=0.5)
    return lines.index(closest[0]) if closest else None
