"""Group commit: writes that would wait for one another in Postgres share one transaction.

Decided here and only here: which writes wait, who shares a transaction with whom, and in which order.

A change that is announced holds one lock of the whole server from before its commit until the log is on disk (NOTIFY).
So several at once are no faster than one after the other, while one transaction takes the lock, and waits for the disk,
once for all that it holds. Nor are they where the disk takes less time than both sides need to wake for each of them.
The first write goes at once. Those that come while it is under way wait in line; when it is back, the first of them
takes those behind it along. Changes that nobody is told of do so only while the server is quick: they share the
flushes of a slow disk, and are faster at once.

None of them depends on another. Where one fails, or has to wait for a row, none is applied and each goes alone; who has
waited in line for 50 ms goes as well and leads from then on, since what is under way waits for something that does not
concern it.

Threading: belongs to the trio thread; any number of tasks at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import outcome
import trio

from fusefs.db.connection import Backend, Row
from fusefs.db.queries import Query
from fusefs.db.values import Param

LARGEST_BYTES = 64 << 10
"""What a write may carry that shares a transaction: the others wait for it."""
_TOGETHER = 16
_TOGETHER_BYTES = 256 << 10
_PATIENCE_MS = 50
_QUICK_S = 0.001
"""How long a commit takes at most, at best, where others had better wait for it. Measured: where one took 0.5 ms, eight
writers were 1.2 times as fast so, 0.8 times where one took 2.5 ms."""
_FORGET = 1.02
"""How much longer the quickest commit is taken to have been with each one that was slower."""

IMPATIENT = Query("set_impatient", f"select set_config('lock_timeout', '{_PATIENCE_MS}ms', true)")
"""The first statement of a shared transaction: while one waits for a row, the others wait."""
PATIENT = Query("set_patient", "select set_config('lock_timeout', '0', true)")
"""The last one: the lock of NOTIFY, which the commit takes, is worth waiting for."""


@dataclass(slots=True)
class Attempt:
    """One write that must happen exactly once.

    Attributes:
        write_id: unique in the history.
        backend: may have applied it, or still may: nobody knows. None: not sent, or its outcome is known.
        announced: others may be told of it; False where the mount knows that nobody else follows the namespace.
    """

    write_id: str
    backend: Backend | None = None
    announced: bool = True


@dataclass(slots=True, eq=False)
class Member:
    """A write that may share a transaction: it sets nothing for its transaction.

    Attributes:
        place: agent and path of its row. Members go in the order of these, so that two transactions seldom wait for
            each other; where they do, 50 ms end it.
        size: the length of its content.
        rows: what it returned; None: it was not applied with others, or nobody knows (its attempt has a backend then).
        task: waits in line.
    """

    query: Query
    params: Sequence[Param]
    place: tuple[str, str]
    size: int
    attempt: Attempt
    rows: list[Row] | None = None
    task: trio.lowlevel.Task | None = field(default=None, init=False)

    def wake(self, *, leads: bool) -> None:
        """End its wait in the line. Without `leads` it was taken along, for better or worse."""
        assert self.task is not None
        trio.lowlevel.reschedule(self.task, outcome.Value(leads))


class Pace:
    """How quick commits are of late.

    Only those count that began alone: one that comes while the disk is busy may be done with another's flush. So under
    a load without a lull what was found before stays.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._quickest_s = math.inf

    def begin(self) -> float | None:
        """A commit begins; None: beside another."""
        self._under_way += 1
        return trio.current_time() if self._under_way == 1 else None

    def end(self, began: float | None, rows: list[Row]) -> None:
        """A commit that began so is done. One that failed or changed no row did not wait for the disk."""
        self._under_way -= 1
        if rows and began is not None:
            self._quickest_s = min(trio.current_time() - began, self._quickest_s * _FORGET)

    @property
    def quick(self) -> bool:
        return self._quickest_s < _QUICK_S


class Line:
    """The writes of one tenant that share transactions. Whoever leads calls `leave` when it is done.

    Attributes:
        writes: how many there are, in line or under way.
    """

    def __init__(self) -> None:
        self.writes = 0
        self._leader: Member | None = None
        self._waiting: deque[Member] = deque()

    async def enter(self, member: Member) -> bool:
        """Return True when the write is to lead, with those that `take` returns; False when another took it along."""
        if self._leader is not None:
            with trio.move_on_after(_PATIENCE_MS / 1000):
                return await self._wait(member)
        self._leader = member
        return True

    async def _wait(self, member: Member) -> bool:
        member.task = trio.lowlevel.current_task()
        self._waiting.append(member)

        def abort(_: object) -> trio.lowlevel.Abort:
            if member not in self._waiting:
                # Under way: what becomes of it is known when its leader is back, or is cancelled as well.
                return trio.lowlevel.Abort.FAILED
            self._waiting.remove(member)
            return trio.lowlevel.Abort.SUCCEEDED

        leads: bool = await trio.lowlevel.wait_task_rescheduled(abort)
        return leads

    def take(self, leader: Member) -> list[Member]:
        """Take out of the line who goes along; returns all that go, the leader first."""
        members = [leader]
        size = leader.size
        while self._waiting and len(members) < _TOGETHER:
            size += self._waiting[0].size
            if size > _TOGETHER_BYTES:
                break
            members.append(self._waiting.popleft())
        return members

    def leave(self, leader: Member) -> None:
        """The next one leads; nothing is done where another leads already."""
        if leader is self._leader:
            self._leader = self._waiting.popleft() if self._waiting else None
            if self._leader is not None:
                self._leader.wake(leads=True)
