"""The folders above the namespaces: `DIR/<tenant>/<agent>[/<session>]`.

Decided here and only here: which folders a host's mount and an administrator's mount show, and when a
session's folder exists. Below them answers the session's own file system.

Threading: one trio thread. Every look-up asks Postgres: tenants, agents and sessions come and go
without an announcement, and are looked up once per container.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fusefs.core.attributes import Caller, Stat
from fusefs.core.filesystem import Filesystem, Inode
from fusefs.core.mounted import Mounted
from fusefs.core.tree import Node
from fusefs.core.vfs import SessionFs
from fusefs.rules.errors import BadPath, Denied, Exists, NotADirectory, NotFound, UnknownScope
from fusefs.rules.model import Kind
from fusefs.rules.scope import Principal, Scope, new_session, valid_session
from fusefs.store import namespaces, tenants

_TIMEOUT_S = 1.0
_FIRST_INO = 2


class Folder(Node):
    """A tenant's or an agent's folder, or the root of the mount."""

    __slots__ = ("agent", "level", "tenant")

    def __init__(self, level: str, ino: int, tenant: tenants.Tenant | None, agent: tenants.Agent | None) -> None:
        super().__init__(f"{level}:{tenant and tenant.id}:{agent and agent.id}", Kind.DIR, ino, level, None)
        self.level = level
        self.tenant = tenant
        self.agent = agent
        self.version = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layout shows: with sessions (a host's) or every session in one (an administrator's); of one tenant, by
    its id, or of all."""

    sessions: bool
    principal: Principal
    only_tenant: str | None = None


class LayoutFs(Filesystem):
    """Answers for the folders."""

    def __init__(self, mounted: Mounted, shape: Shape) -> None:
        super().__init__(mounted.table)
        self._mounted = mounted
        self._shape = shape
        self._folders: dict[str, Folder] = {}
        self._open: dict[tuple[str, str, str], SessionFs] = {}
        self._next_ino = _FIRST_INO
        self._started_ns = time.time_ns()
        self._session = new_session()
        self.root = self.table.obtain(self, Folder("root", 1, None, None))
        self.root.lookups = 1

    # -- The tree ----------------------------------------------------------------------------------

    def stat(self, inode: Inode) -> Stat:
        settings = self._mounted.settings
        return Stat(
            inode.kino, inode.generation, 0o755 | Kind.DIR.mode_type, 1, settings.uid, settings.gid, 0,
            self._started_ns, self._started_ns, self._started_ns, _TIMEOUT_S, _TIMEOUT_S,
        )  # fmt: skip

    async def lookup(self, parent: Inode, name: str) -> Inode | None:
        folder = self._folder(parent)
        try:
            if folder.level == "root":
                return await self._tenant(name)
            if folder.level == "tenant":
                return await self._agent(folder, name)
            return await self._session_root(folder, name)
        except UnknownScope:
            return None

    async def list_names(self, inode: Inode) -> list[str]:
        folder, db = self._folder(inode), self._mounted.db
        if folder.level == "root":
            every = await tenants.list_tenants(db)
            return [tenant.name for tenant in every if self._shown(tenant)]
        assert folder.tenant is not None
        if folder.level == "tenant":
            return [agent.name for agent in await tenants.list_agents(db, folder.tenant.id)]
        assert folder.agent is not None
        return await namespaces.list_sessions(db, folder.tenant.id, folder.agent.id)

    async def _tenant(self, name: str) -> Inode | None:
        tenant = await tenants.find_tenant(self._mounted.db, name)
        if name != tenant.name or not self._shown(tenant):
            return None
        return self._make("tenant", tenant, None)

    async def _agent(self, folder: Folder, name: str) -> Inode | None:
        assert folder.tenant is not None
        agent = await tenants.find_agent(self._mounted.db, folder.tenant.id, name)
        if name != agent.name:
            return None
        if self._shape.sessions:
            return self._make("agent", folder.tenant, agent)
        return (await self._session_fs(agent, self._session)).root

    async def _session_root(self, folder: Folder, name: str) -> Inode | None:
        assert folder.agent is not None
        if not valid_session(name):
            return None
        known = await namespaces.list_sessions(self._mounted.db, folder.agent.tenant_id, folder.agent.id)
        if name not in known:
            return None
        return (await self._session_fs(folder.agent, name)).root

    async def mkdir(self, parent: Inode, name: str, mode: int, caller: Caller) -> Inode:
        """Root opens a session by making its folder."""
        folder = self._folder(parent)
        if folder.level != "agent" or folder.agent is None:
            raise Denied("tenants and agents are made with `fusefs tenant add` and `fusefs agent add`")
        if not valid_session(name):
            raise BadPath("not a session id", path=name)
        if name in await namespaces.list_sessions(self._mounted.db, folder.agent.tenant_id, folder.agent.id):
            raise Exists(path=name)
        return (await self._session_fs(folder.agent, name)).root

    async def rmdir(self, parent: Inode, name: str) -> None:
        """Root ends a session by removing its folder; the files are the agent's and stay."""
        folder = self._folder(parent)
        if folder.level != "agent" or folder.agent is None:
            raise Denied("tenants and agents are removed with `fusefs tenant remove` and `fusefs agent remove`")
        if await self._session_root(folder, name) is None:
            raise NotFound(path=name)
        fs = self._open[folder.agent.tenant_id, folder.agent.id, name]
        await fs.commit_all()
        await namespaces.end_session(self._mounted.db, fs.scope)
        # Who still holds the folder goes on; one made anew is a new session of that name.
        self._open.pop((folder.agent.tenant_id, folder.agent.id, name), None)

    # -- Sessions ----------------------------------------------------------------------------------

    async def _session_fs(self, agent: tenants.Agent, session: str) -> SessionFs:
        key = (agent.tenant_id, agent.id, session)
        found = self._open.get(key)
        if found is None:
            principal = self._shape.principal
            scope = Scope(agent.tenant_id, agent.id, session, principal, all_sessions=not self._shape.sessions)
            opened = await self._mounted.open_session(scope, on_forgotten=self._session_forgotten)
            found = self._open.setdefault(key, opened)
            if found is not opened:
                self._mounted.close_session(opened)
        return found

    def _session_forgotten(self, fs: SessionFs) -> None:
        scope = fs.scope
        if self._open.get((scope.tenant_id, scope.agent_id, scope.session)) is fs:
            del self._open[scope.tenant_id, scope.agent_id, scope.session]
        if fs in self._mounted.sessions:
            self._mounted.close_session(fs)

    # -- Folders -----------------------------------------------------------------------------------

    def _make(self, level: str, tenant: tenants.Tenant, agent: tenants.Agent | None) -> Inode:
        key = f"{level}:{tenant.id}:{agent and agent.id}"
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = Folder(level, self._next_ino, tenant, agent)
            self._next_ino += 1
        return self.table.obtain(self, folder)

    def forgotten(self, inode: Inode) -> None:
        self._folders.pop(inode.node.id, None)

    def _shown(self, tenant: tenants.Tenant) -> bool:
        return self._shape.only_tenant in (None, tenant.id)

    @staticmethod
    def _folder(inode: Inode) -> Folder:
        if not isinstance(inode.node, Folder):
            raise NotADirectory
        return inode.node
