"""Patterns for paths: their form, and the coarse filter that Postgres applies before the exact match.

Decided here and only here (HF-06): what a pattern is relative to, and which of its paths may begin with a dot. The
exact match itself is wcmatch's (`store/search.py`).

- Without a slash a pattern is for names at any depth; with one it is relative to the searched directory; with one in
  front it is absolute.
- `*`, `?` and `**` do not match a name that begins with a dot, so that `.git` stays out, except where the last part of
  the pattern is a plain name: `**/ci.yml` asks for that file wherever it is.

Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fusefs.rules.errors import BadPattern

MAX_PATTERN_CHARS = 1000
_MAGIC = re.compile(r"[*?\[\]{}\\]")


@dataclass(frozen=True, slots=True)
class PathPattern:
    """A pattern that is ready to be matched.

    Args:
        pattern: relative to `root`.
        root: an absolute path; what is searched is at or below it.
        dots: whether dot names are matched like any other.
        coarse: a regular expression for absolute paths, in a form that Postgres and Python read alike; it matches
            whatever the pattern matches, and little else.
    """

    pattern: str
    root: str
    dots: bool
    coarse: str


def parse(pattern: str, root: str) -> PathPattern:
    """Prepare a pattern that was given for a search at or below `root`. Raises BadPattern."""
    if not pattern or len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"a pattern must have 1 to {MAX_PATTERN_CHARS} characters")
    if "\0" in pattern:
        raise BadPattern("a pattern cannot hold NUL")
    absolute = pattern.startswith("/")
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadPattern("a pattern must not contain `..`")
    if not parts:
        raise BadPattern("the pattern names no file")
    if pattern.endswith("/"):
        parts.append("**")
    dots = _MAGIC.search(parts[-1]) is None
    if "/" not in pattern.rstrip("/"):
        parts.insert(0, "**")
    below = "/" if absolute else root
    whole = "/".join(parts)
    start = "" if below == "/" else re.escape(below)
    return PathPattern(whole, below, dots, f"^{start}/{_coarse(whole)}$")


def _coarse(pattern: str) -> str:
    """A regular expression that matches what the pattern does, and more: what stands in brackets is anything."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "*":
            end = at
            while end < len(pattern) and pattern[end] == "*":
                end += 1
            deep = end - at > 1
            if deep and pattern[end : end + 1] == "/":
                out.append("(?:.*/)?")
                end += 1
            else:
                out.append(".*" if deep else "[^/]*")
            at = end
            continue
        if char == "{":
            # What is inside may hold anything, and may be no group at all: the rest is left to the exact match.
            out.append(".*")
            break
        if char == "[":
            end = pattern.find("]", at + 2)
            if end > 0:
                # Up to the last bracket of a class such as [[:alpha:]]; a pattern that is no class matches itself.
                out.append(".*")
                at = pattern.rfind("]") + 1
                continue
        if char == "\\" and at + 1 < len(pattern):
            at += 1
            char = pattern[at]
        out.append("[^/]" if char == "?" else re.escape(char))
        at += 1
    return "".join(out)
