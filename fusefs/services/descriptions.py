"""What a model is told of the file tools and of the history's: descriptions and JSON Schemas of the arguments.

Decided here and only here (HF-20): every word of it. The policy of a tool stands in its own description, since nothing
of it stands in the system prompt; `docs/reference/tools.md` is made from here.

Threading: constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusefs.rules.globs import MAX_PATTERN_CHARS
from fusefs.rules.regexes import MAX_CHARS
from fusefs.rules.text import DEFAULT_LIMIT, MAX_LINE_CHARS
from fusefs.store.search import MAX_MATCHES

_PATH_CHARS = 4096
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Description:
    """A tool's text and the JSON Schema of its arguments."""

    text: str
    schema: Mapping[str, object]


def _words(text: str) -> str:
    return " ".join(text.split())


def _text(description: str, *, most: int | None = None, least: int = 0) -> dict[str, object]:
    bounds: dict[str, object] = {"minLength": least} if least else {}
    if most is not None:
        bounds["maxLength"] = most
    return {"type": "string", "description": description, **bounds}


def _path(description: str) -> dict[str, object]:
    return _text(description, most=_PATH_CHARS, least=1)


def _number(description: str, least: int) -> dict[str, object]:
    return {"type": "integer", "description": description, "minimum": least, "maximum": _MOST}


def _flag(description: str) -> dict[str, object]:
    return {"type": "boolean", "description": description}


def _describe(text: str, required: tuple[str, ...] = (), **properties: dict[str, object]) -> Description:
    return Description(
        _words(text),
        {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False},
    )


_FILE = "Absolute path of the file, such as /notes/plan.md."
_BELOW = "Absolute path of the directory to search; / if left out."
_CHANGES = """It is refused when somebody else changed the file since you read it: read it again, then decide anew. A
    batch of calls can change a path only once. /memories and /skills are changed by people, or with their approval;
    /large_tool_results and /conversation_history are written by the harness only."""

LS = _describe(
    "List one directory: subdirectories end with a slash, files have their size.",
    path=_path("Absolute path of the directory; / if left out."),
)
READ_FILE = _describe(
    f"""Read a text file: each line as its number, a tab, and its text. The last line of the answer, in brackets, says
    how many lines there are and how to go on. Of a line over {MAX_LINE_CHARS} characters the beginning is shown; go on
    in it with column. Read a file before you change it. Results that were too large for the conversation are files in
    /large_tool_results: read them in parts, or search them with grep.""",
    ("path",),
    path=_path(_FILE),
    offset=_number("Number of the first line, from 1.", 0),
    limit=_number(f"How many lines at most; {DEFAULT_LIMIT} if left out.", 0),
    column=_number("Only the line at offset, from this character on, counted from 1.", 1),
)
WRITE_FILE = _describe(
    f"""Write a whole text file; directories above it are made. What was there is replaced and stays in the history. To
    change a part of a file use edit_file. {_CHANGES}""",
    ("path", "content"),
    path=_path(_FILE),
    content=_text("The whole content of the file."),
)
EDIT_FILE = _describe(
    f"""Replace an exact text in a file. old_string must be there exactly once, white space included and without the
    line numbers of read_file; the file's line ends are kept. {_CHANGES}""",
    ("path", "old_string", "new_string"),
    path=_path(_FILE),
    old_string=_text("The text to replace, with enough lines around it to be unique.", least=1),
    new_string=_text("What to put in its place; empty to delete it."),
    replace_all=_flag("Replace every place of it."),
)
GLOB = _describe(
    f"""Find files by name. * and ? match within a name, ** any number of directories, {{a,b}} one or the other. A
    pattern without a slash is for names at any depth, one with a slash is relative to path. Names that begin with a dot
    are found where the pattern has the dot or ends with a plain name. At most {MAX_MATCHES} files.""",
    ("pattern",),
    pattern=_text("Such as *.py or src/**/test_*.py.", most=MAX_PATTERN_CHARS, least=1),
    path=_path(_BELOW),
)
GREP = _describe(
    f"""Search the lines of text files for a regular expression; the answer has path, line number and line. (?i) in
    front ignores case. At most {MAX_MATCHES} matches; of a very long line the part around the match.""",
    ("pattern",),
    pattern=_text("A regular expression for a part of one line.", most=MAX_CHARS, least=1),
    path=_path("Absolute path of the directory or file to search; / if left out."),
    include=_text("Only files that match this pattern, as in glob.", most=MAX_PATTERN_CHARS, least=1),
    literal=_flag("The pattern is plain text."),
)

_LINEAGE = _text("Which file, by the id in list_versions, where several had this version at the path.", most=36)
_VERSION = _number("Number of the version, as list_versions has it.", 1)

LIST_VERSIONS = _describe(
    """List the history of a path, the newest change first: who changed it when, and which contents are kept. Works for
    a deleted file too.""",
    ("path",),
    path=_path(_FILE),
)
READ_VERSION = _describe(
    f"""Read an old version of a text file, in the form of read_file. A version whose content was not kept is refused:
    list_versions says which are. Of a line over {MAX_LINE_CHARS} characters the beginning is shown.""",
    ("path", "version"),
    path=_path(_FILE),
    version=_VERSION,
    lineage=_LINEAGE,
    offset=_number("Number of the first line, from 1.", 0),
    limit=_number(f"How many lines at most; {DEFAULT_LIMIT} if left out.", 0),
    column=_number("Only the line at offset, from this character on, counted from 1.", 1),
)
RESTORE_VERSION = _describe(
    """Make an old version of a file the newest one, whatever the file holds now: that stays in the history. A deleted
    file is made anew, with its directories. /memories and /skills are changed by people, or with their approval;
    /large_tool_results and /conversation_history are written by the harness only.""",
    ("path", "version"),
    path=_path(_FILE),
    version=_VERSION,
    lineage=_LINEAGE,
)
LIST_DELETED = _describe(
    """List the files below a directory that were deleted and are not there now, each with the version to give to
    restore_version.""",
    path=_path("Absolute path of the directory; / if left out."),
)
