"""The values that pass between the core and the door to the kernel, and the clock of time stamps.

Decided here and only here: what stat, setattr and statfs speak of.
"""

from __future__ import annotations

import stat as stat_bits
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2) on Linux; Python's `time` does not name it."""


def now_ns() -> int:
    """The clock of time stamps, as coarse as a local disk's (one tick, 4 ms): writes of one tick leave
    mtime alone, and the kernel keeps their pages."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


@dataclass(slots=True)
class Stat:
    """The attributes of one inode, as stat(2) shows them. Times in ns."""

    ino: int
    generation: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    entry_timeout_s: float
    attr_timeout_s: float

    @property
    def may_be_executed(self) -> bool:
        """Whether root may execute it, or enter it: a file needs an x bit of anybody's (POSIX access(2))."""
        return not stat_bits.S_ISREG(self.mode) or bool(self.mode & 0o111)


@dataclass(slots=True)
class SetAttr:
    """What setattr is to change; None leaves it. Times in ns."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """What statfs shows: bytes and files in all and free."""

    total_bytes: int
    free_bytes: int
    total_files: int
    free_files: int


class Caller(NamedTuple):
    """Who made the request."""

    uid: int
    gid: int


class Drop(Protocol):
    """Who wants to know when an inode is dropped. Both are called in the thread that does it."""

    def drop_begins(self) -> int | None:
        """Just before: the version below which all that the kernel has will be void; None: do not drop."""

    def drop_ended(self, version: int) -> None:
        """The kernel has done it; `version` is what `drop_begins` returned."""


class Kernel(Protocol):
    """How caches of the kernel are dropped. Only `passed` waits: see docs/internals/coherence.md on deadlocks."""

    def invalidate_inode(self, kino: int, *, attr_only: bool = False, drop: Drop | None = None) -> None:
        """Drop the attributes, and unless `attr_only` the pages, of an inode, unless `drop` says otherwise by then."""

    async def passed(self, kino: int) -> None:
        """Return when the calls of `invalidate_inode` for an inode that came before have been made. Not under a lock
        that a READ or a WRITE needs."""

    def invalidate_attr_now(self, kino: int) -> None:
        """Drop the attributes before returning; the one form that is safe on the trio thread."""

    def invalidate_entry(self, parent: int, name: str, deleted: int = 0) -> None:
        """Drop a name, present or absent, from a directory; tell inotify that `deleted` went."""
