"""Announcements: how the mirror follows what other daemons and programs commit.

Decided here and only here: what each announcement does to the mirror, and which kernel caches it makes
void. An announcement is a hint: it can invalidate, it never grants, and one that is malformed or out
of date changes nothing but, at worst, what is cached.

Threading: called on the trio thread by the listener, in the order of the commits; never awaits. The
kernel is told by the worker threads behind `Kernel`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fusefs import telemetry
from fusefs.core.namespace import Namespace
from fusefs.core.tree import Node
from fusefs.db.listen import Channel
from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.model import Kind, NodeRow, Renamed

_WIDEST = Limits(max_path_depth=512, max_path_bytes=8192)
_INOS = range(1024, 1 << 39)
"""What the sequence of incarnations gives; see the schema."""

_COUNTS = range(1 << 31)
_MODES = range(1 << 12)
_OWNERS = range(1 << 32)
_TIMES = range(-(1 << 63), 1 << 63)
"""What the columns of the schema hold. A number beyond could not even be told to the kernel."""

_log = telemetry.get_logger()


class Follower:
    """Applies the announcements of one namespace.

    Args:
        origin: this daemon's own announcements carry it; what they say was applied at the commit.

    Attributes:
        channel: of the namespace.
        again_at: when to ask next whether anybody else follows, in trio's time.
        was_alone: nobody did when that was asked last.
        late: the server knows that this daemon claims names late (`Namespace.alone`).
        comers: how many others said that they follow.
        losses: how often the connection was lost.
    """

    def __init__(self, ns: Namespace, origin: str) -> None:
        self.ns = ns
        self.channel = Channel(ns.channel, (ns.tenant_id, ns.agent_id))
        self.again_at = -math.inf
        self.was_alone = False
        self.late = False
        self.comers = 0
        self.losses = 0
        # json_build_array writes it so. Most announcements that arrive are our own.
        self._own = f'["{origin}",'
        self._own_coming = f'["{origin}", "follow"]'

    def apply(self, payload: str) -> bool:
        """Take one announcement. Whoever may use the table may send one: nothing in it ends the mount, and
        one that cannot be understood voids what is cached. Returns whether it was another's."""
        if payload == self._own_coming:
            return True
        if payload.startswith(self._own):
            if self.ns.moving:
                self._take_own_move(payload)
            return False
        try:
            self._apply(json.loads(payload))
        except Exception as error:  # noqa: BLE001  (the listener's task must outlive any announcement)
            _log.warning("follow.malformed", agent=self.ns.agent_id, bytes=len(payload), error=type(error).__name__)
            self.distrust_all()
        return True

    def _apply(self, fields: Any) -> None:
        op = fields[1]
        if op == "follow":
            self.comers += 1
            self.ns.alone = self.was_alone = False
            return
        telemetry.counters.requests["announcement"] += 1
        if op == "reload":
            self.distrust_all()
            return
        row, old_path, old = _parse(fields)
        if op == "put":
            self._put(row, old)
        elif op == "delete":
            self._delete(row)
        elif op in ("rename", "exchange") and old_path is not None and old is not None:
            self._rename(Renamed(row, old), old_path, exchange=op == "exchange")
        else:
            raise ValueError("not an announcement")

    def _take_own_move(self, payload: str) -> None:
        """A move of a directory by this daemon, in its turn. Whoever forges one can, at worst, make it early."""
        try:
            row, old_path, moved = _parse(json.loads(payload))
        except (ValueError, TypeError, RecursionError):
            return
        take = self.ns.moving.pop(old_path, None) if old_path is not None and moved is not None else None
        if take is not None and moved is not None:
            take(Renamed(row, moved))

    def lost(self) -> None:
        """Announcements may have been missed: nothing cached counts until `live`."""
        self.losses += 1
        self.ns.live = self.ns.alone = self.was_alone = self.late = False
        self.distrust_all()

    def found(self) -> None:
        """LISTEN is in force again: everything is loaded afresh, and may be cached again."""
        self.ns.live = True
        self.distrust_all()

    def distrust_all(self) -> None:
        """Unload the mirror and drop the kernel's caches. There is no one call for it: the top-level
        names take everything below them along that is not in use, each absent name of the root that the kernel
        remembers goes by itself, and every inode's attributes. Pages go at the next open, or now where a file is
        open, and so does its name. A directory in use keeps its name, for the sake of processes that work in it."""
        ns = self.ns
        for view in ns.views:
            for name in (*view.root.node.children, *(view.root.absent or ())):
                ns.kernel.invalidate_entry(view.root.kino, name)
        for inode in ns.known_inodes():
            inode.kernel_version = inode.told = None
            inode.absent = None
            ns.void(inode, attr_only=not inode.handles)
            parent = inode.node.parent
            if inode.handles and parent is not None and inode.node.kind is not Kind.DIR:
                directory = ns.table.known(inode.owner, parent.ino)
                if directory is not None:
                    ns.kernel.invalidate_entry(directory.kino, inode.node.name)
        ns.tree.unload()
        ns.era += 1

    # -- The kinds ---------------------------------------------------------------------------------

    def _put(self, row: NodeRow, old_size: int | None) -> None:
        ns = self.ns
        ns.usage.add(1 if old_size is None else 0, row.size - (old_size or 0))
        known = ns.tree.by_id.get(row.id)
        if known is not None and known.row_ino == row.ino and known.committed:
            if ns.tree.accepts(known, row.version, row.ctime_ns) and not ns.tree.says(known, row):
                if not ns.take_state(known, row):
                    ns.attrs_changed(known)
                known.era = ns.tree.era
            return
        parent_path, name = paths.split(row.path)
        parent = self._directory(parent_path)
        if parent is None:
            return
        ns.directory_changed(parent, store=False)
        present = parent.children.get(name)
        if present is not None and not present.committed:
            ns.take_name(present, row, parent)
            return
        if parent.loaded or parent.touched is not None:
            ns.tree.merge(row, parent, name)
            if present is not None and present.gone:
                ns.name_gone(parent, name, present)
                ns.attrs_changed(present)
        ns.name_appeared(parent, name)
        ns.attrs_changed(parent)

    def _delete(self, row: NodeRow) -> None:
        ns = self.ns
        ns.usage.add(-1, -row.size)
        ns.tree.bury(row.id, row.version)
        node = ns.tree.by_id.get(row.id)
        parent = self._directory(paths.split(row.path)[0]) if node is None else node.parent
        if node is not None and node.version < row.version and parent is not None:
            name = node.name
            ns.tree.detach(node, row.version)
            ns.name_gone(parent, name, node)
            ns.attrs_changed(node)
        if parent is not None:
            ns.directory_changed(parent, store=False)
            ns.attrs_changed(parent)

    def _rename(self, done: Renamed, old_path: str, *, exchange: bool) -> None:
        ns, row = self.ns, done.row
        old_parent_path, old_name = paths.split(old_path)
        parent_path, name = paths.split(row.path)
        source = ns.tree.find(old_path)
        if source is not None and source.row_ino != row.ino:
            source = None
        old_parent, parent = self._directory(old_parent_path), self._directory(parent_path)
        target = ns.tree.find(row.path)
        if target is not None and not target.committed:
            # This mount's own uncommitted file loses its name when it commits, or was committed just now.
            target, parent_for_source = None, None
            if parent is not None:
                ns.tree.distrust(parent)
        else:
            parent_for_source = parent
        if source is None:
            # Not known here: forget what is at both names, and ask again.
            for directory, gone in ((old_parent, old_name), (parent, name)):
                if directory is not None:
                    self._forget_name(directory, gone)
        elif parent_for_source is None:
            if exchange and old_parent is not None:
                ns.tree.distrust(old_parent)
            ns.tree.send_away(source, row.path)
        else:
            ns.apply_rename(source, parent_for_source, name, target, done, exchange=exchange)
            if target is None or exchange:
                ns.attrs_changed(source)
            else:
                ns.usage.add(-1, -target.size)
                ns.content_changed(source)
                ns.attrs_changed(target)
        if source is not None and old_parent is not None:
            ns.name_gone(old_parent, old_name, source)
        if target is not None and parent is not None:
            ns.name_gone(parent, name, target)
        for directory, changed in ((old_parent, old_name), (parent, name)):
            if directory is not None:
                ns.directory_changed(directory, store=False)
                ns.name_appeared(directory, changed)
                ns.attrs_changed(directory)

    def _directory(self, path: str) -> Node | None:
        """What is known at a path, if it is a directory: an announcement may name something below a file."""
        node = self.ns.tree.find(path)
        return node if node is not None and node.kind is Kind.DIR else None

    def _forget_name(self, directory: Node, name: str) -> None:
        ns = self.ns
        node = directory.children.get(name)
        if node is not None and node.committed:
            ns.name_gone(directory, name, node)
            ns.tree.send_away(node, node.path)
        ns.tree.distrust(directory)


