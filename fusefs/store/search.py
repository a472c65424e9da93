"""Searching a namespace: files by a pattern of their paths, lines by a text or a regular expression.

Decided here and only here (HF-05, HF-06): how much of a search Postgres does, how it is bounded, and what the scope may
find. Postgres finds the lines and leaves out nearly all that does not fit; the exact match of a path is wcmatch's,
whose rules are bash's. It never sees paths that the coarse filter refused: on those a pattern of many stars takes it
minutes.

A search is bounded four ways: by matches, by the time of each statement, by the number of statements, and by the length
that is given of a line. Contents that are not text are not searched. Symlinks are not followed.

Threading: stateless; every function may run at once with any other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import bracex
from wcmatch import glob as wcglob

from fusefs.db.failures import LostInFlight, Retryable, TimedOut
from fusefs.db.pool import Database, Transaction
from fusefs.db.queries import query
from fusefs.rules import globs, paths, regexes
from fusefs.rules.errors import BadPattern, TooExpensive
from fusefs.rules.model import Kind, NodeRow
from fusefs.rules.scope import Scope
from fusefs.store import files
from fusefs.telemetry import operation

_PREPARE = query("prepare_search")
_LIST_FILES = query("list_files")
_GREP_TEXT = query("grep_text")
_GREP_PATTERN = query("grep_pattern")

MAX_MATCHES = 1000
STATEMENT_MS = 10_000
_STATEMENTS = 50
"""Statements of one search; each but the last gave a full batch of which the exact match refused some."""
_BATCH = MAX_MATCHES + 1
_GLOB_FLAGS = wcglob.GLOBSTAR | wcglob.FORCEUNIX
_EXPANSIONS = 100
"""Patterns that the braces of one pattern may stand for."""
_NEXT = "\x01"
"""A path and this is the first text after the path: no path holds NUL."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Match:
    """A line that matched.

    Args:
        line: its number, from 1.
        text: the line; of one over 500 characters the 400 around the match.
        column: at which character of the line `text` begins, from 1.
        length: characters of the whole line.
    """

    path: str
    line: int
    text: str
    column: int
    length: int

    @property
    def excerpt(self) -> str:
        """The text, with `…` where the line goes on."""
        before = "…" if self.column > 1 else ""
        after = "…" if self.column - 1 + len(self.text) < self.length else ""
        return f"{before}{self.text}{after}"


