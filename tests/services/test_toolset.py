"""The six tools of a session: what a model reads, what is refused, and that nothing but an answer comes out."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from fusefs.db.failures import NotConnected
from fusefs.db.pool import open_database
from fusefs.rules.config import Limits
from fusefs.rules.model import Attrs
from fusefs.rules.scope import Principal, Scope
from fusefs.rules.text import MAX_ANSWER_CHARS
from fusefs.services.backend import Backend, Unseen
from fusefs.services.tooling import ToolCall, ToolResult
from fusefs.services.toolset import Toolset
from fusefs.store import files
from tests import harness

NAMES = ["ls", "read_file", "write_file", "edit_file", "glob", "grep"]


def ascii_start(value: object) -> str:
    """An id of a bounded length for a parameter."""
    return ascii(value)[:40]


@dataclass
class Session:
    """The tools of one session; calls come in batches of one unless told otherwise."""

    tools: Toolset

    @property
    def backend(self) -> Backend:
        return self.tools.backend

    async def result(self, name: str, arguments: object, *, end: bool = True) -> ToolResult:
        result = await self.tools.call(ToolCall("call-1", name, arguments))
        if end:
            self.tools.end_batch()
        return result

    async def say(self, name: str, **arguments: object) -> str:
        """The text of an answer that is no error."""
        result = await self.result(name, arguments)
        assert not result.is_error, result.for_llm
        return result.for_llm

    async def fail(self, name: str, **arguments: object) -> str:
        """The text of an error."""
        result = await self.result(name, arguments)
        assert result.is_error, result.for_llm
        return result.for_llm


@asynccontextmanager
async def sessions(
    namespace: harness.Namespace, *names: str, limits: Limits | None = None
) -> AsyncIterator[list[Session]]:
    async with open_database(namespace.dsn, origin="test", size=2) as db:
        scopes = [Scope(namespace.tenant_id, namespace.agent_id, name, Principal.AGENT) for name in names]
        yield [Session(Toolset(Backend(db, scope, limits))) for scope in scopes]


@pytest.fixture
async def session(module_namespace: harness.Namespace) -> AsyncIterator[Session]:
    async with sessions(module_namespace, "s-1") as (one,):
        yield one


# -- What a model is told --------------------------------------------------------------------------


async def test_the_tools_and_their_schemas(session: Session) -> None:
    assert [tool.name for tool in session.tools.tools] == NAMES
    assert [tool.name for tool in session.tools.tools if not tool.read_only] == ["write_file", "edit_file"]
    for tool in session.tools.tools:
        Draft202012Validator.check_schema(dict(tool.input_schema))
        assert tool.input_schema["additionalProperties"] is False
        assert tool.destructive is not tool.read_only
        assert tool.description.endswith(".")


async def test_the_policy_stands_in_the_descriptions(session: Session) -> None:
    """HF-20: the system prompt has nothing of it."""
    for tool in session.tools.tools:
        if not tool.read_only:
            for part in ("/memories", "/skills", "/large_tool_results", "read it again", "once"):
                assert part in tool.description


async def test_lines_have_numbers_and_the_end_says_what_was_read(session: Session) -> None:
    await session.say("write_file", path="/lines/f", content="a\n\n\tc\n")
    assert await session.say("read_file", path="/lines/f") == "     1\ta\n     2\t\n     3\t\tc\n[3 lines, version 1]"
    assert (
        await session.say("read_file", path="/lines/f", offset=2, limit=1)
        == "     2\t\n[lines 2 to 2 of 3, version 1; go on with offset=3]"
    )
    assert await session.say("read_file", path="/lines/f", offset=3) == "     3\t\tc\n[lines 3 to 3 of 3, version 1]"


async def test_what_cannot_be_shown_is_said(session: Session) -> None:
    await session.backend.write("/shown/empty", "", Unseen.ANY)
    await session.backend.write("/shown/f", "a\nb\n", Unseen.ANY)
    await session.backend.write("/shown/bin", b"\x00\xff" * 50, Unseen.ANY)
    assert await session.say("read_file", path="/shown/empty") == "[the file is empty, version 1]"
    assert await session.say("read_file", path="/shown/bin") == "Binary output (100 bytes). Pipe to file if needed."
    assert "past the end: /shown/f has 2 lines" in await session.fail("read_file", path="/shown/f", offset=500)
    assert "no lines were asked for" in await session.say("read_file", path="/shown/f", limit=0)
    assert "column 9 is past the end of line 1" in await session.say("read_file", path="/shown/f", column=9)
    assert await session.say("read_file", path="/shown/f", offset=0) == await session.say("read_file", path="/shown/f")
    assert "not text" in await session.fail("edit_file", path="/shown/bin", old_string="a", new_string="b")


async def test_a_long_line_is_cut_and_says_so(session: Session) -> None:
    await session.backend.write("/long/cut", "x" * 6000 + "\nshort\n", Unseen.ANY)
    text = await session.say("read_file", path="/long/cut")
    assert "     1\t" + "x" * 5000 + "\n     2\tshort\n" in text
    assert "[line 1 is cut: 5000 of 6000 characters are shown; go on in it with offset=1, column=5001]" in text


@pytest.mark.parametrize(
    "content",
    ["é漢" * 100_000 + "END\n", "".join(f"row {number}\n" for number in range(60_000)), "a\n" + "b" * 90_000 + "\nc\n"],
    ids=["one line of 400 KB", "60,000 lines", "a long line between short ones"],
)
async def test_a_model_that_follows_the_notes_reads_to_the_end(session: Session, content: str) -> None:
    """L15: each answer is bounded, and their number too."""
    path = f"/whole/{len(content)}"
    await session.backend.write(path, content, Unseen.ANY)
    got: dict[int, str] = {}
    arguments: dict[str, object] = {"path": path}
    for _ in range(40):
        answer = await session.say("read_file", **arguments)
        assert len(answer) <= MAX_ANSWER_CHARS + 1000
        for number, line in re.findall(r"^ *(\d+)\t(.*)$", answer, re.MULTILINE):
            got[int(number)] = (got[int(number)] if "column" in arguments else "") + line
        on = re.findall(r"go on in it with offset=(\d+), column=(\d+)", answer) or re.findall(
            r"go on with offset=(\d+)(?:, column=(\d+))?\]$", answer
        )
        if not on:
            break
        arguments = {"path": path, "offset": int(on[0][0])} | ({"column": int(on[0][1])} if on[0][1] else {})
    assert "".join(f"{got[number]}\n" for number in sorted(got)) == content


async def test_listings(session: Session) -> None:
    assert await session.say("write_file", path="/listed/sub/f", content="x") == (
        "Created /listed/sub/f (1 byte, version 1)."
    )
    await session.say("write_file", path="/listed/b", content="12345")
    assert await session.say("ls", path="/listed") == "/listed/b (5 bytes)\n/listed/sub/"
    assert "/listed/" in (await session.say("ls")).split("\n")


async def test_what_changes_say(session: Session) -> None:
    await session.say("write_file", path="/said/f", content="a\nb\nb\n")
    assert (
        await session.say("write_file", path="/said/f", content="a\nb\nb") == "Replaced /said/f (5 bytes, version 2)."
    )
    assert (
        await session.say("edit_file", path="/said/f", old_string="b", new_string="c", replace_all=True)
        == "Replaced 2 places in /said/f, first in line 2 (version 3)."
    )


async def test_an_edit_that_nearly_fits_shows_the_lines(session: Session) -> None:
    await session.say("write_file", path="/near/f", content="def f():\n\treturn 1\n")
    text = await session.fail("edit_file", path="/near/f", old_string="    return 1", new_string="    return 2")
    assert "only white space differs" in text
    assert text.endswith("The nearest lines of the file are:\n     2\t\treturn 1")
    text = await session.fail("edit_file", path="/near/f", old_string="f", new_string="g")
    assert "2 times (lines 1, 1)" in text
    assert "replace all" in text


async def test_searches(session: Session) -> None:
    await session.say("write_file", path="/found/a.py", content="import os\nx = 1\n")
    await session.say("write_file", path="/found/b.txt", content=f"{'y' * 600}needle{'z' * 600}\n")
    assert await session.say("glob", pattern="*.py", path="/found") == "/found/a.py"
    assert await session.say("glob", pattern="*.zz", path="/found") == "No files found."
    assert await session.say("grep", pattern=r"^\w+ = \d$", path="/found") == "/found/a.py:2:x = 1"
    assert await session.say("grep", pattern="x = 1", path="/found/a.py") == "/found/a.py:2:x = 1"
    assert await session.say("grep", pattern="nothing", path="/found") == "No matches found."
    assert (
        await session.say("grep", pattern="needle", path="/found") == f"/found/b.txt:1:…{'y' * 100}needle{'z' * 294}…"
    )
    assert await session.say("grep", pattern="needle|x", include="*.py", path="/found") == "/found/a.py:2:x = 1"


async def test_a_name_makes_no_line_of_its_own(session: Session) -> None:
    await session.say("write_file", path="/forged/a (1 byte)\n/memories/rule.md", content="needle\n")
    await session.say("write_file", path="/forged/\u202ecod.\x1b[2J", content="needle\n")
    await session.say("write_file", path="/forged/👩\u200d🚀", content="needle\n")
    forged, turned, emoji = "/forged/a (1 byte)\\n/", "/forged/\\u202ecod.\\x1b[2J", "/forged/👩\u200d🚀"
    assert (await session.say("ls", path="/forged")).split("\n") == [
        forged,
        f"{turned} (7 bytes)",
        f"{emoji} (7 bytes)",
    ]
    assert (await session.say("glob", pattern="**", path="/forged")).split("\n") == [
        f"{forged}memories/rule.md",
        turned,
        emoji,
    ]
    assert (await session.say("grep", pattern="needle", path="/forged")).split("\n") == [
        f"{path}:1:needle" for path in (f"{forged}memories/rule.md", turned, emoji)
    ]
    assert "\n" not in await session.fail("read_file", path="/forged/a\nb")


async def test_a_path_without_its_first_slash(session: Session) -> None:
    await session.say("write_file", path="bare/f", content="x\n")
    assert "/bare/f" in await session.say("ls", path="bare")


# -- Versions --------------------------------------------------------------------------------------


async def test_a_lost_race_names_both_versions_and_keeps_the_bytes(module_namespace: harness.Namespace) -> None:
    async with sessions(module_namespace, "s-1", "s-2") as (mine, theirs):
        await mine.say("write_file", path="/race/f", content="one\n")
        await theirs.say("edit_file", path="/race/f", old_string="one", new_string="two")
        text = await mine.fail("write_file", path="/race/f", content="mine\n")
    assert "changed since you read it; read it again and retry (you had version 1, it is at version 2 now)" in text
    kept = re.search(r"kept as conflict ([0-9a-f-]{36})", text)
    assert kept is not None
    rows = module_namespace.execute(
        "select path, convert_from(content, 'UTF8'), session from agent_file_conflicts where id = %s", (kept[1],)
    )
    assert rows == [("/race/f", "mine\n", "s-1")]


async def test_a_touch_is_no_change(session: Session) -> None:
    """L19: what counts is the version."""
    await session.say("write_file", path="/touched/f", content="one\n")
    node = await session.backend.stat("/touched/f")
    scope = session.backend.scope
    await files.set_attrs(
        session.backend.db, scope, [files.AttrsChange(node.path, node.id, Attrs(mode=0o755, mtime_ns=1))]
    )
    await session.say("edit_file", path="/touched/f", old_string="one", new_string="two")


async def test_a_change_by_another_program_is_noticed(session: Session, module_namespace: harness.Namespace) -> None:
    """L19: plain SQL, without a version of its own."""
    await session.say("write_file", path="/sql/f", content="one\ntwo\n")
    module_namespace.execute("update agent_files set content = 'one' || chr(10) || '2' where path = '/sql/f'")
    text = await session.fail("edit_file", path="/sql/f", old_string="one", new_string="1")
    assert "read it again" in text
    assert module_namespace.execute("select content from agent_files where path = '/sql/f'") == [("one\n2",)]
    await session.say("read_file", path="/sql/f")
    await session.say("edit_file", path="/sql/f", old_string="one", new_string="1")


async def test_a_file_that_was_deleted_or_replaced_by_another(module_namespace: harness.Namespace) -> None:
    async with sessions(module_namespace, "s-1", "s-2") as (mine, theirs):
        await mine.say("write_file", path="/gone/f", content="one\n")
        await theirs.backend.delete("/gone/f")
        assert "there is no file now" in await mine.fail("write_file", path="/gone/f", content="two\n")
        assert "No such file" in await mine.fail("read_file", path="/gone/f")
        assert "Created" in await mine.say("write_file", path="/gone/f", content="two\n")
        await theirs.backend.delete("/gone/f")
        await theirs.say("write_file", path="/gone/f", content="another\n")
        assert "another file is at this name" in await mine.fail("write_file", path="/gone/f", content="three\n")


async def test_a_file_that_was_moved_is_known_by_its_lineage(module_namespace: harness.Namespace) -> None:
    async with sessions(module_namespace, "s-1", "s-2") as (mine, theirs):
        await mine.say("write_file", path="/moved/from", content="one\n")
        await theirs.backend.rename("/moved/from", "/moved/to")
        await theirs.say("write_file", path="/moved/to", content="theirs\n")
        assert "read it again" in await mine.fail("write_file", path="/moved/to", content="mine\n")


async def test_a_file_never_read_may_be_replaced(module_namespace: harness.Namespace) -> None:
    async with sessions(module_namespace, "s-1", "s-2") as (mine, theirs):
        await theirs.say("write_file", path="/unread/f", content="theirs\n")
        assert "version 2" in await mine.say("write_file", path="/unread/f", content="mine\n")


# -- Batches ---------------------------------------------------------------------------------------


async def test_a_second_change_of_a_path_in_a_batch_is_refused(session: Session) -> None:
    """HF-08."""
    await session.say("write_file", path="/batch/f", content="a\nb\n")
    first = {"path": "/batch/f", "old_string": "a", "new_string": "A"}
    second = {"path": "batch//f", "old_string": "b", "new_string": "B"}
    assert not (await session.result("edit_file", first, end=False)).is_error
    for name, arguments in (("edit_file", second), ("write_file", {"path": "/batch/f", "content": ""})):
        refused = await session.result(name, arguments, end=False)
        assert refused.is_error
        assert "another call of this batch" in refused.for_llm
    session.tools.end_batch()
    assert (await session.backend.read_bytes("/batch/f")).data == b"A\nb\n"
    await session.say("edit_file", **second)


async def test_a_change_that_failed_does_not_count(session: Session) -> None:
    await session.say("write_file", path="/batch/g", content="a\n")
    wrong = {"path": "/batch/g", "old_string": "nope", "new_string": "A"}
    assert (await session.result("edit_file", wrong, end=False)).is_error
    assert not (await session.result("edit_file", wrong | {"old_string": "a"}, end=False)).is_error
    session.tools.end_batch()


async def test_of_two_changes_at_once_one_is_refused(session: Session) -> None:
    await session.say("write_file", path="/batch/h", content="a\nb\n")
    results: list[ToolResult] = []

    async def edit(old: str) -> None:
        arguments = {"path": "/batch/h", "old_string": old, "new_string": old.upper()}
        results.append(await session.result("edit_file", arguments, end=False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(edit, "a")
        nursery.start_soon(edit, "b")
    session.tools.end_batch()
    assert sorted(result.is_error for result in results) == [False, True]


# -- Wrong input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "read", "READ_FILE", "\ud800", "x" * 10_000_000, "read_file\0"], ids=ascii_start)
async def test_an_unknown_tool_lists_the_tools(session: Session, name: str) -> None:
    """DE-02."""
    result = await session.result(name, {})
    assert result.is_error
    assert f"The tools are: {', '.join(NAMES)}." in result.for_llm
    assert len(result.for_llm.encode()) < 500


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "it is not valid JSON (line 1, column 2)"),
        ("", "it is not valid JSON"),
        ("[" * 100_000, "it is not valid JSON"),
        (b"\xff\xfe", "it is not valid JSON"),
        ("[]", "it is not a JSON object"),
        (None, "it is not a JSON object"),
        (7, "it is not a JSON object"),
        ([{"path": "/f"}], "it is not a JSON object"),
        ({}, "path is missing"),
        ({"path": None}, "path must be of type string"),
        ({"path": ["/f"]}, "path must be of type string"),
        ({"path": "/f", "offset": "1"}, "offset must be of type integer"),
        ({"path": "/f", "offset": True}, "offset must be of type integer"),
        ({"path": "/f", "offset": 1.5}, "offset must be of type integer"),
        ({"path": "/f", "offset": None}, "offset must be of type integer"),
        ({"path": "/f", "offset": -1}, "offset breaks the rule minimum 0"),
        ({"path": "/f", "limit": 10**30}, "limit breaks the rule maximum"),
        ({"path": "/f", "extra": 1}, "it takes only path, offset, limit, column"),
        ({"path": ""}, "path breaks the rule minLength 1"),
        ({"path": "x" * 10_000_000}, "path breaks the rule maxLength 4096"),
        ({"path": "/f\0"}, "path holds a NUL"),
        ({"path": "/f\ud800"}, "path holds half of a surrogate pair"),
    ],
    ids=ascii_start,
)
async def test_input_that_a_tool_cannot_take_shows_the_schema(session: Session, arguments: object, why: str) -> None:
    """DE-03."""
    result = await session.result("read_file", arguments)
    assert result.is_error
    assert f"Invalid input for read_file: {why}" in result.for_llm
    schema = json.dumps(session.tools.tools[1].input_schema, ensure_ascii=False)
    assert result.for_llm.endswith(schema)
    assert len(result.for_llm.encode()) < 2000


async def test_json_text_is_taken_for_what_it_holds(session: Session) -> None:
    await session.say("write_file", path="/json/f", content="x\n")
    assert not (await session.result("read_file", '{"path": "/json/f", "limit": 5.0}')).is_error


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("write_file", {"path": "/f", "content": "a\0b"}, "content holds a NUL"),
        ("write_file", {"path": "/f", "content": "a\udfff"}, "content holds half of a surrogate pair"),
        ("write_file", {"path": "/f", "content": "x" * 10_000_000}, "the limit is 1048576"),
        ("write_file", {"path": "/" + "a/" * 80, "content": ""}, "the limit is 64"),
        ("write_file", {"path": "/" + "x" * 300, "content": ""}, "the limit is 255"),
        ("write_file", {"path": "/../etc/passwd", "content": ""}, "must not contain `..`"),
        ("write_file", {"path": "/", "content": ""}, "Is a directory"),
        ("write_file", {"path": "/wrong/f/below", "content": ""}, "/wrong/f: Not a directory"),
        ("edit_file", {"path": "/wrong/f", "old_string": "x" * 10_000_000, "new_string": ""}, "replace a shorter part"),
        ("edit_file", {"path": "/wrong/f", "old_string": "a", "new_string": "x" * 10_000_000}, "the limit is 1048576"),
        ("grep", {"pattern": "("}, "parentheses () not balanced"),
        ("grep", {"pattern": "a{2,1}"}, "invalid repetition count"),
        ("grep", {"pattern": "[z-a]"}, "invalid character range"),
        ("grep", {"pattern": "a\nb"}, "is in one line"),
        ("grep", {"pattern": "a", "include": "../*"}, "must not contain `..`"),
        ("grep", {"pattern": "a", "path": "/nowhere"}, "No such file"),
        ("glob", {"pattern": "../*"}, "must not contain `..`"),
        ("glob", {"pattern": "{a,b}" * 20}, "use fewer braces"),
        ("glob", {"pattern": "{" * 900}, "use fewer braces"),
    ],
    ids=ascii_start,
)
async def test_input_that_asks_for_what_cannot_be(
    session: Session, name: str, arguments: dict[str, str], why: str
) -> None:
    await session.backend.write("/wrong/f", "a\n", Unseen.ANY)
    text = await session.fail(name, **arguments)
    assert why in text
    assert len(text) < 4000


TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(), max_size=8),
    st.sampled_from(
        [
            "/",
            "",
            ".",
            "..",
            "/f",
            "/d",
            "\0",
            "\ud83d",
            "*",
            "**",
            "[",
            "{a,",
            "(",
            "\\",
            "(?i)",
            "%",
            "\r\n",
            "x" * 5000,
        ]
    ),
)
VALUES = st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.floats(), st.lists(TEXTS, max_size=2))
KEYS = [
    "path",
    "content",
    "old_string",
    "new_string",
    "replace_all",
    "offset",
    "limit",
    "column",
    "pattern",
    "include",
    "literal",
]
ARGUMENTS = st.one_of(
    st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), VALUES, max_size=5),
    st.builds(
        lambda a, b, c, d: {"path": a, "content": b, "old_string": c, "new_string": d}, TEXTS, TEXTS, TEXTS, TEXTS
    ).flatmap(lambda whole: st.sets(st.sampled_from(list(whole))).map(lambda keys: {key: whole[key] for key in keys})),
    st.fixed_dictionaries({"pattern": TEXTS}, optional={"path": TEXTS, "include": TEXTS, "literal": st.booleans()}),
    st.fixed_dictionaries(
        {"path": TEXTS}, optional={"offset": st.integers(), "limit": st.integers(), "column": st.integers()}
    ),
    VALUES,
    st.binary(max_size=10),
)
CALLS = st.lists(st.tuples(st.sampled_from([*NAMES, "x"]), ARGUMENTS), min_size=30, max_size=30)


@settings(max_examples=15)
@given(calls=CALLS)
async def test_any_input_gives_an_answer(module_namespace: harness.Namespace, calls: list[tuple[str, Any]]) -> None:
    async with sessions(module_namespace, "fuzz") as (session,):
        for name, arguments in calls:
            result = await session.result(name, arguments)
            assert "internal error" not in result.for_llm
            assert "Traceback" not in result.for_llm
            assert "Postgres" not in result.for_llm
            result.for_llm.encode()
            assert len(result.for_llm) < MAX_ANSWER_CHARS + 5000


async def test_a_fault_of_ours_gives_no_details(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any tool: whatever the backend raises, the answer is a result."""

    async def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the secret content")

    for name in ("ls", "read", "write", "edit", "glob", "grep", "stat"):
        monkeypatch.setattr(Backend, name, broken)
    for tool in session.tools.tools:
        arguments = dict.fromkeys(tool.input_schema["required"], "/f")  # type: ignore[call-overload]
        assert await session.fail(tool.name, **arguments) == "Error: internal error (RuntimeError)"


