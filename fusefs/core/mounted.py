"""Everything behind one kernel mount: its inodes, its namespaces and their sessions.

Decided here and only here: that sessions of one namespace share its mirror and its announcements, and
what is done in the background while a mount lives.

Threading: one trio thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import trio

from fusefs import __version__, telemetry
from fusefs.core.attributes import Kernel
from fusefs.core.contents import Contents
from fusefs.core.control import ControlFs
from fusefs.core.filesystem import Inode, InodeTable
from fusefs.core.follow import Follower
from fusefs.core.namespace import Inos, Namespace
from fusefs.core.rescue import RescueDirectory
from fusefs.core.session import Session
from fusefs.core.vfs import SessionFs
from fusefs.db.listen import Listener
from fusefs.db.pool import Database
from fusefs.rules.config import Durability, Settings
from fusefs.rules.errors import FsError, Unavailable
from fusefs.rules.scope import Scope
from fusefs.store import namespaces

_ROUND_S = 2.0
_ALONE_S = 16.0
"""How often a daemon that announces asks whether it need."""
_ATTEND_AGAIN_S = 0.2
_HOLD_S = 0.005
"""How long attributes are held, at least: what comes meanwhile is stored along with them."""
_LAST_STEPS_S = 0.5
"""What noting times and the ends of sessions may take beyond the deadline of the buffers, and where Postgres did not
take these."""
_LARGEST_FILES = 4
"""So many files of the largest size fit into the memory for contents, whatever that is set to."""
_log = telemetry.get_logger()


class Mounted:
    """The core of one mount.

    Args:
        origin: this daemon's name in announcements.
        keeps_sessions: sessions outlive the mount, as a host's do: their folders are there again.
    """

    def __init__(self, db: Database, kernel: Kernel, settings: Settings, origin: str, *, keeps_sessions: bool) -> None:
        self.db = db
        self.kernel = kernel
        self.settings = settings
        self.origin = origin
        self.keeps_sessions = keeps_sessions
        self.table = InodeTable()
        # A file that did not fit would be fetched whole for each READ of 128 KiB; sqlite has two of them in turn.
        self.contents = Contents(max(settings.content_cache_bytes, _LARGEST_FILES * settings.limits.max_file_bytes))
        self.sessions: list[SessionFs] = []
        self.listener: Listener | None = None
        self._followers: dict[str, Follower] = {}
        self._namespaces: dict[tuple[str, str], Namespace] = {}
        self._openings: dict[tuple[str, str], trio.Lock] = {}
        self.rescue = RescueDirectory(settings.rescue_dir)
        self._inos: dict[str, Inos] = {}
        # What the background has to look at, so that it does nothing for namespaces in which nothing happens.
        self._unused: set[Namespace] = set()
        self._unmeasured: set[Namespace] = set()
        self._touched: set[Namespace] = set()
        self._doubtful: set[Namespace] = set()
        self._holding: set[Namespace] = set()
        # One message for each that begins to hold something.
        self._to_store, self._begins_to_hold = trio.open_memory_channel[Namespace](math.inf)
        self._audible: set[Follower] = set()
        # Whose names are to be claimed, since others came; and who is to be subscribed to again.
        self._met: set[Follower] = set()
        self._returning: set[Follower] = set()
        self._wake = trio.Event()
        self._next_index = 0
        self._rounds = 0
        self._started_ns = time.time_ns()

    # -- Announcements -----------------------------------------------------------------------------

    def on_notify(self, channel: str, payload: str) -> bool:
        """See `Listener`."""
        follower = self._followers.get(channel)
        if follower is None:
            return False
        comers = follower.comers
        if follower.apply(payload):
            if follower.comers != comers:
                self._meet(follower)
            return True
        self._audible.add(follower)
        return False

    def on_lost(self) -> None:
        _log.info("follow.lost", namespaces=len(self._followers))
        for follower in self._followers.values():
            follower.lost()
            self._meet(follower)

    def on_live(self, same_history: bool) -> None:
        """See `Listener`. Where commits do not wait for the disk, a server that was away may have lost the newest."""
        same_history = same_history and self.settings.durability is Durability.FULL
        _log.info("follow.live", namespaces=len(self._followers), same_history=same_history)
        if not same_history:
            self.contents.clear()
            for inos in self._inos.values():
                inos.clear()
            for fs in self.sessions:
                fs.session.start_anew(self._started_ns)
        self._returning.update(self._followers.values())
        self._wake.set()
        self._unmeasured.update(self._namespaces.values())

    # -- Namespaces and sessions -------------------------------------------------------------------

    async def namespace(self, tenant_id: str, agent_id: str) -> Namespace:
        """The namespace of an agent, opened on first use: LISTEN first, so that what is loaded later is
        followed from then on. Raises UnknownScope."""
        async with self._opening(tenant_id, agent_id):
            found = self._namespaces.get((tenant_id, agent_id))
            if found is not None:
                self._unused.discard(found)
                return found
            assert self.listener is not None
            row = await namespaces.prepare(self.db, tenant_id, agent_id)
            inos = self._inos.setdefault(tenant_id, Inos(self.db, tenant_id))
            ns = Namespace(
                self.db,
                tenant_id,
                agent_id,
                row,
                contents=self.contents,
                table=self.table,
                kernel=self.kernel,
                listener=self.listener,
                inos=inos,
                rescue=self.rescue,
                touched=self._touched,
                doubtful=self._doubtful,
                holding=self._note_holding,
                max_nodes=self.settings.max_nodes,
            )
            follower = self._followers[row.channel] = Follower(ns, self.origin)
            try:
                await self._follow(follower, late=True)
            except BaseException:
                del self._followers[row.channel]
                raise
            self._namespaces[tenant_id, agent_id] = ns
            self._unmeasured.add(ns)
            return ns

    async def open_session(
        self, scope: Scope, index: int | None = None, on_forgotten: Callable[[SessionFs], None] | None = None
    ) -> SessionFs:
        """A file system for one session of a namespace.

        Args:
            index: 0 for a mount that shows nothing but this session; else the next free one.
            on_forgotten: called when the kernel knows nothing of it any more.
        """
        ns = await self.namespace(scope.tenant_id, scope.agent_id)
        try:
            resumed_ns = await namespaces.open_session(self.db, scope)
        except BaseException:
            if not ns.views:
                self._unused.add(ns)
            raise
        if index is None:
            self._next_index += 1
            index = self._next_index
        fs = SessionFs(self.table, ns, Session(scope, self.settings, resumed_ns), index, on_forgotten)
        fs.control_root = ControlFs(fs, self.status).root
        self.sessions.append(fs)
        if len(ns.views) > 1:
            await self._tolerate(ns.publish)
        return fs

    def close_session(self, fs: SessionFs) -> None:
        """Forget a session that the kernel knows nothing of; its buffers are committed by then, since a
        handle would keep its inode. A session opened again has seen nothing (see `Session`)."""
        fs.close()
        self.sessions.remove(fs)
        for root in (fs.control_root, fs.root):
            if root is not None:
                root.lookups = 0
                self.table.release(root)
        if not fs.ns.views:
            self._unused.add(fs.ns)

    def status(self) -> dict[str, Any]:
        """What `.fusefs/status` and `fusefs status` show of this daemon."""
        assert self.listener is not None
        return {
            **telemetry.counters.snapshot(),
            "version": __version__,
            "live": self.listener.live,
            "listener_reconnects": self.listener.reconnects,
            "sessions": len(self.sessions),
            "namespaces": self.namespace_count,
            "background_rounds": self._rounds,
            "nodes": self.node_count,
            "inodes": len(self.table.inodes),
            "handles": len(self.table.handles),
            "content_cache_bytes": self.contents.bytes,
            "trips": self.db.trips,
            "listener_trips": self.listener.trips,
            "pool": asdict(self.db.statistics()),
        }

    @property
    def namespace_count(self) -> int:
        return len(self._namespaces)

    @property
    def node_count(self) -> int:
        """Files and directories in memory. Any thread may ask, as of `file_counts`: they iterate over a copy."""
        return sum(len(ns.tree) for ns in list(self._namespaces.values()))

    def file_counts(self) -> dict[str, int]:
        """Files by tenant, for the gauge (HF-18)."""
        counts: dict[str, int] = {}
        for (tenant_id, _), ns in list(self._namespaces.items()):
            counts[tenant_id] = counts.get(tenant_id, 0) + ns.usage.files
        return counts

    # -- The background ----------------------------------------------------------------------------

    async def work_in_background(self) -> None:
        """Every two seconds store the times of changed directories, count new namespaces, and close those that no
        session uses any more. Never at once: the count reads all of a namespace, when its first user wants to start."""
        while True:
            await trio.sleep(_ROUND_S)
            for ns in list(self._unmeasured):
                self._unmeasured.discard(ns)
                await self._tolerate(lambda ns=ns: ns.usage.measure(self.db, ns.tenant_id, ns.agent_id))  # type: ignore[misc]
            await self._store_times()
            for follower in list(self._audible):
                await self._tolerate(lambda follower=follower: self._follow_again(follower))  # type: ignore[misc]
            for ns in list(self._doubtful):
                self._doubtful.discard(ns)
                await self._settle_doubts(ns)
            for ns in list(self._unused):
                await self._close_namespace(ns)
            self._rounds += 1

    async def store_held(self) -> None:
        """Store the attributes that namespaces hold, a moment after the first. A task for each namespace."""
        async with trio.open_nursery() as nursery:
            async for ns in self._begins_to_hold:
                nursery.start_soon(self._store_held, ns)

    async def _store_held(self, ns: Namespace) -> None:
        """Store what a namespace holds until it holds nothing."""
        wait_s = _HOLD_S
        try:
            while ns.held:
                await trio.sleep(wait_s)
                try:
                    left = await ns.held.store_once(trio.current_time())
                    wait_s = _ATTEND_AGAIN_S if left else _HOLD_S
                except FsError as error:
                    wait_s = min(max(_ATTEND_AGAIN_S, 2 * wait_s), _ROUND_S)
                    _log.warning("mounted.attributes_wait", files=len(ns.held), error=type(error).__name__)
        finally:
            self._holding.discard(ns)

    def _note_holding(self, ns: Namespace) -> None:
        if ns not in self._holding:
            self._holding.add(ns)
            self._to_store.send_nowait(ns)

    async def _follow_again(self, follower: Follower) -> None:
        """Where this daemon hears its own announcements, ask whether anybody else does still. Names are claimed late
        when that was so twice: a mount that lost its connection for announcements is back by then."""
        if trio.current_time() < follower.again_at:
            return
        follower.again_at = trio.current_time() + _ALONE_S
        assert self.listener is not None
        comers, losses, late = follower.comers, follower.losses, follower.was_alone and not follower.late
        alone = await self.listener.follow_again(follower.channel, late=late)
        self._audible.discard(follower)
        self._take_answer(follower, alone, comers, losses, late=late)
        if alone and not follower.late:
            self._audible.add(follower)

    async def _follow(self, follower: Follower, *, late: bool) -> None:
        """Subscribe to a namespace's channel; from then on it is live. Raises Unavailable."""
        assert self.listener is not None
        comers, losses = follower.comers, follower.losses
        alone = await self.listener.subscribe(follower.channel, late=late)
        self._take_answer(follower, alone, comers, losses, late=late)
        if losses == follower.losses:
            follower.found()

    def _take_answer(self, follower: Follower, alone: bool, comers: int, losses: int, *, late: bool) -> None:
        """Take what the server said of a follower: whether it is alone, and, if it asked for that, claims late. Who
        came or was met since it was asked is not forgotten for it."""
        if losses != follower.losses:
            return
        follower.late = follower.late or (alone and late)
        if alone and comers == follower.comers and follower not in self._met:
            follower.was_alone = True
            follower.ns.alone = follower.late
        elif follower.late:
            self._meet(follower)

    def _meet(self, follower: Follower) -> None:
        follower.ns.alone = False
        self._met.add(follower)
        self._wake.set()

    async def attend_to_followers(self) -> None:
        """Whoever comes to follow a namespace waits until every name in it is claimed; and each namespace that lost its
        announcements is followed again. A task for each: none waits for another's Postgres."""
        begun: set[tuple[bool, Follower]] = set()

        async def once(coming_back: bool, follower: Follower) -> None:
            try:
                await (self._come_back(follower) if coming_back else self._claim_all(follower))
            finally:
                begun.discard((coming_back, follower))

        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                due = {(False, follower) for follower in self._met} | {(True, each) for each in self._returning}
                for each in due - begun:
                    begun.add(each)
                    nursery.start_soon(once, *each)

    async def _claim_all(self, follower: Follower) -> None:
        """Claim the names of a namespace, and let those go on who wait for it."""
        while follower in self._met:
            try:
                await follower.ns.publish()
                if follower.late:
                    losses = follower.losses
                    assert self.listener is not None
                    await self.listener.be_late_no_more(follower.channel)
                    follower.late = follower.late and losses != follower.losses
                self._met.discard(follower)
            except FsError as error:
                _log.info("mounted.later", error=type(error).__name__)
                await trio.sleep(_ATTEND_AGAIN_S)

    async def _come_back(self, follower: Follower) -> None:
        """Follow a namespace again. Who is alone now claims late a while later: another mount that lost its connection
        at the same time may not be back yet."""
        while follower in self._returning:
            try:
                await self._follow(follower, late=False)
                self._returning.discard(follower)
                follower.again_at = trio.current_time() + _ALONE_S
                self._audible.add(follower)
            except FsError as error:
                _log.info("mounted.later", error=type(error).__name__)
                await trio.sleep(_ATTEND_AGAIN_S)

    def _opening(self, tenant_id: str, agent_id: str) -> trio.Lock:
        """One agent's mounts wait for each other, and for no other agent's."""
        return self._openings.setdefault((tenant_id, agent_id), trio.Lock())

    async def _settle_doubts(self, ns: Namespace) -> None:
        try:
            await ns.settle_doubts()
        except FsError as error:
            self._doubtful.add(ns)
            _log.info("mounted.later", error=type(error).__name__)

    async def _store_times(self) -> None:
        for ns in list(self._touched):
            self._touched.discard(ns)
            await self._tolerate(ns.store_times)

    async def _close_namespace(self, ns: Namespace) -> None:
        """Forget a namespace without sessions, and stop listening to it."""
        async with self._opening(ns.tenant_id, ns.agent_id):
            self._unused.discard(ns)
            if ns.views:
                return  # a session was opened meanwhile
            if ns.held:
                self._unused.add(ns)  # until it holds nothing
                return
            await self._tolerate(ns.store_times)
            del self._namespaces[ns.tenant_id, ns.agent_id]
            follower = self._followers.pop(ns.channel)
            for followers in (self._audible, self._met, self._returning):
                followers.discard(follower)
            for namespaces_ in (self._unmeasured, self._touched, self._doubtful):
                namespaces_.discard(ns)
            assert self.listener is not None
            await self._tolerate(lambda: self.listener.unsubscribe(follower.channel))  # type: ignore[union-attr]

    async def _tolerate(self, work: Callable[[], Awaitable[None]]) -> None:
        """Postgres may be away; what is not done now is done the next time."""
        try:
            await work()
        except FsError as error:
            _log.info("mounted.later", error=type(error).__name__)

    async def close(self, deadline: float) -> int:
        """Commit every buffer, all at once, store the times, note the end of each session that ends with its mount.

        Args:
            deadline: in trio's time. What is not in Postgres by then goes to the rescue directory.

        Returns how many writes Postgres did not take; each is told by the log.
        """
        not_taken = self._not_taken()
        dirty = [inode for inode in self.table.inodes.values() if inode.buffer is not None and inode.buffer.uncommitted]
        with trio.move_on_at(deadline):
            async with trio.open_nursery() as nursery:
                for inode in dirty:
                    nursery.start_soon(self._commit_last, inode)
        given_up = [inode for inode in dirty if inode.buffer is not None and inode.buffer.uncommitted]
        for inode in given_up:
            await inode.owner.give_up(inode, Unavailable("Postgres did not take the write before the mount ended"))
        soon = trio.current_time() + _LAST_STEPS_S
        with trio.move_on_at(soon if given_up else max(deadline, soon)):
            for ns in list(self._namespaces.values()):
                await self._tolerate(ns.held.store)
            await self._store_times()
            for fs in self.sessions:
                if not self.keeps_sessions:
                    await self._tolerate(lambda fs=fs: namespaces.end_session(self.db, fs.scope))  # type: ignore[misc]
        for ns in self._namespaces.values():
            if ns.held:
                _log.warning("mounted.attributes_lost", agent=ns.agent_id, files=len(ns.held))
        return self._not_taken() - not_taken

    def _not_taken(self) -> int:
        return sum(ns.not_taken for ns in self._namespaces.values())

    async def _commit_last(self, inode: Inode) -> None:
        try:
            await inode.owner.commit(inode)
        except FsError as error:
            _log.info("mounted.commit_failed", error=type(error).__name__)
        except Exception:  # noqa: BLE001  (a fault of ours in one file must not cost the others)
            _log.exception("mounted.commit_failed")