@dataclass(frozen=True, slots=True)
class Matches:
    """Lines by path and number. `truncated`: there may be more."""

    found: tuple[Match, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Files:
    """Files by path. `truncated`: there may be more."""

    found: tuple[NodeRow, ...]
    truncated: bool


async def glob(db: Database, scope: Scope, pattern: str, root: str, limit: int = MAX_MATCHES) -> Files:
    """The files at or below a path whose paths match a pattern (`rules.globs`).

    Raises NotFound where there is nothing at `root`, BadPattern, TooExpensive.
    """

    async def collect(tx: Transaction) -> Files:
        found: list[NodeRow] = []
        start = low
        for _ in range(_STATEMENTS):
            params = (start, high, *paths.search_names(scope), prepared.coarse, _BATCH)
            rows = await tx.run(_LIST_FILES, scope.tenant_id, scope.agent_id, *params)
            nodes = map(files.node_of, rows)
            found += [node for node in nodes if paths.visible(scope, node.path) and fits(node.path)]
            if len(found) > limit or len(rows) < _BATCH:
                return Files(tuple(found[:limit]), len(found) > limit)
            start = rows[-1][1] + _NEXT
        return Files(tuple(found), truncated=True)

    with operation("glob", scope, root) as op:
        prepared = globs.parse(pattern, root)
        fits = matcher(prepared)
        low, high = await _range(db, scope, root)
        result = await _search(db, scope, "", collect)
        op.matches(len(result.found))
    return result


async def list_files(db: Database, scope: Scope, after: str, limit: int) -> Files:
    """Every file that the scope may see, by path, a page at a time.

    Args:
        after: the last path of the page before; "" for the first page.
    """
    found: list[NodeRow] = []
    start = after + _NEXT if after else "/"
    with operation("ls", scope, "/") as op:
        while len(found) <= limit:
            params = (start, "0", *paths.search_names(scope), None, limit + 1)
            rows = await db.run(scope.tenant_id, _LIST_FILES, scope.tenant_id, scope.agent_id, *params)
            found += [node for node in map(files.node_of, rows) if paths.visible(scope, node.path)]
            if len(rows) <= limit:
                break
            start = rows[-1][1] + _NEXT
        op.matches(min(len(found), limit))
    return Files(tuple(found[:limit]), len(found) > limit)


async def grep(
    db: Database,
    scope: Scope,
    pattern: str,
    root: str,
    *,
    include: str | None = None,
    literal: bool = False,
    limit: int = MAX_MATCHES,
) -> Matches:
    """The lines of the files at or below a path that match.

    Args:
        pattern: a regular expression (`rules.regexes`).
        include: only files whose paths match this pattern (`rules.globs`).
        literal: `pattern` is a text.

    Raises NotFound where there is nothing at `root`, BadPattern, TooExpensive.
    """

    async def collect(tx: Transaction) -> Matches:
        found: list[Match] = []
        start, line = low, 0
        for _ in range(_STATEMENTS):
            params = (start, high, *paths.search_names(scope), coarse, sought, line, _BATCH, *whole)
            rows = await tx.run(statement, scope.tenant_id, scope.agent_id, *params)
            found += [Match(*row) for row in rows if paths.visible(scope, row[0]) and fits(row[0])]
            if len(found) > limit or len(rows) < _BATCH:
                return Matches(tuple(found[:limit]), len(found) > limit)
            start, line = rows[-1][:2]
        return Matches(tuple(found), truncated=True)

    with operation("grep", scope, root) as op:
        regexes.check(pattern)
        text = pattern if literal else regexes.as_text(pattern)
        sought = regexes.for_postgres(pattern) if text is None else text
        statement = _GREP_PATTERN if text is None else _GREP_TEXT
        whole = (regexes.for_whole_text(sought), regexes.for_place(sought)) if text is None else ()
        prepared = globs.parse(include, root) if include is not None else None
        coarse = prepared.coarse if prepared is not None else None
        fits = matcher(prepared) if prepared is not None else _anything
        low, high = await _range(db, scope, root)
        result = await _search(db, scope, sought if text is None else "", collect)
        op.matches(len(result.found))
    return result


def _anything(_path: str) -> bool:
    return True


def matcher(prepared: globs.PathPattern) -> Callable[[str], bool]:
    """The exact match of a path. Raises BadPattern."""
    flags = _GLOB_FLAGS | (wcglob.DOTGLOB if prepared.dots else 0)
    try:
        patterns = bracex.expand(prepared.pattern, keep_escapes=True, limit=_EXPANSIONS)
    except (bracex.ExpansionLimitException, RecursionError):
        raise BadPattern("the pattern stands for too many others; use fewer braces") from None
    compiled = wcglob.compile(patterns, flags=flags)
    skip = len(prepared.root.rstrip("/")) + 1
    return lambda path: bool(compiled.match(path[skip:]))


async def _range(db: Database, scope: Scope, root: str) -> tuple[str, str]:
    """The first path of a search, and the first after it. Raises NotFound."""
    if root == "/":
        return "/", "0"
    node = await files.stat(db, scope, root)
    if node.kind is Kind.DIR:
        return f"{root}/", f"{root}0"
    return root, root + _NEXT


async def _search(db: Database, scope: Scope, expression: str, collect: Callable[[Transaction], Awaitable[T]]) -> T:
    """Run a search in a transaction whose statements end in time; once more where the connection was lost.

    Raises BadPattern where `expression` is no regular expression: without rows nothing else would say so.
    """
    for last in (False, True):
        try:
            async with db.transaction(scope.tenant_id) as tx:
                await tx.run(_PREPARE, str(STATEMENT_MS), expression)
                return await collect(tx)
        except TimedOut:
            raise TooExpensive() from None
        except (LostInFlight, Retryable):
            if last:
                raise
    raise AssertionError("unreachable")
