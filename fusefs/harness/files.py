"""The two middlewares over an agent's files: its tools, and the offload of long results.

Decided here and only here (HF-20): what the system prompt says of the files. It names roots and reserved prefixes and
nothing else; what may be done with them stands in the tools' own descriptions, which a model reads when it needs them.

Threading: trio. A stack made here is one context of a model: what it has read counts as seen in it alone, so that a
parent and a child on the same files, each with its own, cannot overwrite what the other wrote (HF-09).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from fusefs import telemetry
from fusefs.db.pool import Database
from fusefs.harness.stack import Middleware, Slot, Stack
from fusefs.rules import paths
from fusefs.rules.config import RESULT_TOKEN_LIMIT, Limits
from fusefs.rules.scope import Scope
from fusefs.services.backend import Backend
from fusefs.services.database_results import DatabaseResults
from fusefs.services.offload import Offload, offloading
from fusefs.services.tooling import Handler, Tool
from fusefs.services.toolset import Toolset


class FilesystemMiddleware(Middleware):
    """The file tools of one context, and where they may look."""

    slot: ClassVar[Slot] = Slot.FILESYSTEM

    def __init__(self, toolset: Toolset) -> None:
        self._toolset = toolset

    def tools(self) -> Sequence[Tool]:
        return self._toolset.tools

    def prompt(self) -> str:
        session = self._toolset.backend.scope.session
        return "\n".join(
            (
                "Files:",
                "- /: this agent's files, shared by its sessions",
                f"- reserved: {', '.join(paths.RESERVED)}",
                f"- of this session: {paths.LARGE_RESULTS}/{session}, {paths.HISTORY}/{session}.md",
            )
        )

    def end_batch(self) -> None:
        self._toolset.end_batch()


class OffloadMiddleware(Middleware):
    """Every tool's long results are stored, and the model gets a preview."""

    slot: ClassVar[Slot] = Slot.OFFLOAD

    def __init__(self, offload: Offload) -> None:
        self._offload = offload

    def wrap(self, handler: Handler) -> Handler:
        return offloading(handler, self._offload)


def file_stack(
    db: Database,
    scope: Scope,
    *,
    limits: Limits | None = None,
    limit_tokens: int = RESULT_TOKEN_LIMIT,
    tools: Iterable[Tool] = (),
) -> Stack:
    """A new context on the files of a scope.

    Args:
        limit_tokens: of a result, by estimate; a longer one is stored (`HANGO_TOOL_RESULT_TOKEN_LIMIT`).
        tools: further tools, whose results are stored as well.
    """
    backend = Backend(db, scope, limits)
    results = DatabaseResults(db, scope, backend.limits)
    offload = Offload(results, limit_tokens=limit_tokens, observe=telemetry.observe_result)
    return Stack([FilesystemMiddleware(Toolset(backend)), OffloadMiddleware(offload)], tools)
