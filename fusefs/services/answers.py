"""How a call of a tool becomes a result, and the forms that results share.

Decided here and only here: that nothing but a result comes out of a call (DE-03), how an error reads for a model, and
how a page of a file does.

Threading: one trio thread; pure but for the calls themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fusefs import telemetry
from fusefs.rules import text
from fusefs.rules.errors import FsError, NoMatch, outcome
from fusefs.rules.text import MAX_ANSWER_CHARS, number_lines
from fusefs.services.descriptions import Description
from fusefs.services.inputs import BadInput, Inputs
from fusefs.services.tooling import Tool, ToolCall, ToolResult, invalid_input
from fusefs.telemetry import ToolCallSpan

_log = telemetry.get_logger()
_ERROR_CHARS = 4000
_NOTES = 20
"""Cut lines that are named one by one."""

Run = Callable[..., Awaitable[ToolResult]]


def make_tool(name: str, description: Description, run: Run, *, read_only: bool = False) -> Tool:
    """A tool out of which nothing but a result comes.

    Args:
        run: is called with the arguments by name, checked against the schema; may raise any FsError.
    """
    inputs = Inputs(description.schema)

    async def handler(call: ToolCall) -> ToolResult:
        with telemetry.tool_call(name, call.id) as span:
            try:
                return await run(**inputs.check(call.arguments))
            except BadInput as error:
                span.failed("BadInput")
                return invalid_input(tool, str(error))
            except FsError as error:
                return error_result(error, span)
            except Exception as error:  # noqa: BLE001  (whatever it is, a model gets an answer and no traceback)
                _log.exception("tool.failed", tool=name)
                return error_result(error, span)

    tool = Tool(name, description.text, description.schema, handler, read_only, destructive=not read_only)
    return tool


def error_result(error: Exception, span: ToolCallSpan) -> ToolResult:
    """The result of a call that raised, which its span is told of as well."""
    told = outcome(error)
    span.failed(told.error_type, is_fault=told.http in (500, 503))
    return ToolResult(error_text(error), is_error=True)


def error_text(error: Exception) -> str:
    """What a model is told of an error. What is no refusal is our fault: its kind, and no more."""
    told = outcome(error)
    lines = [f"Error: {text.one_line(told.sentence_for_model if isinstance(error, FsError) else told.told)}"]
    if isinstance(error, NoMatch) and error.excerpt:
        lines.append(f"The nearest lines of the file are:\n{error.excerpt}")
    return "\n".join(lines)[:_ERROR_CHARS]


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 byte`, `2 bytes`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def bounded(lines: list[str], what: str) -> str:
    """As many lines as one answer holds, and how many are left out."""
    held = 0
    for number, line in enumerate(lines):
        held += len(line) + 1
        if held > MAX_ANSWER_CHARS:
            return "\n".join([*lines[:number], f"[{len(lines) - number} more {what} are not shown; narrow it down]"])
    return "\n".join(lines)


def page_text(page: text.Page, path: str, number: int) -> ToolResult:
    """A page of a version of a file as a model reads it, and how to go on."""
    version = f"version {number}"
    if page.total == 0:
        return ToolResult(f"[the file is empty, {version}]")
    if page.first > page.total:
        lines = count(page.total, "line")
        return ToolResult(f"Error: offset {page.first} is past the end: {path} has {lines}.", is_error=True)
    if not page.lines:
        where = (
            f"column {page.column} is past the end of line {page.first}"
            if page.column > 1
            else "no lines were asked for"
        )
        return ToolResult(f"[{where}; the file has {count(page.total, 'line')}, {version}]")
    notes = [
        f"[line {line} is cut: {text.MAX_LINE_CHARS} of {length} characters are shown; "
        f"go on in it with offset={line}, column={text.MAX_LINE_CHARS + 1}]"
        for line, length in page.cut[:_NOTES]
    ]
    if len(page.cut) > _NOTES:
        notes.append(f"[{len(page.cut) - _NOTES} more lines are cut in the same way]")
    if page.column > 1:
        shown = f"line {page.first} from column {page.column} to {page.column + len(page.lines[0]) - 1}"
    elif page.first == 1 and page.next_offset is None:
        shown = count(page.total, "line")
    else:
        shown = f"lines {page.first} to {page.last} of {page.total}"
    on = ""
    if page.next_offset is not None:
        column = f", column={page.next_column}" if page.next_column is not None else ""
        on = f"; go on with offset={page.next_offset}{column}"
    return ToolResult("\n".join([number_lines(page.lines, page.first), *notes, f"[{shown}, {version}{on}]"]))
