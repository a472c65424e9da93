"""The control directory `/.fusefs/`: how a shell learns why, and reads what was.

Decided here and only here: what is in it. It is reached by name and absent from listings, so that
`grep -r` never enters it. `versions/` and `conflicts/` obey the policy of the path that they name.

Threading: one trio thread.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from fusefs.core.attributes import Stat
from fusefs.core.filesystem import Filesystem, Handle, Inode, Opened
from fusefs.core.tree import Node
from fusefs.core.vfs import SessionFs
from fusefs.rules import paths
from fusefs.rules.errors import IsADirectory, NotADirectory, NotFound, ReadOnly
from fusefs.rules.model import Kind
from fusefs.store import conflicts, versions

_FIRST_INO = 1 << 39
_NAME_BYTES = 200
_README = """\
This directory tells what an error number cannot. It is not listed; reach it by name.

errors      what was refused in this session, and what to do: the newest last
conflicts/  the bytes of writes that lost a race, one file each
versions/   old contents: versions/PATH/N is version N of PATH, deleted files included
status      this mount, as JSON

"Stale file handle" means: someone else changed the file since this session read it. Read it again,
then repeat your change; what you wrote is in conflicts/.
"""


class ControlNode(Node):
    """A generated file or directory. `of` is the path, in the namespace, that it is about; `number` the
    version or the conflict's id."""

    __slots__ = ("number", "of", "what")

    def __init__(self, what: str, kind: Kind, ino: int, of: str = "", number: str = "") -> None:
        super().__init__(f"{what}:{of}:{number}", kind, ino, what, None)
        self.what = what
        self.of = of
        self.number = number
        self.version = 1


class ControlHandle(Handle):
    """An open control file with the bytes as they were at open."""

    __slots__ = ("data",)

    def __init__(self, inode: Inode, data: bytes) -> None:
        super().__init__(inode, os.O_RDONLY)
        self.data = data


