"""One table of cases for every door to an agent's files: mount, backend, tools, MCP, adapters (BY-07).

A door is driven through `Door`, whatever it is: a class of some forty lines that turns these calls into the door's own
and its refusals into `Refused`. A test module makes `Doors` and runs the cases through them:

    @pytest.mark.parametrize("case", cases_for(MyDoor))
    async def test_case(doors: Doors, case: Case) -> None:
        await run(case, doors)

Each case works in a directory of its own and leaves the others' alone, so one pair of doors serves the whole table. A
door that has no such thing as a case needs names it in `lacks`, and has not that case.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from fusefs.rules import errors
from fusefs.rules.errors import FsError
from tests import harness

MISSING, DENIED, STALE, DIRECTORY, NOT_DIRECTORY = "missing", "denied", "stale", "directory", "not a directory"
NO_MATCH, NOT_UNIQUE, BAD_PATH, BAD_PATTERN = "no match", "not unique", "bad path", "bad pattern"

_OF_CLASS: dict[str, tuple[type[FsError], ...]] = {
    MISSING: (errors.NotFound,),
    DENIED: (errors.Denied,),
    STALE: (errors.StaleVersion,),
    DIRECTORY: (errors.IsADirectory,),
    NOT_DIRECTORY: (errors.NotADirectory,),
    NO_MATCH: (errors.NoMatch,),
    NOT_UNIQUE: (errors.NotUnique,),
    BAD_PATH: (errors.BadPath, errors.PathTooLong),
    BAD_PATTERN: (errors.BadPattern,),
}
_OF_ERRNO = {
    errno.ENOENT: MISSING,
    errno.EACCES: DENIED,
    errno.ESTALE: STALE,
    errno.EISDIR: DIRECTORY,
    errno.ENOTDIR: NOT_DIRECTORY,
    errno.ENAMETOOLONG: BAD_PATH,
    errno.EINVAL: BAD_PATH,
}
_OF_TEXT = {
    "no such file": MISSING,
    "not found": MISSING,
    "file_not_found": MISSING,
    "does not exist": MISSING,
    "reserved": DENIED,
    "written by the harness only": DENIED,
    "permission": DENIED,
    "read it again": STALE,
    "is a directory": DIRECTORY,
    "not a directory": NOT_DIRECTORY,
    "is not in the file": NO_MATCH,
    "is there": NOT_UNIQUE,
    "must not contain `..`": BAD_PATH,
    "invalid regular expression": BAD_PATTERN,
}


class Refused(Exception):
    """A door's refusal. `kind` is one of the constants above, or the door's own text where it is none of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(kind)

    @classmethod
    def from_error(cls, error: FsError) -> Refused:
        kinds = [kind for kind, classes in _OF_CLASS.items() if isinstance(error, classes)]
        return cls(kinds[0] if kinds else str(error))

    @classmethod
    def from_errno(cls, error: OSError) -> Refused:
        return cls(_OF_ERRNO.get(error.errno or 0, str(error)))

    @classmethod
    def from_text(cls, text: str) -> Refused:
        """For a door that answers with a sentence."""
        lowered = text.lower()
        return cls(next((kind for words, kind in _OF_TEXT.items() if words in lowered), text))


