"""What one session has seen, vacated and been refused.

Decided here and only here: whether a session may replace a file (the first of the three checks of
docs/internals/concurrency.md), when a create goes on with a deleted lineage, and how a refusal is told once.

Threading: one trio thread; no method awaits.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from fusefs import telemetry
from fusefs.core.tree import Node
from fusefs.rules.config import Settings, VersionCheck
from fusefs.rules.errors import (
    Exists,
    FsError,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    StaleVersion,
    outcome,
)
from fusefs.rules.model import NodeRow
from fusefs.rules.scope import Scope
from fusefs.rules.seen import SeenVersions

_UNREAD_LINEAGES = 100_000
_GLIMPSED = -1
"""Older than any version."""
_REFUSALS = 200
_VACATED_S = 10.0
_SAME_REFUSAL_S = 1.0

_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class Vacated:
    """A path that this session deleted: its lineage, the version that the delete took, the newest
    version that the session had seen, and when (monotonic s)."""

    id: str
    version: int
    seen: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused operation, for `.fusefs/errors`."""

    at_s: float
    op: str
    path: str
    reason: str
    hint: str

    def line(self) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at_s))
        path = self.path.encode("unicode_escape").decode("ascii")
        return f"{stamp} {self.op} {path}: {self.reason}." + (f" {self.hint}" if self.hint else "")