def _parse(fields: list[Any]) -> tuple[NodeRow, str | None, int | None]:
    """The order of `fusefs_announce_v1`; the last is the size before of a put, and the version at which the source of a
    rename was. Raises ValueError or TypeError for anything else."""
    _, _, path, old_path, node_id, kind, ino, version, size, mode, uid, gid, mtime_ns, ctime_ns, session, old = fields
    numbers = (
        (ino, _INOS), (version, _COUNTS), (size, _COUNTS), (mode, _MODES), (mtime_ns, _TIMES), (ctime_ns, _TIMES),
    )  # fmt: skip
    if not all(type(number) is int and number in allowed for number, allowed in numbers):
        raise ValueError("not an announcement")
    optional = ((uid, _OWNERS), (gid, _OWNERS), (old, _COUNTS))
    if not all(number is None or (type(number) is int and number in allowed) for number, allowed in optional):
        raise ValueError("not an announcement")
    if not all(isinstance(text, str) for text in (path, node_id, session)):
        raise ValueError("not an announcement")
    for each in (path, path if old_path is None else old_path):
        if not isinstance(each, str) or each == "/" or paths.normalise(each, _WIDEST) != each:
            raise ValueError("not an announcement")
    row = NodeRow(node_id, path, Kind(kind), ino, version, size, mode, uid, gid, mtime_ns, ctime_ns, session)
    return row, old_path, old