async def test_a_model_is_not_told_where_the_database_is(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_args: object, **_kwargs: object) -> None:
        raise NotConnected("Postgres does not answer at db.internal:5432: Connection refused")

    monkeypatch.setattr(Backend, "read", broken)
    said = await session.fail("read_file", path="/f")
    assert said == "Error: Postgres does not answer; nothing was sent. Try again later."


# -- Machine-written files -------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["large_tool_results/s-1", "large_tool_results", "conversation_history"])
async def test_a_model_makes_no_file_of_the_harness(session: Session, below: str) -> None:
    """The store lets a session make its results, for a harness in the same container; these calls are the model's."""
    for name, more in (("write_file", {"content": "x"}), ("edit_file", {"old_string": "a", "new_string": "b"})):
        assert "written by the harness only" in await session.fail(name, path=f"/{below}/forged", **more)


async def test_a_result_is_read_at_its_flat_path_too(session: Session, module_namespace: harness.Namespace) -> None:
    """Deepagents names no session. The flat path means the caller's own."""
    for path, text in (
        ("/large_tool_results/s-1/call_1", "mine"),
        ("/large_tool_results/s-1/call_2/001", "a part"),
        ("/large_tool_results/s-2/call_3", "theirs"),
    ):
        module_namespace.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, %s, %s)",
            (module_namespace.tenant_id, module_namespace.agent_id, path, text),
        )
    for path in ("/large_tool_results/s-1/call_1", "/large_tool_results/call_1"):
        assert "\tmine\n" in await session.say("read_file", path=path)
        assert "1:mine" in await session.say("grep", pattern="mine", path=path)
    assert "a part" in await session.say("read_file", path="/large_tool_results/call_2/001")
    assert "call_2/001" in await session.say("ls", path="/large_tool_results/call_2")
    for path in ("/large_tool_results/call_3", "/large_tool_results/s-2/call_3", "/large_tool_results/s-2"):
        assert "No such file" in await session.fail("read_file", path=path)
    for path in ("/large_tool_results/call_1", "/large_tool_results/s-2/new"):
        await session.fail("write_file", path=path, content="x")
