"""The history of a session's files as tools: list_versions, read_version, restore_version, list_deleted (BY-04).

Decided here and only here: the names of these tools and the texts of their answers. What they do is `store.versions`'.

Threading: one trio thread; calls may run at once.
"""

from __future__ import annotations

from datetime import UTC, datetime

from fusefs.rules import text
from fusefs.services import descriptions
from fusefs.services.answers import bounded, count, make_tool, page_text
from fusefs.services.backend import Backend, Seen
from fusefs.services.seen import SeenFiles
from fusefs.services.tooling import Tool, ToolResult
from fusefs.store import versions
from fusefs.store.versions import Deleted, Version


class History:
    """The tools of one session.

    Args:
        backend: of the session's scope.
        seen: what the session knows of the files; a restored version counts.

    Attributes:
        tools: in the order in which a model should see them.
    """

    def __init__(self, backend: Backend, seen: SeenFiles) -> None:
        self._backend = backend
        self._seen = seen
        self.tools: tuple[Tool, ...] = (
            make_tool("list_versions", descriptions.LIST_VERSIONS, self._list_versions, read_only=True),
            make_tool("read_version", descriptions.READ_VERSION, self._read_version, read_only=True),
            make_tool("restore_version", descriptions.RESTORE_VERSION, self._restore_version),
            make_tool("list_deleted", descriptions.LIST_DELETED, self._list_deleted, read_only=True),
        )

    async def _list_versions(self, path: str) -> ToolResult:
        path = await self._backend.resolve(path)
        found = await versions.list_versions(self._backend.db, self._backend.scope, path)
        return ToolResult(bounded([_version_line(one) for one in found], "changes"))

    async def _read_version(
        self,
        path: str,
        version: int,
        lineage: str | None = None,
        offset: int = 1,
        limit: int = text.DEFAULT_LIMIT,
        column: int = 1,
    ) -> ToolResult:
        path = await self._backend.resolve(path)
        content = await versions.read_version(self._backend.db, self._backend.scope, path, version, lineage)
        try:
            whole = content.decode()
        except UnicodeDecodeError:
            whole = "\0"
        if "\0" in whole:
            return ToolResult(text.binary_notice(len(content)))
        page = text.read_page(whole, offset=max(offset, 1), limit=limit, column=column)
        return page_text(page, path, version)

    async def _restore_version(self, path: str, version: int, lineage: str | None = None) -> ToolResult:
        backend, path = self._backend, await self._backend.resolve(path)
        done = await versions.restore(backend.db, backend.scope, backend.limits, path, version, lineage)
        self._seen.note(path, Seen(done.id, done.version))
        return ToolResult(f"Restored version {version} of {path}: it is at version {done.version} now.")

    async def _list_deleted(self, path: str = "/") -> ToolResult:
        found = await versions.list_deleted(self._backend.db, self._backend.scope, self._backend.path(path))
        return ToolResult(bounded([_deleted_line(one) for one in found], "files") if found else "Nothing was deleted.")


def _version_line(one: Version) -> str:
    state = "current" if one.current else "content kept" if one.readable else "no content"
    moved = f" from {text.one_line(one.old_path)}" if one.old_path is not None else ""
    return (
        f"version {one.version} ({one.op}{moved}, {count(one.size, 'byte')}, {_when(one.at)}, "
        f"{_who(one.principal, one.session)}, {state}, id {one.file_id})"
    )


def _deleted_line(one: Deleted) -> str:
    state = "content kept" if one.readable else "no content"
    return (
        f"{text.one_line(one.path)} (version {one.version}, {count(one.size, 'byte')}, deleted {_when(one.at)}, "
        f"{_who(one.principal, one.session)}, {state}, id {one.file_id})"
    )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds").removesuffix("+00:00") + " UTC"


def _who(principal: str, session: str) -> str:
    return f"by {principal}" + (f" in session {session}" if session else "")
