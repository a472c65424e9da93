"""Whose turn it is to read the next request from the kernel.

Decided here and only here: how pyfuse3's tasks take turns. pyfuse3 guards the reading with `trio.Lock` and
looks `trio` up in its own module, where a replacement may be put (its asyncio mode does the same). trio's lock
checks for fairness, owners and deadlocks, which costs 8 us at each of two sides of each request; here the
task that waited least goes next, since its memory is warm.

Threading: one trio thread.
"""

from __future__ import annotations

from types import ModuleType

import pyfuse3
import trio


class Turns:
    """The part of `trio.Lock` that pyfuse3 uses: `async with`."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[trio.lowlevel.Task] = []

    async def __aenter__(self) -> None:
        if not self._taken:
            self._taken = True
            return
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def __aexit__(self, *_exc: object) -> None:
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop())
        else:
            self._taken = False


def install() -> None:
    """Let pyfuse3 take turns so. Before `pyfuse3.main`, which makes its lock on first use."""
    stand_in = ModuleType("trio")
    stand_in.__dict__.update(trio.__dict__, Lock=Turns)
    pyfuse3.trio = stand_in  # type: ignore[attr-defined]
