"""Regular expressions as people and models write them, for Postgres's engine.

Decided here and only here (HF-05): which of them are plain texts, which spellings are translated, and what may be asked
of a whole file before its lines are looked at. Everything else means what Postgres's documentation says (advanced
regular expressions: no backtracking but for back-references).

Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import re

from fusefs.rules.errors import BadPattern

MAX_CHARS = 4000
_MAGIC = re.compile(r"[\\^$.|?*+()\[\]{}]")
_ESCAPED = re.compile(r"\\([^\w\s])")
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]\\])*\]?|.", re.DOTALL)
_SPELLINGS = {r"\b": r"\y", r"\B": r"\Y", r"\z": r"\Z"}
"""Elsewhere `\\b` is the edge of a word; Postgres takes it for a backspace and finds nothing."""
_OPTIONS = re.compile(r"\(\?([a-z]+)\)")
_PLAIN_PARENTHESES = frozenset("bq")
"""Options under which a parenthesis is a character: basic expressions, and plain texts."""
_COUNTS_GROUPS = re.compile(r"\\[1-9]|^\*\*\*")
"""References to a group, and the prefixes that are allowed at the start only."""
_BEYOND_THE_LINE = re.compile(r"\(\?[=!<]|\\[AZ]|\*\*\*")


def check(pattern: str) -> None:
    """Refuse what no line can match or nobody can read. Raises BadPattern."""
    if not pattern or len(pattern) > MAX_CHARS:
        raise BadPattern(f"the text to look for must have 1 to {MAX_CHARS} characters")
    if "\0" in pattern or "\n" in pattern:
        raise BadPattern("what is looked for is in one line: it cannot hold a newline or NUL")


def as_text(pattern: str) -> str | None:
    """The text that a regular expression stands for, where it is no more than that: Postgres finds one in a fifth of
    the time."""
    if _MAGIC.search(_ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


def for_postgres(pattern: str) -> str:
    r"""The expression with `\b`, `\B` and `\z` as Postgres spells them. What stands in brackets stays."""
    return "".join(_SPELLINGS.get(part, part) for part in _PARTS.findall(pattern))


def for_place(pattern: str) -> str:
    """The expression with the whole of what it matches as its first group, where that changes nothing: Postgres gives
    the groups of a match, and the match only where there are none."""
    if _COUNTS_GROUPS.search(pattern):
        return pattern
    options = _OPTIONS.match(pattern)
    if options and set(options[1]) & _PLAIN_PARENTHESES:
        return pattern
    start = options.end() if options else 0
    return f"{pattern[:start]}({pattern[start:]})"


def for_whole_text(pattern: str) -> str:
    """An expression that a text of several lines matches wherever one of its lines matches `pattern`; the empty one,
    which everything matches, where there is none to be had."""
    options = _OPTIONS.match(pattern)
    given = options[1] if options else ""
    if _BEYOND_THE_LINE.search(pattern) or not set(given) <= set("ict"):
        return ""
    return f"(?n{given}){pattern[options.end() if options else 0 :]}"
