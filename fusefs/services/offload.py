"""The offload: a result that is too long for a model's context is stored, and the model gets a preview (HF-10).

Decided here and only here: when a result is stored, and what happens when it cannot be: its text is cut in place and
says so, and the loop goes on. The wording is in `rules.preview`, names and parts in `rules.results`; where the files
go is a `ResultStore`'s: `services.results` has one over the database and one over a mounted directory.

Threading: an `Offload` holds no state between calls; any number may run at once in tasks of trio, or one without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from fusefs.rules import results
from fusefs.rules.config import MIB, RESULT_TOKEN_LIMIT
from fusefs.rules.errors import Exists, outcome
from fusefs.rules.preview import Place, cut_in_place, encode, preview
from fusefs.rules.results import Held, Offloaded
from fusefs.rules.tokens import BYTES_PER_TOKEN, estimate
from fusefs.services.tooling import Handler, ToolCall, ToolResult

_TRIES = 8
"""Names that are tried for one result: the second is free already, save where the store is at fault."""


class ResultStore(Protocol):
    """Keeps the results of one session under `/large_tool_results/{session}`.

    Attributes:
        session: whose results they are.
        max_file_bytes: the largest file that it takes.
        root: where a shell finds the namespace; None where that is not known.
    """

    @property
    def session(self) -> str: ...

    @property
    def max_file_bytes(self) -> int: ...

    @property
    def root(self) -> str | None: ...

    async def make_file(self, path: str, data: bytes) -> None:
        """Make a file that was not there, with its content. Raises Exists, and FsError or OSError for any other
        reason."""

    async def make_directory(self, path: str) -> None:
        """Make a directory that was not there. Raises as `make_file`."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """The `ResultStore` in the place of one that could not be opened: each result is cut, with that reason."""

    error: Exception
    session: str = ""
    max_file_bytes: int = MIB
    root: str | None = None

    async def make_file(self, path: str, data: bytes) -> None:
        raise self.error

    async def make_directory(self, path: str) -> None:
        raise self.error


Observer = Callable[[str, Offloaded], None]
"""Told of each result with its tool's name, for spans and metrics: `telemetry.observe_result`."""


def unobserved(tool: str, result: Offloaded) -> None:
    """The observer of a program that exports nothing."""


class Offload:
    """Stores long results of one session's tools.

    Args:
        limit_tokens: a result with more is stored (`HANGO_TOOL_RESULT_TOKEN_LIMIT`).
        observe: is told of each result.
    """

    def __init__(self, store: ResultStore, *, limit_tokens: int = RESULT_TOKEN_LIMIT, observe: Observer) -> None:
        self._store = store
        self._limit_tokens = limit_tokens
        self._observe = observe

    async def result(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """The result of a call as it goes on: `for_llm` short, `for_user` the whole text where nothing else was
        meant for the user."""
        if call.name in results.NEVER_STORED:
            tokens = estimate(result.for_llm)
            self._observe(call.name, Offloaded(result.for_llm, None, tokens, tokens))
            return result
        done = await self.text(call.id, call.name, result.for_llm)
        if not done.was_long:
            return result
        for_user = result.for_llm if result.for_user is None else result.for_user
        return replace(result, for_llm=done.text, for_user=for_user)

    async def text(self, tool_call_id: str, tool: str, text: str) -> Offloaded:
        """A result as text: itself, or what stands for it."""
        tokens = estimate(text)
        if tokens <= self._limit_tokens:
            done = Offloaded(text, None, tokens, tokens)
            self._observe(tool, done)
            return done
        return await self.store(tool_call_id, tool, Held.of(encode(text)))

    async def store(self, tool_call_id: str, tool: str, held: Held) -> Offloaded:
        """Store a result whatever its length. Raises nothing for a store that fails: its text is cut in place."""
        before = held.digest.tokens
        made: list[tuple[str, int]] = []
        try:
            place = await self._keep(tool_call_id, held, made)
            text, path, error_type = preview(held.digest, place), place.path, ""
        except Exception as exc:  # noqa: BLE001  (an enhancement fails open: whatever broke, the loop goes on)
            text, path, error_type = self._cut(held, _reason(exc, made)), None, type(exc).__name__
        done = Offloaded(text, path, before, estimate(text), error_type)
        self._observe(tool, done)
        return done

    async def _keep(self, tool_call_id: str, held: Held, made: list[tuple[str, int]]) -> Place:
        """Make the files; notes each one's path and size in `made`."""
        store, plan = self._store, results.plan(held, self._store.max_file_bytes)
        folder = results.folder(store.session)
        for name in islice(results.names(tool_call_id), _TRIES):
            path = f"{folder}/{name}"
            try:
                if len(plan.parts) == 1:
                    await store.make_file(path, plan.parts[0])
                    return Place(path, root=store.root)
                await store.make_directory(path)
            except Exists:
                continue
            for number, part in enumerate(plan.parts, 1):
                await store.make_file(file := f"{path}/{results.part_name(number)}", part)
                made.append((file, len(part)))
            return Place(path, len(plan.parts), plan.missing, store.root)
        raise Exists("every name that was tried is taken", path=folder)

    def _cut(self, held: Held, reason: str) -> str:
        limit_bytes = min(self._limit_tokens * BYTES_PER_TOKEN, results.KEPT_TAIL_BYTES)
        return cut_in_place(held.digest, held.edges(limit_bytes * 4 // 5, limit_bytes // 5), reason)


def _reason(exc: Exception, made: list[tuple[str, int]]) -> str:
    text = (exc.strerror or type(exc).__name__) if isinstance(exc, OSError) else outcome(exc).told
    if not made:
        return text
    kept, last = sum(size for _, size in made), results.part_name(len(made))
    return f"{text}; its first {kept:,} bytes are in {made[0][0]} to /{last}"


def offloading(handler: Handler, offload: Offload) -> Handler:
    """A handler whose long results are stored (HF-20)."""

    async def handle(call: ToolCall) -> ToolResult:
        return await offload.result(call, await handler(call))

    return handle
