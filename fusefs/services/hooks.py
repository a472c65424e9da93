"""Hooks: commands of an operator that run after an event on a file (DE-13).

Decided here and only here: that nobody waits for a hook (events wait in a bounded queue, and are dropped, counted and
logged when it is full), that a hook cannot hurt (missing, failing, no JSON, over its time: logged, and the work goes
on), and what it is given: the event as JSON and as variables, never what a file holds, nor a way to the database.

Threading: one trio thread. `offer` never blocks; `run` is a task of the daemon's nursery.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from fusefs import telemetry
from fusefs.rules.events import FileEvent, HookRule
from fusefs.rules.globs import PathPattern
from fusefs.services.processes import CANNOT_RUN, NOT_FOUND, Ended, Patience, run_tree, without_database
from fusefs.store.search import matcher

QUEUE = 1000
"""Events that may wait for one rule."""

_OUTPUT_BYTES = 64 * 1024
_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL: a daemon ends within 10 s, and its hooks before it."""

_log = telemetry.get_logger()


class Hooks:
    """The rules of one daemon.

    Args:
        queue: how many events may wait for each rule.
    """

    def __init__(self, rules: Sequence[HookRule], queue: int = QUEUE) -> None:
        self._queues = [_Queue(rule, queue) for rule in rules]

    def offer(self, event: FileEvent) -> None:
        """Note an event. Called where the change was committed."""
        for queue in self._queues:
            if event.event in queue.rule.events:
                queue.offer(event)

    async def run(self) -> None:
        """Run hooks until cancelled. Those that run then are ended, and what waits is dropped."""
        async with trio.open_nursery() as nursery:
            for queue in self._queues:
                nursery.start_soon(queue.run)


class _Queue:
    """The events that wait for one rule: its command runs after one at a time, in their order, and a slow command
    holds up no other."""

    def __init__(self, rule: HookRule, limit: int) -> None:
        self.rule = rule
        self._limit = limit
        self._include, self._exclude = _any_of(rule.include), _any_of(rule.exclude)
        # Several writes of a file that wait are one event, the newest.
        self._waiting: OrderedDict[tuple[object, ...], FileEvent] = OrderedDict()
        self._there = trio.Semaphore(0)
        self._dropping = False

    def offer(self, event: FileEvent) -> None:
        key = (event.event, event.tenant, event.agent, event.path)
        if key in self._waiting:
            self._waiting[key] = event
        elif len(self._waiting) < self._limit:
            self._waiting[key] = event
            self._there.release()
        else:
            telemetry.counters.hooks["dropped"] += 1
            if not self._dropping:
                self._dropping = True
                _log.warning("hooks.dropping", hook=self.rule.command[0], waiting=len(self._waiting))

    async def run(self) -> None:
        try:
            while True:
                await self._there.acquire()
                _, event = self._waiting.popitem(last=False)
                try:
                    if self._fits(event.path):
                        await self._run_one(event)
                except Exception:  # noqa: BLE001  (a fault of ours here must not end the mount)
                    _log.exception("hooks.fault", hook=self.rule.command[0])
                self._dropping = self._dropping and bool(self._waiting)
        finally:
            if self._waiting:
                telemetry.counters.hooks["dropped"] += len(self._waiting)
                _log.info("hooks.not_run", hook=self.rule.command[0], events=len(self._waiting))

    def _fits(self, path: str) -> bool:
        return (not self.rule.include or self._include(path)) and not self._exclude(path)

    async def _run_one(self, event: FileEvent) -> None:
        rule, output = self.rule, bytearray()

        def keep(data: bytes) -> None:
            output.extend(data[: _OUTPUT_BYTES + 1 - len(output)])

        fields = event.as_json()
        variables = {f"FUSEFS_{name.upper()}": "" if value is None else str(value) for name, value in fields.items()}
        try:
            ended = await run_tree(
                rule.command,
                directory="/",
                environment=without_database(os.environ) | variables,
                patience=Patience(rule.timeout_s, _GRACE_S, linger_s=0.0),
                on_stdout=keep,
                on_stderr=len,
                stdin=json.dumps(fields).encode() + b"\n",
            )
            outcome = _outcome(ended, bytes(output))
        except OSError as exc:
            # No descriptor or process left for it: the daemon's own work goes on.
            ended, outcome = Ended(CANNOT_RUN, failure=exc.strerror or type(exc).__name__), "missing"
        telemetry.counters.hooks[outcome] += 1
        # What a hook prints may be what a file holds: only its length is logged.
        known = {"hook": rule.command[0], "event_kind": event.event.value, "path": event.path}
        if outcome == "ran":
            _log.debug("hooks.ran", **known)
        else:
            _log.warning("hooks.skipped", **known, why=outcome, exit_code=ended.exit_code, printed_bytes=len(output))


def _any_of(patterns: Sequence[PathPattern]) -> Callable[[str], bool]:
    matchers = [matcher(each) for each in patterns]
    return lambda path: any(fits(path) for fits in matchers)


def _outcome(ended: Ended, output: bytes) -> str:
    """`ran`, or why the hook was of no use."""
    if ended.failure and ended.exit_code in (CANNOT_RUN, NOT_FOUND):
        return "missing"
    if ended.timed_out:
        return "timed_out"
    if ended.exit_code:
        return "failed"
    if output.strip() and not _is_object(output):
        return "not_json"
    return "ran"


def _is_object(output: bytes) -> bool:
    try:
        return len(output) <= _OUTPUT_BYTES and isinstance(json.loads(output), dict)
    except (ValueError, RecursionError):
        return False
