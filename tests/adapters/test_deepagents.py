"""The backend for deepagents, under the published library's own middleware and tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deepagents.middleware.filesystem import FilesystemMiddleware
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import tool

from fusefs.adapters.deepagents import FusefsBackend
from fusefs.adapters.portal import Portal
from fusefs.rules.paths import LARGE_RESULTS
from tests.adapters.conftest import OpenPortal
from tests.harness import Namespace

VERSIONS = "SELECT content, version FROM agent_files WHERE agent_id = %s AND path = %s"


class Scripted(FakeMessagesListChatModel):
    """A model that says what a test wrote down."""

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Scripted:  # type: ignore[override]
        return self


@tool
def big() -> str:
    """Give a long text."""
    return "".join(f"{number:06} payload\n" for number in range(7000))


def calls(*pairs: tuple[str, dict[str, Any]]) -> AIMessage:
    return AIMessage(
        "", tool_calls=[{"name": name, "args": args, "id": f"call_{at}"} for at, (name, args) in enumerate(pairs)]
    )


def run(backend: FusefsBackend, *turns: AIMessage, asynchronous: bool = False) -> list[ToolMessage]:
    """The results of the tools that the model called, in order."""
    agent = create_agent(
        Scripted(responses=[*turns, AIMessage("done")]), [big], middleware=[FilesystemMiddleware(backend=backend)]
    )
    question = {"messages": [{"role": "user", "content": "go"}]}
    state = asyncio.run(agent.ainvoke(question)) if asynchronous else agent.invoke(question)  # type: ignore[arg-type]
    messages: list[BaseMessage] = state["messages"]
    return [message for message in messages if isinstance(message, ToolMessage)]


@pytest.fixture
def backend(portal: Portal) -> FusefsBackend:
    return FusefsBackend(portal)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_tools_of_its_middleware(backend: FusefsBackend, asynchronous: bool) -> None:
    results = run(
        backend,
        calls(("write_file", {"file_path": "/src/a.py", "content": "one\ntwo\nthree\n"})),
        calls(("read_file", {"file_path": "/src/a.py", "offset": 1, "limit": 1})),
        calls(("edit_file", {"file_path": "/src/a.py", "old_string": "two", "new_string": "2"})),
        calls(("read_file", {"file_path": "/src/a.py"})),
        calls(("ls", {"path": "/"}), ("ls", {"path": "/src"})),
        calls(("glob", {"pattern": "*.py"}), ("glob", {"pattern": "/*.py", "path": "/src"})),
        calls(("grep", {"pattern": "2", "output_mode": "content"})),
        calls(("delete", {"file_path": "/src"})),
        calls(("read_file", {"file_path": "/src/a.py"}), ("ls", {"path": "/src"})),
        asynchronous=asynchronous,
    )
    said = [str(message.content) for message in results]
    assert said[0] == "Updated file /src/a.py"
    assert said[1] == "@@ lines 2-2 of 3 | next offset 2 @@\ntwo"
    assert said[2] == "Successfully replaced 1 instance(s) of the string in '/src/a.py'"
    assert said[3].endswith("one\n2\nthree")
    assert "'/src/'" in said[4]
    assert said[5] == said[6] == said[7] == "['/src/a.py']"
    assert said[8] == "/src/a.py:\n  2: 2"
    assert said[9] == "Deleted /src"
    assert "File '/src/a.py' not found" in said[10]
    assert "path_not_found" in said[11]
    assert [message.status for message in results[10:]] == ["error", "error"]


def test_parallel_edits_of_one_file_are_all_kept(backend: FusefsBackend, agent: Namespace) -> None:
    """Of several agents at once; within one turn of one agent the library itself takes the first and refuses the
    others by name."""
    words = [f"word{number:02}" for number in range(12)]
    backend.write("/a", "\n".join(words))

    def edit(word: str) -> ToolMessage:
        arguments = {"file_path": "/a", "old_string": word, "new_string": word.upper()}
        return run(backend, calls(("edit_file", arguments)))[0]

    with ThreadPoolExecutor(len(words)) as pool:
        assert {message.status for message in pool.map(edit, words)} == {"success"}
    rows = agent.execute(VERSIONS, (agent.agent_id, "/a"))
    assert rows == [("\n".join(words).upper(), 13)]


def test_parallel_edits_of_two_backends_are_all_kept(open_portal: OpenPortal) -> None:
    backends = [FusefsBackend(open_portal(session)) for session in ("s1", "s2")]
    words = [f"word{number:02}" for number in range(10)]
    backends[0].write("/a", " ".join(words))
    with ThreadPoolExecutor(10) as pool:
        edits = [pool.submit(backends[at % 2].edit, "/a", word, word.upper()) for at, word in enumerate(words)]
        assert [edit.result().error for edit in edits] == [None] * 10
    assert content(backends[1], "/a") == " ".join(words).upper()


def content(backend: FusefsBackend, path: str) -> str:
    data = backend.read(path).file_data
    assert data is not None
    return data["content"]


def test_a_write_over_what_was_not_read_is_refused(open_portal: OpenPortal) -> None:
    first, second = (FusefsBackend(open_portal(session)) for session in ("s1", "s2"))
    assert first.write("/a", "one").error is None
    assert content(second, "/a") == "one"
    assert second.write("/a", "two").error is None
    refused = first.write("/a", "mine")
    assert refused.path is None
    assert "Error: /a: changed since you read it; read it again and retry" in str(refused.error)
    assert content(first, "/a") == "two"
    assert first.write("/a", "two and mine").error is None
    # An edit of somebody else in between was not seen either, though one's own edit was made on top of it.
    assert second.edit("/a", "mine", "yours").error is None
    assert first.edit("/a", "two", "2").error is None
    assert "changed since" in str(first.write("/a", "mine again").error)


def test_long_results_lie_where_the_library_puts_them(backend: FusefsBackend, agent: Namespace) -> None:
    """`/large_tool_results/ID` is the session's own, in what it writes and in what it reads."""
    results = run(
        backend,
        calls(("big", {})),
        calls(("read_file", {"file_path": f"{LARGE_RESULTS}/call_0", "offset": 6998})),
        calls(("ls", {"path": f"{LARGE_RESULTS}/s1"})),
    )
    assert len(str(results[0].content)) < 5000
    assert f"{LARGE_RESULTS}/call_0" in str(results[0].content)
    assert "006999 payload" in str(results[1].content)
    assert f"{LARGE_RESULTS}/s1/call_0" in str(results[2].content)
    rows = agent.execute(
        "SELECT content FROM agent_files WHERE agent_id = %s AND path = '/large_tool_results/s1/call_0'",
        (agent.agent_id,),
    )
    assert rows == [(big.invoke({}),)]


