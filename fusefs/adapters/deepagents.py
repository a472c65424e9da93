"""An agent's files as a backend of LangChain's deepagents (extra `deepagents`).

Decided here and only here: what that library's `BackendProtocol` asks for, said in its own terms: its texts for what is
not there, `Error: ` where its tools pass a text on as it is, lines counted from 0, LF on reading.

What was read counts as seen: a whole file that is written over a version which this backend has not read is refused.
An edit names the text that it replaces and so is made on whatever is there, again where another was faster: parallel
edits of one file are all kept. `/large_tool_results/ID`, where that library puts long results, is the session's own.

Threading: as `portal`. The library's asynchronous methods run these in threads.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Literal, ParamSpec, TypeVar

from deepagents.backends.protocol import (
    FILE_NOT_FOUND,
    INVALID_PATH,
    IS_DIRECTORY,
    PERMISSION_DENIED,
    BackendProtocol,
    DeleteResult,
    EditResult,
    FileData,
    FileDownloadResponse,
    FileInfo,
    FileUploadResponse,
    GlobResult,
    GrepMatch,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)

# It has no public name, but the library's own tools go by it and must find what they expect.
from deepagents.backends.utils import _get_backend_read_file_type, slice_read_response

from fusefs.adapters.portal import Portal
from fusefs.rules import paths
from fusefs.rules.errors import (
    BadName,
    BadPath,
    Denied,
    FsError,
    IsADirectory,
    NotADirectory,
    NotFound,
    PathTooLong,
    outcome,
)
from fusefs.rules.model import Kind, NodeRow
from fusefs.services.backend import Content
from fusefs.services.seen import SeenFiles
from fusefs.store.search import MAX_MATCHES

P = ParamSpec("P")
T = TypeVar("T")

_CODES: tuple[tuple[type[FsError], str], ...] = (
    (NotFound, FILE_NOT_FOUND),
    (Denied, PERMISSION_DENIED),
    (IsADirectory, IS_DIRECTORY),
    (NotADirectory, INVALID_PATH),
    (BadPath, INVALID_PATH),
    (BadName, INVALID_PATH),
    (PathTooLong, INVALID_PATH),
)


class FusefsBackend(BackendProtocol):
    """The files of a portal's scope. Closing the portal is the caller's."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._backend = portal.backend
        self._seen = SeenFiles()

    def ls(self, path: str) -> LsResult:
        try:
            entries = self._portal.call(self._backend.ls, path)
        except NotFound:
            return LsResult(error=f"Path '{path}': path_not_found")
        except NotADirectory:
            return LsResult(error=f"Path '{path}': not_a_directory")
        except FsError as error:
            return LsResult(error=outcome(error).sentence_for_model)
        return LsResult(entries=[_info(entry.node) for entry in entries if entry.node.kind in (Kind.FILE, Kind.DIR)])

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        try:
            content = self._portal.call(self._load, file_path)
        except NotFound:
            return ReadResult(error=f"File '{file_path}' not found")
        except FsError as error:
            return ReadResult(error=outcome(error).sentence_for_model)
        modified_at = _time(content.node)
        if content.text is None or _get_backend_read_file_type(file_path) != "text":
            encoded = base64.standard_b64encode(content.data).decode()
            return ReadResult(file_data=FileData(content=encoded, encoding="base64", modified_at=modified_at))
        return slice_read_response(
            FileData(content=content.text, encoding="utf-8", modified_at=modified_at), offset, limit
        )

    def write(self, file_path: str, content: str) -> WriteResult:
        try:
            self._portal.call(self._write, file_path, content)
        except FsError as error:
            return WriteResult(error=f"Error: {outcome(error).sentence_for_model}")
        return WriteResult(path=file_path)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        try:
            count = self._portal.call(self._edit, file_path, old_string, new_string, replace_all)
        except NotFound:
            return EditResult(error=f"Error: File '{file_path}' not found")
        except FsError as error:
            return EditResult(error=f"Error: {outcome(error).sentence_for_model}")
        return EditResult(path=file_path, occurrences=count)

    def delete(self, file_path: str) -> DeleteResult:
        try:
            self._portal.call(self._backend.delete, file_path, recursive=True)
        except NotFound:
            return DeleteResult(error=f"Error: File '{file_path}' not found")
        except FsError as error:
            return DeleteResult(error=f"Error: {outcome(error).sentence_for_model}")
        return DeleteResult(path=file_path)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        root = path or "/"
        if pattern.startswith("/"):
            # There it is the searched directory that a leading slash stands for, here it is the root.
            pattern = root.rstrip("/") + pattern
        try:
            found = self._portal.call(self._backend.glob, pattern, root)
        except NotFound:
            return GlobResult(matches=[])
        except FsError as error:
            return GlobResult(error=outcome(error).sentence_for_model)
        reason: Literal["budget"] | None = "budget" if found.truncated else None
        return GlobResult(
            matches=[_info(node) for node in found.found], truncated=found.truncated, truncation_reason=reason
        )

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        limit = MAX_MATCHES if max_count is None else max_count
        try:
            found = self._portal.call(self._backend.grep, pattern, path or "/", include=glob, literal=True, limit=limit)
        except NotFound:
            return GrepResult(matches=[])
        except FsError as error:
            return GrepResult(error=f"Error: {outcome(error).sentence_for_model}")
        matches = [GrepMatch(path=match.path, line=match.line, text=match.text) for match in found.found]
        return GrepResult(matches=matches, truncated=found.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path=path, error=self._code(self._write, path, data)[1]) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        answers = [(path, *self._code(self._load, path)) for path in paths]
        return [
            FileDownloadResponse(path=path, content=content.data if content else None, error=code)
            for path, content, code in answers
        ]

    # -- Inside, on the portal's thread ------------------------------------------------------------

    async def _load(self, path: str) -> Content:
        content = await self._backend.read_bytes(path)
        self._seen.note(self._backend.path(path), content.seen)
        return content

    async def _write(self, path: str, content: str | bytes) -> None:
        path = paths.own_result(self._backend.scope, self._backend.path(path))
        await self._seen.write(self._backend, path, content)

    async def _edit(self, path: str, old: str, new: str, replace_all: bool) -> int:
        path = self._backend.path(path)
        done = await self._backend.edit(path, old, new, replace_all=replace_all)
        seen = self._seen.at(path)
        # Of a version between, made by somebody else, this session has seen nothing.
        if seen is not None and (seen.id, seen.version + 1) == (done.seen.id, done.seen.version):
            self._seen.note(path, done.seen)
        return done.count

    def _code(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, str | None]:
        """What a call gives, or the library's code for why it gives nothing."""
        try:
            return self._portal.call(work, *args, **kwargs), None
        except FsError as error:
            return None, next(
                (code for kind, code in _CODES if isinstance(error, kind)), outcome(error).sentence_for_model
            )


def _time(node: NodeRow) -> str:
    return datetime.fromtimestamp(node.mtime_ns / 1e9, UTC).isoformat()


def _info(node: NodeRow) -> FileInfo:
    is_dir = node.kind is Kind.DIR
    path = f"{node.path}/" if is_dir else node.path
    return FileInfo(path=path, is_dir=is_dir, size=0 if is_dir else node.size, modified_at=_time(node))