class ControlFs(Filesystem):
    """Answers for `/.fusefs` of one session.

    Args:
        status: what `status` shows of the daemon.
    """

    def __init__(self, session_fs: SessionFs, status: Callable[[], dict[str, Any]]) -> None:
        super().__init__(session_fs.table)
        self.index = session_fs.index
        self._fs = session_fs
        self._scope = session_fs.scope
        self._db = session_fs.ns.db
        self._status = status
        self._nodes: dict[str, ControlNode] = {}
        self._next_ino = _FIRST_INO
        self.root = self._inode("root", Kind.DIR)
        self.root.lookups = 1

    def _inode(self, what: str, kind: Kind, of: str = "", number: str = "", size: int = 0) -> Inode:
        key = f"{what}:{of}:{number}"
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = ControlNode(what, kind, self._next_ino, of, number)
            self._next_ino += 1
        node.size = size
        return self.table.obtain(self, node)

    def forgotten(self, inode: Inode) -> None:
        self._nodes.pop(inode.node.id, None)

    # -- The tree ----------------------------------------------------------------------------------

    def stat(self, inode: Inode) -> Stat:
        node, settings = inode.node, self._fs.settings
        mode = 0o555 if node.kind is Kind.DIR else 0o444
        size = node.size
        if isinstance(node, ControlNode) and node.what in ("errors", "status", "README"):
            size = len(self._generate(node.what))
        stamp = self._fs.root.node.mtime_ns
        return Stat(
            inode.kino, inode.generation, mode | node.kind.mode_type, 1, settings.uid, settings.gid, size,
            stamp, stamp, stamp, 0.0, 0.0,
        )  # fmt: skip

    async def lookup(self, parent: Inode, name: str) -> Inode | None:
        node = self._node(parent)
        if node.kind is not Kind.DIR:
            raise NotADirectory
        if node.what == "root":
            if name in ("errors", "status", "README"):
                return self._inode(name, Kind.FILE)
            if name in ("versions", "conflicts"):
                return self._inode(name, Kind.DIR, "/")
            return None
        if node.what == "conflicts":
            found = (await self._conflicts()).get(name)
            return None if found is None else self._inode("conflict", Kind.FILE, found.path, found.id, found.size)
        return await self._lookup_version(node.of, name)

    async def list_names(self, inode: Inode) -> list[str]:
        node = self._node(inode)
        if node.what == "root":
            return ["README", "errors", "status", "conflicts", "versions"]
        if node.what == "conflicts":
            return list(await self._conflicts())
        children = await self._children(node.of)
        numbers = await self._numbers(node.of)
        return sorted({*children, *(str(number) for number in numbers)})

    async def open(self, inode: Inode, flags: int) -> Opened:
        node = self._node(inode)
        if node.kind is Kind.DIR:
            raise IsADirectory
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise ReadOnly("files under .fusefs are read-only")
        if node.what == "conflict":
            _, data = await conflicts.read_conflict(self._db, self._scope, node.number)
        elif node.what == "version":
            data = await versions.read_version(self._db, self._scope, node.of, int(node.number))
        else:
            data = self._generate(node.what)
        handle = ControlHandle(inode, data)
        self.table.open(handle)
        return Opened(handle, direct_io=True)

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        assert isinstance(handle, ControlHandle)
        return handle.data[offset : offset + size]

    @staticmethod
    def _node(inode: Inode) -> ControlNode:
        node = inode.node
        assert isinstance(node, ControlNode)
        return node

    # -- What is in the files ----------------------------------------------------------------------

    def _generate(self, what: str) -> bytes:
        if what == "README":
            return _README.encode()
        if what == "errors":
            return "".join(refusal.line() + "\n" for refusal in self._fs.session.refusals).encode()
        own = {"session": self._scope.session, "max_file_bytes": self._fs.settings.limits.max_file_bytes}
        return (json.dumps({**self._status(), **own}, indent=1, sort_keys=True) + "\n").encode()

    async def _conflicts(self) -> dict[str, conflicts.Conflict]:
        """Conflicts by the name that they have here: the file's own, behind the start of the id."""
        named: dict[str, conflicts.Conflict] = {}
        for conflict in await conflicts.list_conflicts(self._db, self._scope):
            base = paths.split(conflict.path)[1].encode()[:_NAME_BYTES].decode(errors="ignore")
            short = f"{conflict.id[:8]}-{base}"
            named[short if short not in named else f"{conflict.id}-{base}"] = conflict
        return named

    async def _lookup_version(self, of: str, name: str) -> Inode | None:
        """A child directory, a file that has or had versions (shown as a directory), or a version."""
        path = paths.join(of, name)
        if not paths.visible(self._scope, path):
            return None
        if name in await self._children(of):
            return self._inode("versions", Kind.DIR, path)
        if re.fullmatch(r"[0-9]{1,10}", name):
            numbers = await self._numbers(of)
            if int(name) in numbers:
                return self._inode("version", Kind.FILE, of, name, numbers[int(name)])
        return None

    async def _children(self, directory: str) -> set[str]:
        """Names at and below a directory that have or had content."""
        names: set[str] = set()
        node = self._fs.ns.tree.root
        found: Node | None = node
        for part in directory.split("/")[1:] if directory != "/" else ():
            found = await self._fs.ns.child(found, part) if found is not None and found.kind is Kind.DIR else None
        if found is not None and found.kind is Kind.DIR:
            await self._fs.ns.load(found)
            names = {name for name, child in found.children.items() if child.committed}
        skip = 1 if directory == "/" else len(directory) + 1
        for gone in await versions.list_deleted(self._db, self._scope, directory):
            names.add(gone.path[skip:].split("/", 1)[0])
        return {name for name in names if paths.visible(self._scope, paths.join(directory, name))}

    async def _numbers(self, path: str) -> dict[int, int]:
        """The readable versions of a file and their sizes."""
        try:
            found = await versions.list_versions(self._db, self._scope, path)
        except NotFound:
            return {}
        return {one.version: one.size for one in found if one.readable}