class Session:
    """One session of one agent, as one daemon knows it.

    Args:
        resumed_ns: when the session began, if it was known before this daemon opened it; None: new.
            A resumed session has seen nothing, so what others changed since it began must be read.
    """

    def __init__(self, scope: Scope, settings: Settings, resumed_ns: int | None) -> None:
        self.scope = scope
        self.settings = settings
        self.resumed_ns = resumed_ns
        self._seen = SeenVersions()
        # Lineages that a resumed session appended to and did not read: at which version it left them.
        self._unread: OrderedDict[str, int] = OrderedDict()
        self._vacated: OrderedDict[str, Vacated] = OrderedDict()
        self.refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self._refused_at: dict[tuple[str, str, type[FsError]], float] = {}

    # -- Seen --------------------------------------------------------------------------------------

    def saw(self, node: Node | NodeRow, version: int) -> None:
        """The session opened this version for reading, was served it, or wrote it."""
        if not self._seen.use(node.id, version):
            self._seen.remember(node.path, node.id, version)

    def glimpsed(self, node: Node) -> None:
        """The session read of a file, but nobody can tell which version, or whether all of it."""
        if self._seen.version(node.id) is None:
            self.saw(node, _GLIMPSED)

    def went_back(self, node: Node) -> None:
        """What the session saw of newer versions counts no more: their numbers are given again."""
        self._seen.lower(node.id, node.version)

    def start_anew(self, began_ns: int) -> None:
        """A failover: which versions the session saw of what is there now, nobody knows. As after a restart of the
        daemon, what others changed since the session began must be read before it is replaced."""
        self._seen.clear()
        self._vacated.clear()
        if self.resumed_ns is None:
            self.resumed_ns = began_ns

    def appended(self, node: Node, version: int) -> None:
        """The session wrote this version by an append, which does not show it what it was appended to."""
        known = self._seen.version(node.id)
        if known is None and self.resumed_ns is not None:
            self._unread[node.id] = version
            self._unread.move_to_end(node.id)
            if len(self._unread) > _UNREAD_LINEAGES:
                self._unread.popitem(last=False)
        elif known is None or known == version - 1:
            self.saw(node, version)

    def must_remember(self, node: Node) -> bool:
        """Whether the newest version is the session's own, from before this daemon knew it: it may be an append to what
        the session had not seen."""
        own = node.session == self.scope.session and self._unread.get(node.id) != node.version
        return self.resumed_ns is not None and own and node.committed and self._seen.version(node.id) is None

    def remembered(self, node: Node, version: int, *, seen: bool) -> None:
        """What the history says of a version that `must_remember` asks for."""
        if seen:
            self.saw(node, version)
        else:
            self._unread[node.id] = version

    def left(self, path: str) -> None:
        """The session itself took away what it saw at a path."""
        self._seen.leave(path)

    def seen(self, node_id: str) -> int | None:
        return self._seen.version(node_id)

    def expects(self, node: Node) -> int | None:
        """The version that a rename over the file may meet; None: any, the session never saw it."""
        if self.settings.version_check is VersionCheck.OPEN:
            return node.version
        return self._seen.version(node.id)

    def check_replace(self, node: Node) -> None:
        """Refuse to replace a file of which the session saw only an older version. Raises StaleVersion."""
        if self.settings.version_check is VersionCheck.OPEN or not node.committed:
            return
        seen = self._seen.version(node.id)
        if seen is not None:
            if seen == _GLIMPSED:
                raise StaleVersion("changed while you read it; read it again and retry", path=node.path)
            if seen < node.version:
                raise StaleVersion(path=node.path, expected=seen, actual=node.version)
            return
        there = self._seen.lineage(node.path)
        if there is not None and there != node.id:
            raise StaleVersion.of_another(node.path, node.version)
        own = node.session == self.scope.session and self._unread.get(node.id) != node.version
        if own or node.size == 0:
            return
        if self.settings.require_read:
            raise StaleVersion("this session has not read it; read it before you replace it", path=node.path)
        if self.resumed_ns is not None and node.changed_ns > self.resumed_ns:
            raise StaleVersion(
                "changed by others since this session began; read it before you replace it", path=node.path
            )

    def may_replace(self, node: Node) -> bool:
        """Whether `check_replace` lets it pass."""
        try:
            self.check_replace(node)
        except StaleVersion:
            return False
        return True

    # -- Vacated -----------------------------------------------------------------------------------

    def vacate(self, path: str, node_id: str, version: int) -> None:
        """Note that the session deleted the lineage at a path; `version` is what the delete took."""
        self.left(path)
        self._vacated[path] = Vacated(node_id, version, self._seen.version(node_id), time.monotonic())
        self._vacated.move_to_end(path)
        while len(self._vacated) > 1000:
            self._vacated.popitem(last=False)

    def revives(self, path: str) -> Vacated | None:
        """The lineage that a create at this path goes on with: git and others unlink, then create.

        Raises StaleVersion where the session deleted a version that it had not seen.
        """
        vacated = self._vacated.get(path)
        if vacated is None:
            return None
        if time.monotonic() - vacated.at_s > _VACATED_S:
            del self._vacated[path]
            return None
        last = vacated.version - 1
        if self.settings.version_check is VersionCheck.SEEN and vacated.seen is not None and vacated.seen < last:
            raise StaleVersion(path=path, expected=vacated.seen, actual=last)
        return vacated

    def occupied(self, path: str) -> None:
        """Something is at the path again."""
        self._vacated.pop(path, None)

    # -- Refusals ----------------------------------------------------------------------------------

    def refuse_change(self, op: str, path: str, error: FsError) -> None:
        """Tell a refusal where the errno alone does not say why."""
        if not isinstance(error, NotFound | Exists | NotADirectory | IsADirectory | NotEmpty | NotPermitted):
            self.refuse(op, path, error)

    def refuse(self, op: str, path: str, error: FsError) -> None:
        """Tell a refusal in `.fusefs/errors` and the log, once: the VFS repeats an ESTALE (measured)."""
        if error.told:
            return
        error.told = True
        key = (op, path, type(error))
        now = time.time()
        if now - self._refused_at.get(key, 0.0) < _SAME_REFUSAL_S:
            return
        if len(self._refused_at) > _REFUSALS:
            self._refused_at.clear()
        self._refused_at[key] = now
        told = outcome(error)
        self.refusals.append(Refusal(now, op, path, error.message, told.hint))
        _log.info("fs.refused", **self.scope.log_context(), op=op, path=path, reason=told.error_type)
