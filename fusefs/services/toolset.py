"""The six file tools of one session: ls, read_file, write_file, edit_file, glob, grep (HF-20).

Decided here and only here: the names, arguments and texts of the tools, the policy that their descriptions state, and
that nothing but a result comes out of a call. What the tools do is `services.backend`'s.

One `Toolset` is one session: it knows which versions the session has seen (`services.seen`), and which paths the
current batch of calls has changed (HF-08).

Threading: one trio thread; calls of a batch may run at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from fusefs import telemetry
from fusefs.rules import text
from fusefs.rules.errors import AlreadyChanged, FsError, NoMatch, NotFound, outcome
from fusefs.rules.model import Kind, NodeRow
from fusefs.rules.text import MAX_ANSWER_CHARS, binary_notice, number_lines
from fusefs.services import descriptions
from fusefs.services.backend import Backend
from fusefs.services.descriptions import Description
from fusefs.services.inputs import BadInput, Inputs, unknown_tool
from fusefs.services.seen import SeenVersions
from fusefs.services.tooling import Tool, ToolCall, ToolResult, invalid_input
from fusefs.store.search import Match

_log = telemetry.get_logger()
_ERROR_CHARS = 4000
_NOTES = 20
"""Cut lines that are named one by one."""

Run = Callable[..., Awaitable[ToolResult]]


class Toolset:
    """The tools of one session.

    Args:
        backend: of the session's scope.

    Attributes:
        tools: in the order in which a model should see them.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._seen = SeenVersions()
        self._changed: set[str] = set()
        self.tools: tuple[Tool, ...] = (
            self._tool("ls", descriptions.LS, self._ls, read_only=True),
            self._tool("read_file", descriptions.READ_FILE, self._read_file, read_only=True),
            self._tool("write_file", descriptions.WRITE_FILE, self._write_file),
            self._tool("edit_file", descriptions.EDIT_FILE, self._edit_file),
            self._tool("glob", descriptions.GLOB, self._glob, read_only=True),
            self._tool("grep", descriptions.GREP, self._grep, read_only=True),
        )
        self._by_name = {tool.name: tool for tool in self.tools}

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Whatever a model passes, the answer is a result (DE-02, DE-03)."""
        tool = self._by_name.get(call.name)
        return await tool.handler(call) if tool is not None else unknown_tool(call.name, self._by_name)

    def end_batch(self) -> None:
        """The calls of one turn are done: each path may be changed again (HF-08)."""
        self._changed.clear()

    # -- The tools ---------------------------------------------------------------------------------

    async def _ls(self, path: str = "/") -> ToolResult:
        entries = await self.backend.ls(self._path(path))
        lines = [_entry_line(entry.node, entry.target) for entry in entries]
        return ToolResult(_bounded(lines, "entries") if lines else "[the directory is empty]")

    async def _read_file(
        self, path: str, offset: int = 1, limit: int = text.DEFAULT_LIMIT, column: int = 1
    ) -> ToolResult:
        path = self._path(path)
        try:
            done = await self.backend.read(path, offset=max(offset, 1), limit=limit, column=column)
        except NotFound:
            self._seen.forget(path)
            raise
        self._seen.note(path, done.seen)
        return ToolResult(binary_notice(done.node.size)) if done.page is None else _page_text(done.page, done.node)

    async def _write_file(self, path: str, content: str) -> ToolResult:
        path = self._path(path)
        with self._change(path):
            done = await self._seen.write(self.backend, path, content)
        what = "Created" if done.created else "Replaced"
        return ToolResult(f"{what} {path} ({_count(done.size, 'byte')}, version {done.seen.version}).")

    async def _edit_file(self, path: str, old_string: str, new_string: str, replace_all: bool = False) -> ToolResult:
        path = self._path(path)
        with self._change(path):
            done = await self.backend.edit(
                path, old_string, new_string, replace_all=replace_all, expected=self._seen.at(path)
            )
        self._seen.note(path, done.seen)
        places = _count(done.count, "place")
        return ToolResult(f"Replaced {places} in {path}, first in line {done.line} (version {done.seen.version}).")

    async def _glob(self, pattern: str, path: str = "/") -> ToolResult:
        found = await self.backend.glob(pattern, self._path(path))
        lines = [node.path for node in found.found]
        if found.truncated:
            lines.append(f"[only the first {_count(len(lines), 'file')}; use a narrower pattern or path]")
        return ToolResult(_bounded(lines, "files") if lines else "No files found.")

    async def _grep(
        self, pattern: str, path: str = "/", include: str | None = None, literal: bool = False
    ) -> ToolResult:
        found = await self.backend.grep(pattern, self._path(path), include=include, literal=literal)
        lines = [_match_line(match) for match in found.found]
        if found.truncated:
            lines.append(f"[only the first {_count(len(lines), 'match', 'matches')}; narrow it by path or include]")
        return ToolResult(_bounded(lines, "matches") if lines else "No matches found.")

    # -- Inside ------------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        """Models leave out the first slash; there is no directory that such a path could be relative to."""
        return self.backend.path(path if path.startswith("/") else f"/{path}")

    @contextmanager
    def _change(self, path: str) -> Iterator[None]:
        """A path is being changed. Raises AlreadyChanged where this batch has done so; a change that fails does not
        count."""
        if path in self._changed:
            raise AlreadyChanged(path=path)
        self._changed.add(path)
        try:
            yield
        except BaseException:
            self._changed.discard(path)
            raise

    def _tool(self, name: str, description: Description, run: Run, *, read_only: bool = False) -> Tool:
        inputs = Inputs(description.schema)

        async def handler(call: ToolCall) -> ToolResult:
            with telemetry.tool_call(name, call.id) as span:
                try:
                    return await run(**inputs.check(call.arguments))
                except BadInput as error:
                    span.failed("BadInput")
                    return invalid_input(tool, str(error))
                except FsError as error:
                    told = outcome(error)
                    span.failed(told.error_type, is_fault=told.http in (500, 503))
                    return ToolResult(_error_text(error), is_error=True)
                except Exception as error:  # noqa: BLE001  (whatever it is, a model gets an answer and no traceback)
                    span.failed(type(error).__name__, is_fault=True)
                    _log.exception("tool.failed", tool=name)
                    return ToolResult(f"Error: {outcome(error).text}", is_error=True)

        tool = Tool(name, description.text, description.schema, handler, read_only, destructive=not read_only)
        return tool


def _error_text(error: FsError) -> str:
    told = outcome(error)
    lines = [f"Error: {told.text}. {told.hint}".strip()]
    if isinstance(error, NoMatch) and error.excerpt:
        lines.append(f"The nearest lines of the file are:\n{error.excerpt}")
    return "\n".join(lines)[:_ERROR_CHARS]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _entry_line(node: NodeRow, target: str | None) -> str:
    if node.kind is Kind.DIR:
        return f"{node.path}/"
    if target is not None:
        return f"{node.path} -> {target}"
    return f"{node.path} ({_count(node.size, 'byte')})"


def _match_line(match: Match) -> str:
    before = "…" if match.column > 1 else ""
    after = "…" if match.column - 1 + len(match.text) < match.length else ""
    return f"{match.path}:{match.line}:{before}{match.text}{after}"


def _bounded(lines: list[str], what: str) -> str:
    """As many lines as one answer holds, and how many are left out."""
    held = 0
    for number, line in enumerate(lines):
        held += len(line) + 1
        if held > MAX_ANSWER_CHARS:
            return "\n".join([*lines[:number], f"[{len(lines) - number} more {what} are not shown; narrow it down]"])
    return "\n".join(lines)


def _page_text(page: text.Page, node: NodeRow) -> ToolResult:
    """A page as a model reads it, and how to go on."""
    version = f"version {node.version}"
    if page.total == 0:
        return ToolResult(f"[the file is empty, {version}]")
    if page.first > page.total:
        lines = _count(page.total, "line")
        return ToolResult(f"Error: offset {page.first} is past the end: {node.path} has {lines}.", is_error=True)
    if not page.lines:
        where = (
            f"column {page.column} is past the end of line {page.first}"
            if page.column > 1
            else "no lines were asked for"
        )
        return ToolResult(f"[{where}; the file has {_count(page.total, 'line')}, {version}]")
    notes = [
        f"[line {number} is cut: {text.MAX_LINE_CHARS} of {length} characters are shown; "
        f"go on in it with offset={number}, column={text.MAX_LINE_CHARS + 1}]"
        for number, length in page.cut[:_NOTES]
    ]
    if len(page.cut) > _NOTES:
        notes.append(f"[{len(page.cut) - _NOTES} more lines are cut in the same way]")
    if page.column > 1:
        shown = f"line {page.first} from column {page.column} to {page.column + len(page.lines[0]) - 1}"
    elif page.first == 1 and page.next_offset is None:
        shown = _count(page.total, "line")
    else:
        shown = f"lines {page.first} to {page.last} of {page.total}"
    on = ""
    if page.next_offset is not None:
        column = f", column={page.next_column}" if page.next_column is not None else ""
        on = f"; go on with offset={page.next_offset}{column}"
    return ToolResult("\n".join([number_lines(page.lines, page.first), *notes, f"[{shown}, {version}{on}]"]))