def test_another_sessions_results_are_not_there(open_portal: OpenPortal) -> None:
    first, second = (FusefsBackend(open_portal(session)) for session in ("s1", "s2"))
    assert first.write(f"{LARGE_RESULTS}/x", "mine").error is None
    assert content(first, f"{LARGE_RESULTS}/x") == "mine"
    assert second.read(f"{LARGE_RESULTS}/x").error == f"File '{LARGE_RESULTS}/x' not found"
    assert second.read(f"{LARGE_RESULTS}/s1/x").error == f"File '{LARGE_RESULTS}/s1/x' not found"
    assert second.glob("*", "/").matches == []


BINARY = b"\x89PNG\0\xff"


def test_bytes_go_up_and_come_down(backend: FusefsBackend) -> None:
    """Each file has its own answer, in order."""
    up = backend.upload_files([("/a.bin", BINARY), ("/memories/x", b"x"), ("relative", b"x"), ("/b.txt", b"text")])
    assert [answer.error for answer in up] == [None, "permission_denied", "invalid_path", None]
    down = backend.download_files(["/b.txt", "/none", "/", "/a.bin", "/../x"])
    assert [(answer.content, answer.error) for answer in down] == [
        (b"text", None),
        (None, "file_not_found"),
        (None, "is_directory"),
        (BINARY, None),
        (None, "invalid_path"),
    ]
    assert [answer.path for answer in down] == ["/b.txt", "/none", "/", "/a.bin", "/../x"]
    # Both its own rule and ours make it bytes: the name, and the content.
    for path in ("/a.bin", "/c.png"):
        backend.upload_files([("/c.png", b"text in a picture's name")])
        data = backend.read(path).file_data
        assert data is not None
        assert data["encoding"] == "base64"


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda backend: backend.ls("/none"), "Path '/none': path_not_found"),
        (lambda backend: backend.ls("/a"), "Path '/a': not_a_directory"),
        (lambda backend: backend.read("/none"), "File '/none' not found"),
        (lambda backend: backend.read("/"), "/: Is a directory."),
        (lambda backend: backend.read("/a", offset=9), "Line offset 9 exceeds file length (2 lines)"),
        (lambda backend: backend.read("/../a"), "/../a: the path must not contain `..`."),
        (lambda backend: backend.edit("/none", "x", "y"), "Error: File '/none' not found"),
        (lambda backend: backend.delete("/none"), "Error: File '/none' not found"),
    ],
    ids=["ls", "ls file", "read", "read dir", "offset", "dots", "edit", "delete"],
)
def test_what_is_not_there(backend: FusefsBackend, do: Callable[[FusefsBackend], Any], says: str) -> None:
    backend.write("/a", "one\ntwo\n")
    assert do(backend).error == says


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda backend: backend.write("/memories/x", "x"), "Error: /memories/x: /memories is reserved"),
        (lambda backend: backend.edit("/a", "o", "0"), "Error: /a: the text to replace is there 2 times"),
        (lambda backend: backend.edit("/a", "none", "0"), "Error: /a: "),
        (lambda backend: backend.write("/a/b", "x"), "Error: "),
        (lambda backend: backend.grep("o", "/", "../*"), "Error: "),
        (lambda backend: backend.write("/a", "\ud800"), "Error: "),
    ],
    ids=["reserved", "not unique", "no match", "below a file", "pattern", "surrogate"],
)
def test_what_is_refused(backend: FusefsBackend, do: Callable[[FusefsBackend], Any], says: str) -> None:
    backend.write("/a", "one\ntwo\n")
    assert str(do(backend).error).startswith(says)


def test_lines_are_counted_from_0_and_end_in_lf(backend: FusefsBackend) -> None:
    backend.write("/a", "one\r\ntwo\r\nthree")
    page = backend.read("/a", offset=1, limit=1)
    assert page.file_data is not None
    assert (page.file_data["content"], page.start_line, page.end_line, page.next_offset, page.total_lines) == (
        "two\n",
        2,
        2,
        2,
        3,
    )
    # An edit in those terms keeps the file's own line ends.
    assert backend.edit("/a", "one\ntwo\n", "1\n2\n").occurrences == 1
    assert backend.download_files(["/a"])[0].content == b"1\r\n2\r\nthree"


def test_a_search_that_is_cut_short(backend: FusefsBackend) -> None:
    backend.write("/a", "x\n" * 5)
    assert backend.grep("x", max_count=3).truncated is True
    exact = backend.grep("x", max_count=5)
    assert exact.matches is not None
    assert (len(exact.matches), exact.truncated) == (5, False)
    assert backend.grep("x", "/none").matches == []
    assert backend.glob("*", "/none").matches == []
