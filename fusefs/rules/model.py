"""The values that pass between the layers: what a row of `agent_files` is, and what a change is.

Decided here and only here: the kinds of node and the shape of a row's metadata.
"""

from __future__ import annotations

import stat
from enum import Enum
from typing import NamedTuple, NewType

Ino = NewType("Ino", int)
"""An incarnation's number (column `ino`)."""


CLAIMED = 0
"""The version of a name that was claimed (O_EXCL) and that nobody wrote to yet."""


class Kind(Enum):
    """What a path is."""

    mode_type: int
    """The S_IFMT bits of stat(2)."""

    def __new__(cls, column: str, mode_type: int = 0) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = column
        kind.mode_type = mode_type
        return kind

    FILE = ("file", stat.S_IFREG)
    DIR = ("dir", stat.S_IFDIR)
    SYMLINK = ("symlink", stat.S_IFLNK)
    FIFO = ("fifo", stat.S_IFIFO)
    SOCKET = ("socket", stat.S_IFSOCK)


KINDS = {kind.value: kind for kind in Kind}
"""Each kind by the value of its column: for each row of a listing, where `Kind(value)` takes three calls."""


class NodeRow(NamedTuple):
    """The metadata of one row, without its content.

    `version` may be `CLAIMED`. Times are nanoseconds since 1970.
    `mode` holds the permission bits only (07777); `uid` and `gid` None: whoever mounts.
    """

    id: str
    path: str
    kind: Kind
    ino: int
    version: int
    size: int
    mode: int
    uid: int | None
    gid: int | None
    mtime_ns: int
    ctime_ns: int
    session: str


class Renamed(NamedTuple):
    """What a rename left behind: the row that is at the new name, and at which version the source was when it moved."""

    row: NodeRow
    moved: int


class Attrs(NamedTuple):
    """Mode, owner and modification time to store, in the order of the statements; None leaves the column alone."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None

    def then(self, later: Attrs) -> Attrs:
        """These, and what is given later instead of them."""
        mode, uid, gid, mtime_ns = later
        return Attrs(
            self.mode if mode is None else mode,
            self.uid if uid is None else uid,
            self.gid if gid is None else gid,
            self.mtime_ns if mtime_ns is None else mtime_ns,
        )


NO_ATTRS = Attrs()


class Commit(NamedTuple):
    """What a successful write left behind."""

    id: str
    version: int
    size: int
    mtime_ns: int
    ctime_ns: int


class WriteKind(Enum):
    """Why a file is written: policy and history tell these apart."""

    CREATE = "create"
    WRITE = "write"
    APPEND = "append"
