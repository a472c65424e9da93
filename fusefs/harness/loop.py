"""The loop: a model is asked, its calls of tools are run, and it is asked again with their results.

Decided here and only here: when a loop ends, what a reply that is empty or broke off means (DE-07), how the calls of
one reply run, and that every call has exactly one result in the transcript, however the loop ends. Whether tools are
called is read from the reply's blocks; its `stop_reason` is never trusted alone.

Calls that change nothing run at once with their neighbours of that kind; one that changes something runs alone, in the
order of the reply: so which of two edits of a file is the second is what the model meant, not chance.

Threading: trio. `run` queues: one at a time for each loop. Cancelled, it leaves a transcript that can be gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import trio

from fusefs import telemetry
from fusefs.harness.model import Model
from fusefs.harness.replies import Reply, ToolUse
from fusefs.harness.stack import Stack
from fusefs.rules.tokens import Estimator, estimate_request
from fusefs.services.tooling import Tool, ToolCall, ToolResult, invalid_input

_log = telemetry.get_logger()

Watcher = Callable[[ToolCall, ToolResult], None]
"""Gets every result as it comes, for the person who watches: `for_user` is theirs."""


class Stop(Enum):
    """Why a loop ended."""

    DONE = "done"
    """The model called no more tools."""
    INCOMPLETE = "incomplete"
    """Likewise, but its last words broke off."""
    EMPTY = "empty"
    """The model did not answer, not even when it was asked again."""
    TURNS = "turns"
    """The bound on turns was reached."""
    TOO_LARGE = "too large"
    """The next request is over the bound by its estimate, and was not sent."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Bounds of one `run`.

    Args:
        max_turns: requests that are sent, repeated ones not counted.
        max_request_tokens: what the estimate of one request may be.
    """

    max_turns: int = 50
    max_request_tokens: int = 180_000


@dataclass(frozen=True, slots=True)
class Answer:
    """How a `run` ended.

    Args:
        text: the model's last words; '' where there are none.
        estimates: tokens of each request, by estimate, in the order of sending.
    """

    text: str
    stop: Stop
    estimates: tuple[int, ...]


class Loop:
    """One conversation.

    Args:
        system: the system prompt; the middlewares' parts come after it.
        messages: the transcript so far, in the form of the Messages API.
    """

    def __init__(
        self,
        model: Model,
        stack: Stack,
        *,
        system: str = "",
        settings: LoopSettings | None = None,
        estimator: Estimator = estimate_request,
        watch: Watcher = lambda _call, _result: None,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._model = model
        self._stack = stack
        self._system = [{"type": "text", "text": text} for text in (system, *stack.prompt()) if text]
        self._settings = settings or LoopSettings()
        self._estimator = estimator
        self._watch = watch
        self._turn = trio.Lock()

    async def run(self, text: str) -> Answer:
        """Say `text` to the model and go on until it has nothing more to do.

        Raises ModelFailed where the model's API gives no reply; what was said and done stays in the transcript.
        """
        async with self._turn:
            self.messages.append({"role": "user", "content": text})
            estimates: list[int] = []
            words = ""
            for _ in range(self._settings.max_turns):
                request = self._request()
                estimates.append(self._estimator(request))
                _log.debug("model.request", tokens=estimates[-1], messages=len(self.messages))
                if estimates[-1] > self._settings.max_request_tokens:
                    return Answer(words, Stop.TOO_LARGE, tuple(estimates[:-1]))
                reply = await self._model.ask(request)
                if not reply.blocks:
                    _log.warning("model.empty_reply")
                    reply = await self._model.ask(request)
                if not reply.blocks:
                    return Answer(words, Stop.EMPTY, tuple(estimates))
                words = reply.text
                self.messages.append({"role": "assistant", "content": list(reply.blocks)})
                if not reply.calls:
                    return Answer(words, _last_stop(reply), tuple(estimates))
                await self._run_batch(reply.calls)
            return Answer(words, Stop.TURNS, tuple(estimates))

    def _request(self) -> dict[str, object]:
        tools = [_definition(tool) for tool in self._stack.tools.values()]
        parts: tuple[tuple[str, object], ...] = (
            ("system", self._system),
            ("messages", list(self.messages)),
            ("tools", tools),
        )
        return self._model.request({name: part for name, part in parts if part})

    async def _run_batch(self, calls: Sequence[ToolUse]) -> None:
        """Run the calls of one reply, whose message is the transcript's last, and append their results. A call that a
        cancellation kept from its result says so."""
        results = [ToolResult("Cancelled before it gave a result.", is_error=True)] * len(calls)

        async def run(index: int) -> None:
            results[index] = await self._run_call(calls[index])

        try:
            for _, group in groupby(range(len(calls)), key=lambda index: self._kind(calls, index)):
                async with trio.open_nursery() as nursery:
                    for index in group:
                        nursery.start_soon(run, index)
        finally:
            self.messages.append(
                {"role": "user", "content": [_block(*pair) for pair in zip(calls, results, strict=True)]}
            )
            self._stack.end_batch()

    def _kind(self, calls: Sequence[ToolUse], index: int) -> int:
        """Equal for neighbours that may run at once."""
        tool = self._stack.tools.get(calls[index].name)
        return -1 if tool is None or tool.read_only else index

    async def _run_call(self, use: ToolUse) -> ToolResult:
        call = ToolCall(use.id, use.name, use.arguments)
        tool = self._stack.tools.get(use.name)
        if tool is not None and use.broken is not None:
            result = invalid_input(tool, use.broken)
        else:
            result = await self._stack.call(call)
        self._watch(call, result)
        return result


def _last_stop(reply: Reply) -> Stop:
    return Stop.DONE if reply.complete and reply.stop_reason != "max_tokens" else Stop.INCOMPLETE


def _definition(tool: Tool) -> dict[str, object]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}


def _block(use: ToolUse, result: ToolResult) -> dict[str, object]:
    """A result as the API takes it."""
    block: dict[str, object] = {"type": "tool_result", "tool_use_id": use.id, "content": result.for_llm}
    return {**block, "is_error": True} if result.is_error else block
