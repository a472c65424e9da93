"""Events on files, and the rules that say which command runs after which of them.

Decided here and only here: what an event says (never what a file holds), and what a rule may be.

Threading: frozen values, safe anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from fusefs.rules import globs
from fusefs.rules.errors import BadConfig, BadPattern
from fusefs.rules.globs import PathPattern
from fusefs.rules.paths import LARGE_RESULTS, is_within
from fusefs.rules.scope import Scope

HOOK_TIMEOUT_S = 30.0
"""How long a hook may run, where its rule does not say (DE-13)."""


class EventKind(Enum):
    """What happened to a file. An offload is the write of a stored result."""

    WRITE = "write"
    CONFLICT = "conflict"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class FileEvent:
    """One change that is committed, or one lost race whose bytes are kept.

    Attributes:
        tenant, agent: their ids.
        version: the file's, after the change; of a conflict the one that was there, None where there was no file.
        bytes: the file's size after the change; of a conflict the bytes that are kept.
    """

    event: EventKind
    tenant: str
    agent: str
    session: str
    path: str
    version: int | None
    bytes: int

    def as_json(self) -> dict[str, str | int | None]:
        """The event in plain values, in the order of its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "event": self.event.value}


def written(scope: Scope, path: str, version: int, size: int) -> FileEvent:
    """The event of a file whose content was changed."""
    kind = EventKind.OFFLOAD if is_within(path, LARGE_RESULTS) else EventKind.WRITE
    return FileEvent(kind, scope.tenant_id, scope.agent_id, scope.session, path, version, size)


def lost(scope: Scope, path: str, actual: int | None, size: int) -> FileEvent:
    """The event of a lost race."""
    return FileEvent(EventKind.CONFLICT, scope.tenant_id, scope.agent_id, scope.session, path, actual, size)


@dataclass(frozen=True, slots=True)
class HookRule:
    """A command, and the events after which it runs.

    Args:
        command: program and arguments; no shell reads them. The program's path is absolute: neither a search path
            nor a directory of an agent decides what runs.
        include: patterns (`rules.globs`); a path must match one of them. Without any, every path does.
        exclude: a path must match none of these.

    Raises BadConfig.
    """

    command: tuple[str, ...]
    events: frozenset[EventKind]
    include: tuple[PathPattern, ...] = ()
    exclude: tuple[PathPattern, ...] = ()
    timeout_s: float = HOOK_TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.command or not self.command[0].startswith("/"):
            raise BadConfig("a hook's command must be a list that begins with the absolute path of a program")
        if any("\0" in word for word in self.command):
            raise BadConfig("a hook's command cannot hold NUL")
        if not self.events:
            raise BadConfig("a hook needs at least one event")
        if not 0 < self.timeout_s <= 3600:
            raise BadConfig("a hook's timeout must be between 0 and 3600 seconds")


def pattern(text: str) -> PathPattern:
    """A pattern of a rule. Raises BadConfig."""
    try:
        return globs.parse(text, "/")
    except BadPattern as exc:
        raise BadConfig(f"the pattern {text!r} of a hook is not valid: {exc.message}") from exc
