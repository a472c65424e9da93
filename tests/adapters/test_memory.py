"""Anthropic's memory tool over `/memories`: its six commands, called as its SDK calls them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from anthropic.lib.tools import ToolError

from fusefs.adapters.memory import MemoryTool
from fusefs.services.backend import Unseen
from tests.adapters.conftest import OpenPortal
from tests.harness import Namespace


@pytest.fixture
def memory(open_portal: OpenPortal) -> MemoryTool:
    """For a principal that may write there."""
    return MemoryTool(open_portal(principal="admin"))


def do(memory: MemoryTool, command: str, **arguments: object) -> str:
    """One command, as the SDK passes on what a model asked for."""
    result = memory.call({"command": command, **arguments})
    assert isinstance(result, str)
    return result


def refusal(memory: MemoryTool, command: str, **arguments: object) -> str:
    with pytest.raises(ToolError) as caught:
        do(memory, command, **arguments)
    return str(caught.value)


def content_of(agent: Namespace, path: str) -> str | None:
    rows = agent.execute("SELECT content FROM agent_files WHERE agent_id = %s AND path = %s", (agent.agent_id, path))
    return str(rows[0][0]) if rows else None


def test_a_life_of_a_memory(memory: MemoryTool, agent: Namespace) -> None:
    assert do(memory, "create", path="/memories/likes.md", file_text="coffee\ntea\nmilk\nwater\n") == (
        "File created successfully at: /memories/likes.md"
    )
    assert do(memory, "view", path="/memories/likes.md") == (
        "Here's the content of /memories/likes.md with line numbers:\n"
        "     1\tcoffee\n     2\ttea\n     3\tmilk\n     4\twater\n     5\t"
    )
    assert do(memory, "str_replace", path="/memories/likes.md", old_str="milk", new_str="oat milk") == (
        "The memory file has been edited. Here is the snippet showing the change (with line numbers):\n"
        "     1\tcoffee\n     2\ttea\n     3\toat milk\n     4\twater\n     5\t"
    )
    assert do(memory, "insert", path="/memories/likes.md", insert_line=1, insert_text="cocoa\n") == (
        "The file /memories/likes.md has been edited."
    )
    assert content_of(agent, "/memories/likes.md") == "coffee\ncocoa\ntea\noat milk\nwater\n"
    assert do(memory, "rename", old_path="/memories/likes.md", new_path="/memories/food/drinks.md") == (
        "Successfully renamed /memories/likes.md to /memories/food/drinks.md"
    )
    assert do(memory, "delete", path="/memories/food") == "Successfully deleted /memories/food"
    assert content_of(agent, "/memories/food/drinks.md") is None


def test_the_view_of_a_directory(memory: MemoryTool) -> None:
    """Two levels, hidden names left out, directories with a slash."""
    for path, size in (
        ("a/b/c/deep.md", 1),
        ("a/b/two.md", 1536),
        ("a/one.md", 5),
        (".hidden", 1),
        ("top.md", 2 * 1024),
    ):
        do(memory, "create", path=f"/memories/{path}", file_text="x" * size)
    assert do(memory, "view", path="/memories").splitlines() == [
        "Here're the files and directories up to 2 levels deep in /memories, excluding hidden items:",
        "0B\t/memories",
        "0B\t/memories/a/",
        "0B\t/memories/a/b/",
        "5B\t/memories/a/one.md",
        "2K\t/memories/top.md",
    ]
    assert "1.5K\t/memories/a/b/two.md" in do(memory, "view", path="/memories/a/b")


def test_nothing_was_remembered_yet(memory: MemoryTool, agent: Namespace) -> None:
    agent.execute("DELETE FROM agent_files WHERE agent_id = %s AND path = '/memories'", (agent.agent_id,))
    assert do(memory, "view", path="/memories").endswith("0B\t/memories")
    do(memory, "create", path="/memories/first.md", file_text="x")
    assert do(memory, "view", path="/memories").endswith("1B\t/memories/first.md")


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [([2, 3], "     2\tb\n     3\tc"), ([3, -1], "     3\tc\n     4\td"), ([0, 1], "     1\ta"), ([9, 12], "")],
)
def test_a_range_of_lines(memory: MemoryTool, view_range: list[int], shown: str) -> None:
    do(memory, "create", path="/memories/a", file_text="a\nb\nc\nd")
    said = do(memory, "view", path="/memories/a", view_range=view_range)
    assert said == f"Here's the content of /memories/a with line numbers:\n{shown}"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"command": "view", "path": "/memories/none"}, "The path /memories/none does not exist."),
        ({"command": "view", "path": "/work/a"}, "Path must start with /memories, got: /work/a"),
        ({"command": "view", "path": "/memories/../work/a"}, "must not contain `..`"),
        ({"command": "view", "path": "/memoriesX"}, "Path must start with /memories"),
        ({"command": "view", "path": "memories/a"}, "must be absolute"),
        ({"command": "view", "path": "/memories/link"}, "Unsupported file type"),
        ({"command": "view", "path": "/memories/binary"}, "Unsupported file type"),
        ({"command": "create", "path": "/memories/a", "file_text": "x"}, "File /memories/a already exists"),
        (
            {"command": "str_replace", "path": "/memories/a", "old_str": "z", "new_str": "y"},
            "No replacement was performed, old_str `z` did not appear verbatim in /memories/a.",
        ),
        (
            {"command": "str_replace", "path": "/memories/a", "old_str": "x", "new_str": "y"},
            "No replacement was performed. Multiple occurrences of old_str `x`: the text to replace is there 2 times",
        ),
        ({"command": "str_replace", "path": "/memories/none", "old_str": "x", "new_str": "y"}, "does not exist"),
        (
            {"command": "insert", "path": "/memories/a", "insert_line": 4, "insert_text": "x"},
            "Invalid `insert_line` parameter: 4. It should be within the range [0, 3].",
        ),
        ({"command": "insert", "path": "/memories", "insert_line": 0, "insert_text": "x"}, "Is a directory"),
        ({"command": "delete", "path": "/memories"}, "Cannot delete the /memories directory itself"),
        ({"command": "delete", "path": "/memories/"}, "Cannot delete the /memories directory itself"),
        ({"command": "delete", "path": "/memories/none"}, "does not exist"),
        ({"command": "rename", "old_path": "/memories", "new_path": "/memories/b"}, "Cannot rename the /memories"),
        ({"command": "rename", "old_path": "/memories/none", "new_path": "/memories/b"}, "does not exist"),
        (
            {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/binary"},
            "The destination /memories/binary already exists",
        ),
        ({"command": "rename", "old_path": "/memories/a", "new_path": "/work/a"}, "Path must start with /memories"),
    ],
    ids=lambda value: " ".join(map(str, value.values()))[:40] if isinstance(value, dict) else "",
)
def test_what_is_refused(memory: MemoryTool, agent: Namespace, command: dict[str, object], says: str) -> None:
    portal = memory._portal
    portal.call(portal.backend.write, "/memories/a", "x\ny\nx\n", Unseen.ABSENT)
    portal.call(portal.backend.write, "/memories/binary", b"\0", Unseen.ABSENT)
    portal.call(portal.backend.write, "/work/a", "of the agent", Unseen.ABSENT)
    agent.execute(
        "INSERT INTO agent_files (tenant_id, agent_id, path, content, kind)"
        " VALUES (%s, %s, '/memories/link', '../work/a', 'symlink')",
        (agent.tenant_id, agent.agent_id),
    )
    assert says in refusal(memory, **command)  # type: ignore[arg-type]
    assert content_of(agent, "/memories/a") == "x\ny\nx\n"
    assert content_of(agent, "/work/a") == "of the agent"


def test_an_agent_may_look_and_is_told_who_can_write(memory: MemoryTool, open_portal: OpenPortal) -> None:
    do(memory, "create", path="/memories/a", file_text="x\n")
    own = MemoryTool(open_portal(principal="agent"))
    assert "     1\tx" in do(own, "view", path="/memories/a")
    for command in (
        {"command": "create", "path": "/memories/b", "file_text": "x"},
        {"command": "str_replace", "path": "/memories/a", "old_str": "x", "new_str": "y"},
        {"command": "insert", "path": "/memories/a", "insert_line": 0, "insert_text": "y"},
        {"command": "delete", "path": "/memories/a"},
        {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"},
    ):
        said = refusal(own, **command)  # type: ignore[arg-type]
        assert "/memories is reserved" in said
        assert "owner or admin" in said
    assert "     1\tx" in do(memory, "view", path="/memories/a")


def test_inserts_at_once_lose_nothing(memory: MemoryTool, open_portal: OpenPortal, agent: Namespace) -> None:
    """One that meets a change is an error; what was answered with success is there."""
    do(memory, "create", path="/memories/a", file_text="")
    memories = [memory, MemoryTool(open_portal(session="s2", principal="admin"))]

    def insert(number: int) -> str:
        try:
            return do(memories[number % 2], "insert", path="/memories/a", insert_line=0, insert_text=f"line {number}")
        except ToolError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(insert, range(16)))
    done = [number for number, text in enumerate(said) if text == "The file /memories/a has been edited."]
    assert done
    assert all("changed since you read it" in text for number, text in enumerate(said) if number not in done)
    lines = str(content_of(agent, "/memories/a")).splitlines()
    assert sorted(lines) == sorted(f"line {number}" for number in done)


def test_the_definition_is_the_apis_own(memory: MemoryTool) -> None:
    assert memory.to_dict() == {"type": "memory_20250818", "name": "memory"}