class Door(Protocol):
    """A way to the files of one session.

    Attributes:
        lacks: what the door has not, of "edit", "glob", "grep", "delete", "seen" (it knows what the session read), and
            "paths" (it takes any text for a path).
    """

    lacks: frozenset[str]

    async def write(self, path: str, text: str) -> None:
        """Make or replace a whole file, with the directories above it."""

    async def read(self, path: str) -> str:
        """A whole file, its line ends as they are unless the door shows LF only."""

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None: ...

    async def ls(self, path: str) -> list[str]:
        """The paths in a directory, those of directories with a slash at the end, sorted."""

    async def glob(self, pattern: str, path: str) -> list[str]:
        """The paths of the files that match, sorted."""

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        """Path and number of each line that holds a plain text, sorted."""

    async def delete(self, path: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Doors:
    """Two sessions of one agent, each through a door of the same kind.

    Args:
        namespace: the agent, for what a session may not do by itself.
        own_session, other_session: their ids.
    """

    own: Door
    other: Door
    namespace: harness.Namespace
    own_session: str
    other_session: str

    def seed(self, path: str, content: str | bytes) -> None:
        """Put a file there as the harness does, whatever the policy."""
        raw = content if isinstance(content, bytes) else None
        self.namespace.execute(
            "insert into agent_files (tenant_id, agent_id, path, content, content_bytes) values (%s, %s, %s, %s, %s)",
            (self.namespace.tenant_id, self.namespace.agent_id, path, "" if raw else content, raw),
        )

    def stored(self, path: str) -> str | None:
        """What the table has at a path."""
        rows = self.namespace.execute(
            "select content from agent_files where tenant_id = %s and agent_id = %s and path = %s",
            (self.namespace.tenant_id, self.namespace.agent_id, path),
        )
        return str(rows[0][0]) if rows else None


Case = Callable[[Doors, str], Awaitable[None]]
CASES: list[Case] = []
_NEEDS: dict[Case, frozenset[str]] = {}


def case(*needs: str) -> Callable[[Case], Case]:
    """Add a case to the table; `needs` is what a door must not lack."""

    def added(function: Case) -> Case:
        CASES.append(function)
        _NEEDS[function] = frozenset(needs)
        return function

    return added


def cases_for(door: type[Door]) -> list[Any]:
    """The cases that a door can be asked for, for `pytest.mark.parametrize`."""
    return [pytest.param(each, id=each.__name__) for each in CASES if not _NEEDS[each] & door.lacks]


async def run(function: Case, doors: Doors) -> None:
    """Run one case in a directory of its own."""
    await function(doors, f"/{function.__name__}-{uuid.uuid4().hex[:6]}")


async def refused(call: Awaitable[object], kind: str) -> None:
    """The call must be refused for that reason."""
    with pytest.raises(Refused) as caught:
        await call
    assert caught.value.kind == kind


# -- Reading and writing ---------------------------------------------------------------------------


@case()
async def what_was_written_is_read(doors: Doors, at: str) -> None:
    for name, text in {
        "plain": "one\ntwo\n",
        "empty": "",
        "open end": "no newline at the end",
        "Grüße, 漢字 🙂": "Grüße, 漢字 🙂\n",
        "long line": "é漢" * 2000 + "\n",
        "100% [odd] 'name' \"here\"": "x\n",
        "-dash": "x\n",
    }.items():
        await doors.own.write(f"{at}/{name}", text)
        assert doors.stored(f"{at}/{name}") == text, name
        assert await doors.own.read(f"{at}/{name}") == text, name


@case()
async def line_ends_are_stored_as_given(doors: Doors, at: str) -> None:
    text = "a\r\nb\x0cc\u2028d\re\n"
    await doors.own.write(f"{at}/f", text)
    assert doors.stored(f"{at}/f") == text


@case()
async def a_file_is_replaced_whole(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "a long text\n" * 100)
    await doors.own.write(f"{at}/f", "short\n")
    assert doors.stored(f"{at}/f") == "short\n"
    assert await doors.own.read(f"{at}/f") == "short\n"


@case()
async def directories_are_made(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/a/b/c/f", "x\n")
    assert await doors.own.ls(at) == [f"{at}/a/"]
    assert await doors.own.ls(f"{at}/a/b/c") == [f"{at}/a/b/c/f"]


@case()
async def what_is_not_there_is_missing(doors: Doors, at: str) -> None:
    await refused(doors.own.read(f"{at}/nothing"), MISSING)
    await refused(doors.own.ls(f"{at}/nothing"), MISSING)


@case()
async def directories_and_files_are_told_apart(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/d/f", "x\n")
    await refused(doors.own.read(f"{at}/d"), DIRECTORY)
    await refused(doors.own.write(f"{at}/d", "x"), DIRECTORY)
    await refused(doors.own.ls(f"{at}/d/f"), NOT_DIRECTORY)
    await refused(doors.own.write(f"{at}/d/f/g", "x"), NOT_DIRECTORY)


@case("paths")
async def a_path_does_not_leave_the_namespace(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "x\n")
    await refused(doors.own.read(f"{at}/../..{at}/f"), BAD_PATH)
    await refused(doors.own.write("/../../etc/planted", "x"), BAD_PATH)


@case()
async def a_listing_has_files_and_directories(doors: Doors, at: str) -> None:
    for name in ("b", "a", "sub/x", ".hidden"):
        await doors.own.write(f"{at}/{name}", "x\n")
    assert await doors.own.ls(at) == [f"{at}/.hidden", f"{at}/a", f"{at}/b", f"{at}/sub/"]


@case("delete")
async def what_is_deleted_is_gone(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "x\n")
    await doors.own.delete(f"{at}/f")
    await refused(doors.own.read(f"{at}/f"), MISSING)
    await refused(doors.own.delete(f"{at}/f"), MISSING)
    assert await doors.own.ls(at) == []


@case()
async def sessions_share_their_files(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "one\n")
    assert await doors.other.read(f"{at}/f") == "one\n"
    await doors.other.write(f"{at}/f", "two\n")
    assert await doors.own.read(f"{at}/f") == "two\n"


# -- Versions --------------------------------------------------------------------------------------


@case("seen")
async def a_file_that_changed_since_it_was_read_is_not_replaced(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "one\n")
    await doors.other.read(f"{at}/f")
    await doors.other.write(f"{at}/f", "theirs\n")
    await refused(doors.own.write(f"{at}/f", "mine\n"), STALE)
    assert doors.stored(f"{at}/f") == "theirs\n"
    await doors.own.read(f"{at}/f")
    await doors.own.write(f"{at}/f", "mine after all\n")
    assert doors.stored(f"{at}/f") == "mine after all\n"


@case("seen", "edit")
async def a_file_that_changed_since_it_was_read_is_not_edited(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "one\ntwo\n")
    await doors.other.edit(f"{at}/f", "two", "TWO")
    await refused(doors.own.edit(f"{at}/f", "one", "ONE"), STALE)
    assert doors.stored(f"{at}/f") == "one\nTWO\n"
    await doors.own.read(f"{at}/f")
    await doors.own.edit(f"{at}/f", "one", "ONE")
    assert doors.stored(f"{at}/f") == "ONE\nTWO\n"


# -- Editing ---------------------------------------------------------------------------------------


@case("edit")
async def one_place_is_edited(doors: Doors, at: str) -> None:
    for name, before, old, new, after in [
        ("plain", "a\nb\nc\n", "b", "B", "a\nB\nc\n"),
        ("deleted", "a\nb\nc\n", "b\n", "", "a\nc\n"),
        ("crlf", "a\r\nb\r\nc\r\n", "a\nb\n", "a\nB\nB2\n", "a\r\nB\r\nB2\r\nc\r\n"),
        ("open end", "a\nb", "b", "B", "a\nB"),
        ("not a pattern", "a.c abc\n", "a.c", "x", "x abc\n"),
    ]:
        await doors.own.write(f"{at}/{name}", before)
        await doors.own.edit(f"{at}/{name}", old, new)
        assert doors.stored(f"{at}/{name}") == after, name


@case("edit")
async def what_is_not_one_place_is_refused(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "x = 1\ny\nx = 1\naaa\n")
    await refused(doors.own.edit(f"{at}/f", "x = 1", "z"), NOT_UNIQUE)
    await refused(doors.own.edit(f"{at}/f", "aa", "z"), NOT_UNIQUE)
    await refused(doors.own.edit(f"{at}/f", "nothing of it", "z"), NO_MATCH)
    await refused(doors.own.edit(f"{at}/missing", "x", "z"), MISSING)
    assert doors.stored(f"{at}/f") == "x = 1\ny\nx = 1\naaa\n"


@case("edit")
async def every_place_is_edited_where_that_is_asked(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/f", "x = 1\nx = 10\nx = 1\n")
    await doors.own.edit(f"{at}/f", "x = 1\n", "x = 2\n", replace_all=True)
    assert doors.stored(f"{at}/f") == "x = 2\nx = 10\nx = 2\n"


# -- Searching -------------------------------------------------------------------------------------

_TREE = ("top.py", "src/a.py", "src/deep/b.py", "src/c.txt", ".github/ci.yml", "br[1]/g.py", "a_b/h.py", "axb/i.py")


@case("glob")
async def files_are_found_by_name(doors: Doors, at: str) -> None:
    for name in _TREE:
        await doors.own.write(f"{at}/{name}", "x\n")
    for pattern, expected in {
        "**/*.py": ["a_b/h.py", "axb/i.py", "br[1]/g.py", "src/a.py", "src/deep/b.py", "top.py"],
        "*.txt": ["src/c.txt"],
        "src/**/*.py": ["src/a.py", "src/deep/b.py"],
        "src/?.py": ["src/a.py"],
        "**/ci.yml": [".github/ci.yml"],
        ".github/*": [".github/ci.yml"],
        "a_b/*": ["a_b/h.py"],
        "src/*.{py,txt}": ["src/a.py", "src/c.txt"],
        "*.zz": [],
    }.items():
        assert await doors.own.glob(pattern, at) == [f"{at}/{name}" for name in expected], pattern


@case("grep")
async def lines_are_found_with_their_numbers(doors: Doors, at: str) -> None:
    await doors.own.write(f"{at}/a", "x\x0cy\u2028z\nNEEDLE here\n")
    await doors.own.write(f"{at}/sub/b", "one\r\ntwo\r\nthe NEEDLE\r\nNEEDLE\r\n")
    await doors.own.write(f"{at}/c", "needle\nN.EDLE\n")
    found = [(f"{at}/a", 2), (f"{at}/sub/b", 3), (f"{at}/sub/b", 4)]
    assert await doors.own.grep("NEEDLE", at) == found
    assert await doors.own.grep("NEEDLE", f"{at}/sub") == found[1:]
    assert await doors.own.grep("nothing of it", at) == []


# -- Policy ----------------------------------------------------------------------------------------


@case()
async def reserved_places_are_refused(doors: Doors, at: str) -> None:
    for place in ("/memories", "/skills"):
        doors.seed(f"{place}{at}/seeded", "seeded\n")
        await refused(doors.own.write(f"{place}{at}/f", "x"), DENIED)
        await refused(doors.own.write(f"{place}{at}/seeded", "x"), DENIED)
        assert await doors.own.read(f"{place}{at}/seeded") == "seeded\n"


@case("edit")
async def reserved_places_are_not_edited(doors: Doors, at: str) -> None:
    doors.seed(f"/memories{at}/f", "seeded\n")
    await refused(doors.own.edit(f"/memories{at}/f", "seeded", "x"), DENIED)
    assert doors.stored(f"/memories{at}/f") == "seeded\n"


def _results(doors: Doors, at: str) -> tuple[str, str]:
    """A result of each session that holds a word of this case's own."""
    name = at.strip("/")
    own, other = f"/large_tool_results/{doors.own_session}/{name}", f"/large_tool_results/{doors.other_session}/{name}"
    doors.seed(own, f"word-{name} mine\n")
    doors.seed(other, f"word-{name} theirs\n")
    return own, other


@case()
async def another_sessions_results_do_not_exist(doors: Doors, at: str) -> None:
    own, other = _results(doors, at)
    assert await doors.own.read(own) == f"word-{at.strip('/')} mine\n"
    await refused(doors.own.read(other), MISSING)
    await refused(doors.own.ls(f"/large_tool_results/{doors.other_session}"), MISSING)
    assert await doors.own.ls("/large_tool_results") == [f"/large_tool_results/{doors.own_session}/"]


@case()
async def another_sessions_history_does_not_exist(doors: Doors, at: str) -> None:
    for session in (doors.own_session, doors.other_session):
        if doors.stored(f"/conversation_history/{session}.md") is None:
            doors.seed(f"/conversation_history/{session}.md", f"of {session}\n")
    assert await doors.own.read(f"/conversation_history/{doors.own_session}.md") == f"of {doors.own_session}\n"
    await refused(doors.own.read(f"/conversation_history/{doors.other_session}.md"), MISSING)
    assert await doors.own.ls("/conversation_history") == [f"/conversation_history/{doors.own_session}.md"]


@case("glob")
async def another_sessions_results_are_not_found_by_name(doors: Doors, at: str) -> None:
    own, _ = _results(doors, at)
    assert await doors.own.glob(f"**/{at.strip('/')}", "/") == [own]


@case("grep")
async def another_sessions_results_are_not_searched(doors: Doors, at: str) -> None:
    own, _ = _results(doors, at)
    assert await doors.own.grep(f"word-{at.strip('/')}", "/") == [(own, 1)]


@case()
async def results_are_not_changed_by_an_agent(doors: Doors, at: str) -> None:
    own, _ = _results(doors, at)
    await doors.own.read(own)
    await refused(doors.own.write(own, "x"), DENIED)
    assert doors.stored(own) == f"word-{at.strip('/')} mine\n"


def numbered(text: str) -> str:
    """The text of a `read_file` answer: without numbers, and without the notes in brackets at its end."""
    lines = [re.fullmatch(r" *(\d+)\t(.*)", line, re.DOTALL) for line in text.split("\n")]
    return "".join(f"{line[2]}\n" for line in lines if line)
