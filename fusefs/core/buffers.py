"""What a session has written to a file and not committed yet.

Decided here and only here: how writes at offsets, truncations and appends become one commit, and
what that commit expects. One buffer belongs to one inode of one session, shared by its handles.

Threading: one trio thread; no method awaits.
"""

from __future__ import annotations

from typing import NamedTuple

from fusefs.db.group_commit import Attempt
from fusefs.rules.model import NO_ATTRS, Attrs

_TICK_NS = 10_000_000


class Taken(NamedTuple):
    """What one commit takes of a buffer: its bytes, the attributes that ride along, and the version and
    size of the file that it finds."""

    data: bytes
    attrs: Attrs
    version: int
    size: int


class Buffer:
    """Uncommitted content.

    Attributes:
        expected: the version that the writer built on; None: no file (see `Node.committed`).
        appends_only: a file made by this session to which it only appended.
        whole: `data` is the whole content; otherwise only bytes to append to whatever is there.
        dirty: holds bytes that no commit has.
        committing: how many bytes a commit under way has taken; None: there is none.
        pending: a create or a truncation that no commit has, and nothing written since: the flush that
            bash causes before the first write must not commit it.
        unsettled: a commit of which nobody knows whether Postgres applied it, and what it took. Until that
            is settled nothing else may be committed (an append would double), and the form stays.
    """

    __slots__ = (
        "appends_only",
        "attrs",
        "committing",
        "data",
        "dirty",
        "expected",
        "mtime_ns",
        "pending",
        "unsettled",
        "whole",
    )

    def __init__(self, expected: int | None, data: bytearray, *, whole: bool) -> None:
        self.expected = expected
        self.data = data
        self.whole = whole
        self.appends_only = not whole
        self.dirty = False
        self.pending = False
        self.committing: int | None = None
        self.mtime_ns: int | None = None
        self.attrs = NO_ATTRS
        self.unsettled: tuple[Attempt, Taken] | None = None

    @property
    def uncommitted(self) -> bool:
        """Holds something that Postgres has not acknowledged."""
        return self.dirty or self.pending or self.committing is not None

    @property
    def replaces(self) -> bool:
        """Whether a commit that is due replaces the content: what it builds on was checked then. What is only appended
        goes to whatever is there."""
        return self.whole and self.uncommitted

    def touch(self, now_ns: int) -> None:
        """Content changed now. A time that is under 10 ms old stays, as it would on a disk whose clock ticks
        at 100 Hz: the kernel drops the pages of a file whose mtime it sees change."""
        if self.mtime_ns is None or not 0 <= now_ns - self.mtime_ns < _TICK_NS:
            self.mtime_ns = now_ns

    def write(self, offset: int, data: bytes) -> None:
        """Write at an offset of a whole buffer; a gap reads as NULs (POSIX pwrite)."""
        content = self.data
        end = len(content)
        if offset == end:
            content += data
        else:
            if offset > end:
                content.extend(bytes(offset - end))
            content[offset : offset + len(data)] = data
        self.dirty = True

    def append(self, data: bytes) -> None:
        self.data += data
        self.dirty = True

    def truncate(self, size: int) -> None:
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))

    def take(self) -> bytes:
        """The bytes to commit. What is written while the commit is under way makes the buffer dirty again."""
        self.dirty = self.pending = False
        self.committing = len(self.data)
        return bytes(self.data)

    def settle(self) -> None:
        """The commit succeeded."""
        if not self.whole:
            del self.data[: self.committing]
        self.committing = None

    def settle_late(self, taken: Taken) -> None:
        """A commit that nobody knew of turns out to have succeeded; what was written since is still to be
        committed."""
        self.unsettled = None
        self.committing = len(taken.data)
        self.pending = False
        changed = self.data != taken.data if self.whole else len(self.data) > len(taken.data)
        self.dirty = changed or self.attrs._replace(mtime_ns=self.mtime_ns) != taken.attrs

    def continue_appending(self, committed: int) -> None:
        """Turn a whole buffer, whose first bytes are committed, into one that only appends."""
        del self.data[:committed]
        self.whole = False

    def become_append(self, version: int) -> None:
        """A new file that was only appended to becomes an append to another's, which is at `version`."""
        self.whole = False
        self.expected = version
        self.pending = False

    def restore(self, dirty: bool) -> None:
        """The commit did not happen: everything is to be committed again."""
        self.committing = None
        self.dirty = self.dirty or dirty
        self.pending = not self.dirty
