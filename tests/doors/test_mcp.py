"""`fusefs mcp`: the table of cases, what is MCP's own, both transports, and input of every kind."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import MCPError

from fusefs.tools.mcp import MAX_RESOURCE_BYTES, PAGE_FILES, uri_of
from fusefs.tools.streams import MAX_LINE_BYTES
from tests import harness
from tests.doors.mcp_door import McpDoor, arguments, cancel_a_query, in_memory, locked, over_stdio, text_of
from tests.services.cases import STALE, Case, Doors, Refused, cases_for, run


@pytest.fixture(scope="module")
def env(suite_dir: Path, module_namespace: harness.Namespace) -> dict[str, str]:
    return harness.command_environment(suite_dir, module_namespace.dsn)


@pytest.mark.parametrize("case", cases_for(McpDoor))
async def test_case(module_namespace: harness.Namespace, case: Case) -> None:
    async with in_memory(module_namespace, "own", "other") as (own, other):
        await run(case, Doors(own, other, module_namespace, "own", "other"))


# What is MCP's own


async def test_tools_say_what_they_may_do(module_namespace: harness.Namespace) -> None:
    async with in_memory(module_namespace, "s") as (door,):
        tools = {tool.name: tool for tool in (await door.client.list_tools()).tools}
    hints = {name: tool.annotations for name, tool in tools.items()}
    assert all(hint is not None and hint.open_world_hint is False for hint in hints.values())
    reading = {name for name, hint in hints.items() if hint is not None and hint.read_only_hint}
    changing = {name for name, hint in hints.items() if hint is not None and hint.destructive_hint}
    assert reading == {"ls", "read_file", "glob", "grep", "list_versions", "read_version", "list_deleted"}
    assert changing == {"write_file", "edit_file", "restore_version"}
    assert not hints["edit_file"].idempotent_hint  # type: ignore[union-attr]
    assert hints["write_file"].idempotent_hint  # type: ignore[union-attr]
    assert all(tool.input_schema["type"] == "object" and tool.description for tool in tools.values())


async def test_history_is_listed_read_and_restored(namespace: harness.Namespace) -> None:
    async with in_memory(namespace, "s") as (door,):
        await door.write("/d/f", "one\n")
        await door.write("/d/f", "two\n")
        assert [line.split(" (")[0] for line in (await door.call("list_versions", path="/d/f")).splitlines()] == [
            "version 2",
            "version 1",
        ]
        assert (await door.call("read_version", path="/d/f", version=1)).startswith("     1\tone\n")
        assert "at version 3 now" in await door.call("restore_version", path="/d/f", version=1)
        await door.edit("/d/f", "one", "three")  # what was restored was seen
        namespace.execute("delete from agent_files where path = '/d/f'")
        assert await door.call("list_deleted", path="/d") != "Nothing was deleted."
        await door.call("restore_version", path="/d/f", version=4)
        assert await door.read("/d/f") == "three\n"
        with pytest.raises(Refused, match="there is no version 99"):
            await door.call("restore_version", path="/d/f", version=99)
        Doors(door, door, namespace, "s", "s").seed("/memories/m", "theirs")
        with pytest.raises(Refused, match="denied"):
            await door.call("restore_version", path="/memories/m", version=1)


async def test_the_history_of_a_symlink_is_that_of_its_file(namespace: harness.Namespace) -> None:
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, kind) values (%s, %s, '/link', 'd/f', 'symlink')",
        (namespace.tenant_id, namespace.agent_id),
    )
    async with in_memory(namespace, "s") as (door,):
        await door.write("/d/f", "one\n")
        await door.write("/link", "two\n")
        assert len((await door.call("list_versions", path="/link")).splitlines()) == 2
        assert (await door.call("read_version", path="/link", version=1)).startswith("     1\tone\n")
        await door.call("restore_version", path="/link", version=1)
        assert await door.read("/d/f") == "one\n"


async def test_resources_are_listed_by_pages(namespace: harness.Namespace) -> None:
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) select %s, %s, '/many/' || n || ' é', n::text"
        " from generate_series(1000, %s) n",
        (namespace.tenant_id, namespace.agent_id, 1000 + PAGE_FILES + 4),
    )
    async with in_memory(namespace, "s", "other") as (door, other):
        Doors(door, other, namespace, "s", "other").seed("/large_tool_results/other/x", "theirs")
        Doors(door, other, namespace, "s", "other").seed("/large_tool_results/s/x", "ours")
        first = await door.client.list_resources()
        second = await door.client.list_resources(cursor=first.next_cursor)
        found = [*first.resources, *second.resources]
        assert (len(first.resources), second.next_cursor) == (PAGE_FILES, None)
        assert [one.title for one in found[:2]] == ["/large_tool_results/s/x", "/many/1000 é"]
        assert len(found) == len({one.uri for one in found}) == PAGE_FILES + 6
        assert found[1].uri == "fusefs:///many/1000%20%C3%A9"
        assert (found[1].name, found[1].size) == ("1000 é", 4)
        with pytest.raises(MCPError, match="Not a cursor"):
            await door.client.list_resources(cursor="?")
        with pytest.raises(MCPError, match="No such file"):
            await door.client.read_resource(uri_of("/large_tool_results/other/x"))


async def test_a_resource_is_text_or_bytes(namespace: harness.Namespace) -> None:
    async with in_memory(namespace, "s") as (door,):
        doors = Doors(door, door, namespace, "s", "s")
        doors.seed("/picture.png", b"\x89PNG\0\xff")
        doors.seed("/page.html", "<p>é\r\n")
        (template,) = (await door.client.list_resource_templates()).resource_templates
        assert template.uri_template == "fusefs:///{+path}"
        (picture,) = (await door.client.read_resource("fusefs:///picture.png")).contents
        (page,) = (await door.client.read_resource("fusefs:///page.html")).contents
        assert isinstance(picture, types.BlobResourceContents)
        assert isinstance(page, types.TextResourceContents)
        assert (base64.b64decode(picture.blob), picture.mime_type) == (b"\x89PNG\0\xff", "image/png")
        assert (page.text, page.mime_type) == ("<p>é\r\n", "text/html")
        for uri in ("file:///etc/passwd", "fusefs://host/x", "fusefs:///%ff", "fusefs:///a/../b", "fusefs:///memories"):
            with pytest.raises(MCPError) as refused:
                await door.client.read_resource(uri)
            assert refused.value.code == types.INVALID_PARAMS, uri


async def test_a_resource_over_the_limit_is_refused(namespace: harness.Namespace) -> None:
    async with in_memory(namespace, "s") as (door,):
        Doors(door, door, namespace, "s", "s").seed("/big", "b" * (MAX_RESOURCE_BYTES + 1))
        with pytest.raises(MCPError, match="read_file"):
            await door.client.read_resource("fusefs:///big")


async def test_a_resource_that_was_read_counts_as_seen(namespace: harness.Namespace) -> None:
    async with in_memory(namespace, "s", "other") as (door, other):
        await other.write("/f", "one\n")
        await door.client.read_resource("fusefs:///f")
        await other.write("/f", "two\n")
        with pytest.raises(Refused) as refused:
            await door.write("/f", "mine\n")
        assert refused.value.kind == STALE


async def test_calls_at_the_same_time_are_one_batch(namespace: harness.Namespace) -> None:
    async with in_memory(namespace, "s") as (door,):
        await door.write("/f", "a b\n")
        refusals: list[str] = []

        async def edit(old: str) -> None:
            try:
                await door.edit("/f", old, old.upper())
            except Refused as refused:
                refusals.append(refused.kind)

        with locked(namespace) as lock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(edit, "a")
                nursery.start_soon(edit, "b")
                while not refusals:
                    await trio.sleep(0.01)
                lock.rollback()
        assert len(refusals) == 1
        await door.edit("/f", "a" if "a" in await door.read("/f") else "b", "later")


async def test_what_a_model_gets_wrong_is_a_result(module_namespace: harness.Namespace) -> None:
    async with in_memory(module_namespace, "s") as (door,):
        for name, given, said in (
            ("raed_file", {}, "There is no tool 'raed_file'. The tools are: ls, read_file,"),
            ("read_file", {}, 'path is missing. Its schema: {"type": "object"'),
            ("read_file", {"path": 7}, "path must be of type string"),
            ("read_file", {"path": "/a", "x": None}, "it takes only path, offset"),
            ("write_file", {"path": "/a", "content": "\ud800"}, "half of a surrogate pair"),
            ("grep", {"pattern": "("}, "invalid regular expression"),
        ):
            result = await door.client.call_tool(name, given)
            assert result.is_error
            assert said in text_of(result), name


# Standard input and output


async def test_a_cancelled_request_cancels_its_query(namespace: harness.Namespace, suite_dir: Path) -> None:
    async with over_stdio(namespace, harness.command_environment(suite_dir, namespace.dsn)) as client:
        await client.call_tool("write_file", {"path": "/f", "content": "x\n"})
        await cancel_a_query(client, namespace)
        assert "/f:1:x" in text_of(await client.call_tool("grep", {"pattern": "x"}))


async def test_a_long_call_tells_that_it_goes_on(namespace: harness.Namespace, suite_dir: Path) -> None:
    told: list[tuple[float, str | None]] = []
    async with over_stdio(namespace, harness.command_environment(suite_dir, namespace.dsn)) as client:
        with locked(namespace) as lock:

            async def note(progress: float, total: float | None, message: str | None) -> None:
                told.append((progress, message))
                if len(told) == 2:
                    lock.rollback()

            await client.call_tool("ls", {}, progress_callback=note)
    assert told == [(1.0, "ls: 1 s"), (2.0, "ls: 2 s")]


class Raw:
    """A client that speaks in lines."""

    def __init__(self, namespace: harness.Namespace, env: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self.process = subprocess.Popen(
            [harness.FUSEFS, *arguments(namespace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=env,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._pings = 0
        info = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        self.send(json.dumps({"jsonrpc": "2.0", "id": "start", "method": "initialize", "params": info}).encode())
        assert json.loads(self._stdout.readline())["result"]["serverInfo"]["name"] == "fusefs"
        self.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    def send(self, line: bytes) -> None:
        self._stdin.write(line + b"\n")
        self._stdin.flush()

    def answers(self) -> list[Any]:
        """What came until now: everything before the answer to a ping."""
        self._pings += 1
        name = f"ping {self._pings}"
        self.send(json.dumps({"jsonrpc": "2.0", "id": name, "method": "ping"}).encode())
        found: list[Any] = []
        while True:
            line = self._stdout.readline()
            assert line, "the server ended"
            assert b"Traceback" not in line
            assert b'.py\\"' not in line
            found.append(json.loads(line))
            if found[-1].get("id") == name:
                return found[:-1]

    def await_answer(self, request_id: object) -> Any:
        while True:
            found = json.loads(self._stdout.readline())
            if found.get("id") == request_id:
                return found

    def close_stdin(self) -> None:
        self._stdin.close()

    def end(self) -> tuple[int, bytes]:
        """Close stdin; exit code, and what was said on stderr."""
        self._stdin.close()
        code = self.process.wait(timeout=30)
        self._stdout.close()
        self.errors.seek(0)
        said = self.errors.read()
        self.errors.close()
        return code, said


@pytest.fixture(scope="module")
def raw(module_namespace: harness.Namespace, env: dict[str, str]) -> Iterator[Raw]:
    client = Raw(module_namespace, env)
    yield client
    code, said = client.end()
    assert code == 0
    assert b"Traceback" not in said
    assert b"tool.failed" not in said
    assert b"mcp.failed" not in said


def call(name: object, given: object, request_id: object = 5) -> bytes:
    params = {"name": name, "arguments": given}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}).encode()


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("line", "code", "request_id"),
    [
        (b"hello", types.PARSE_ERROR, None),
        (b"\xff\xfe", types.PARSE_ERROR, None),
        (DEEP, types.PARSE_ERROR, None),
        (b'{"jsonrpc":"2.0","id":5,"method":"tools/call","params":' + DEEP, types.PARSE_ERROR, None),
        (b'{"id":' + b"9" * 5000 + b"}", types.PARSE_ERROR, None),
        (b"null", types.INVALID_REQUEST, None),
        (b"7", types.INVALID_REQUEST, None),
        (b"[]", types.INVALID_REQUEST, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', types.INVALID_REQUEST, None),
        (b"{}", types.INVALID_REQUEST, None),
        (b'{"jsonrpc":"2.0","id":null,"method":null}', types.INVALID_REQUEST, None),
        (b'{"jsonrpc":"1.0","id":5,"method":"ping"}', types.INVALID_REQUEST, 5),
        (b'{"jsonrpc":"2.0","id":"a","method":["ping"]}', types.INVALID_REQUEST, "a"),
        (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', types.INVALID_REQUEST, None),
        (b'{"jsonrpc":"2.0","id":5,"method":"\\ud800"}', types.METHOD_NOT_FOUND, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"ping","params":7}', types.INVALID_REQUEST, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"no/such"}', types.METHOD_NOT_FOUND, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"tools/call"}', types.INVALID_PARAMS, 5),
        (call(None, {}), types.INVALID_PARAMS, 5),
        (b'{"jsonrpc":"2.0","id":5,"method":"resources/read","params":{"uri":{}}}', types.INVALID_PARAMS, 5),
    ],
)
def test_no_message_gets_an_error(raw: Raw, line: bytes, code: int, request_id: object) -> None:
    raw.send(line)
    (found,) = raw.answers()
    assert (found["error"]["code"], found["id"]) == (code, request_id)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("read_file", [1], "it is not a JSON object"),
        ("read_file", 7, "it is not a JSON object"),
        ("read_file", "{", "it is not valid JSON"),
        ("nothing", [1], "There is no tool"),
        ("n" * 10_000_000, {}, "There is no tool"),
        ("\ud800", {}, "There is no tool"),
        ("read_file", {"path": "/" + "p" * 10_000_000}, "maxLength"),
        ("read_file", {"path": "/a\0b"}, "NUL"),
        ("read_file", {"path": "/\ud800"}, "half of a surrogate pair"),
        ("read_file", {"path": None, "offset": {}, "extra": [[]]}, "Invalid input"),
        ("write_file", {"path": "/big", "content": "c" * 20_000_000}, "16777216"),
        ("write_file", {"path": "/odd", "content": "\ud83d"}, "half of a surrogate pair"),
        ("ls", json.loads("[" * 150 + "]" * 150), "it is not a JSON object"),
    ],
)
def test_arguments_of_every_kind_are_answered_for_the_model(raw: Raw, name: str, given: object, said: str) -> None:
    raw.send(call(name, given))
    found = raw.await_answer(5)
    assert found["result"]["isError"]
    assert said in found["result"]["content"][0]["text"]
    assert len(json.dumps(found)) < 10_000
    assert raw.answers() == []


def test_arguments_as_text_are_taken_for_json(raw: Raw) -> None:
    raw.send(call("ls", '{"path": "/"}'))
    assert "/memories/" in raw.await_answer(5)["result"]["content"][0]["text"]


def test_an_overlong_line_is_refused_and_skipped(raw: Raw) -> None:
    raw.send(b'{"x":"' + b"y" * (MAX_LINE_BYTES + 100_000) + b'"}')
    assert [one["error"]["code"] for one in raw.answers()] == [types.PARSE_ERROR]


def test_each_of_several_overlong_lines_is_answered(raw: Raw) -> None:
    for _ in range(2):
        raw.send(b"y" * (MAX_LINE_BYTES + 100_000))
    assert [one["error"]["code"] for one in raw.answers()] == [types.PARSE_ERROR] * 2


odd_text = st.text(max_size=20) | st.sampled_from(["\0", "\ud800", "/", "..", "tools/call", "read_file", "2.0", "/a"])
odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=8,
)
methods = st.sampled_from(
    (
        *("initialize", "ping", "tools/list", "tools/call", "logging/setLevel", "x"),
        *("resources/list", "resources/read", "resources/templates/list"),
        *("notifications/cancelled", "notifications/progress", "notifications/initialized"),
    )
)
names = st.sampled_from(["read_file", "ls", "glob", "grep", "list_versions", "read_version", "list_deleted"])
arguments_of_tools = st.dictionaries(
    st.sampled_from(["path", "pattern", "offset", "limit", "column", "version", "lineage", "include", "literal"]), odd
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | odd,
        "id": st.integers(0, 9) | odd,
        "method": methods | odd,
        "params": st.fixed_dictionaries(
            {},
            optional={
                "name": names | odd,
                "arguments": arguments_of_tools | odd,
                "uri": st.sampled_from(["fusefs:///", "fusefs:///memories"]) | odd,
                "cursor": odd,
                "requestId": st.integers(0, 9) | odd,
                "_meta": st.fixed_dictionaries({}, optional={"progressToken": odd, "a": odd}) | odd,
            },
        )
        | odd,
        "result": odd,
        "error": odd,
        "extra": odd,
    },
)
lines = (
    messages.map(lambda one: json.dumps(one).encode())
    | messages.map(lambda one: json.dumps(one).encode()[:-3])
    | st.binary(max_size=80)
    | odd.map(lambda one: json.dumps(one).encode())
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(batch=st.lists(lines, min_size=1, max_size=8))
def test_any_lines_leave_the_server_answering(raw: Raw, batch: list[bytes]) -> None:
    for line in batch:
        raw.send(line.replace(b"\n", b" "))
    raw.answers()


def test_a_client_that_closes_stdin_is_still_answered(module_namespace: harness.Namespace, env: dict[str, str]) -> None:
    client = Raw(module_namespace, env)
    client.send(call("ls", {}))
    client.close_stdin()
    assert "/memories/" in client.await_answer(5)["result"]["content"][0]["text"]
    assert client.end() == (0, b"")


def test_sigterm_ends_it_though_stdin_is_open(module_namespace: harness.Namespace, env: dict[str, str]) -> None:
    client = Raw(module_namespace, env)
    client.process.send_signal(signal.SIGTERM)
    assert client.process.wait(timeout=30) == 0
    assert client.end() == (0, b"")


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--agent", "nobody"], 3, "nobody"),
        (["--session", "../x"], 10, "'../x' is no session id"),
        (["--http", "0.0.0.0:0"], 2, "there is no token"),
        (["--http", "127.0.0.1:0", "--token-file", "/does/not/exist"], 2, "the token cannot be read"),
        (["--http", "no address"], 2, "not an address"),
    ],
)
def test_it_fails_closed(
    module_namespace: harness.Namespace, env: dict[str, str], more: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [harness.FUSEFS, *arguments(module_namespace, *more)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in done.stderr.decode()
