"""The named queries of `sql/*.sql`.

Decided here and only here: the form of those files. A block starts with `-- name: verb_noun`, goes on
with one or more `--` lines that describe it, and holds one statement with $1..$n placeholders.
Threading: loaded once at import, frozen afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_BLOCK = re.compile(r"^-- name:[ \t]*(\S*)[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


@dataclass(frozen=True, slots=True)
class Query:
    """One statement; `name` is also the name under which a connection prepares it, so it is unique."""

    name: str
    text: str


def parse(text: str, origin: str) -> list[Query]:
    """Split one file into its queries. Raises ValueError for a file that breaks the form above."""
    pieces = _BLOCK.split(text)
    found = []
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{origin}: {name!r} is not of the form verb_noun")
        lines = body.strip().splitlines()
        described = 0
        while described < len(lines) and lines[described].startswith("--"):
            described += 1
        statement = "\n".join(lines[described:]).strip().rstrip(";").rstrip()
        if not described or not statement:
            raise ValueError(f"{origin}: {name} needs a description and a statement")
        found.append(Query(name, statement))
    return found


def _load() -> Mapping[str, Query]:
    found: dict[str, Query] = {}
    for file in sorted((Path(__file__).parent / "sql").glob("*.sql")):
        for query in parse(file.read_text(encoding="utf-8"), file.name):
            if query.name in found:
                raise ValueError(f"{file.name}: {query.name} is named twice")
            found[query.name] = query
    return MappingProxyType(found)


QUERIES: Mapping[str, Query] = _load()


def query(name: str) -> Query:
    """The query of that name. Raises KeyError: called at import time, so a wrong name is found at once."""
    return QUERIES[name]
