"""`fusefs mcp-proxy`: what passes, what is stored, and how both ends come down together."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import TextContent

from fusefs.tools.streams import MAX_LINE_BYTES
from tests import harness

pytestmark = pytest.mark.kernel
FAKE = (sys.executable, "-S", Path(__file__).with_name("mcp_fake_server.py"))
LIMIT = 100
LONG = "line of a result\n" * 40
"""680 bytes, 170 tokens."""


class Conversation:
    """A client's side of one run of the proxy."""

    def __init__(
        self,
        env: dict[str, str],
        directory: Path | None,
        *options: str,
        command: Sequence[str | Path] = FAKE,
        cwd: Path | None = None,
    ) -> None:
        # A file, not a pipe: what a server leaves running holds it open.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `discard`)
        self.process = subprocess.Popen(
            [harness.FUSEFS, "mcp-proxy", *self._options(directory), *options, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=cwd,
            env=env,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._next_id = 0

    @staticmethod
    def _options(directory: Path | None) -> list[str]:
        where = [] if directory is None else ["--dir", str(directory)]
        return [*where, "--token-limit", str(LIMIT), "--stop-timeout", "0.5"]

    def send(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def line(self) -> bytes:
        return self._stdout.readline()

    def rest(self) -> bytes:
        return self._stdout.read()

    def close_stdout(self) -> None:
        self._stdout.close()

    def tell(self, method: str, **params: object) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode() + b"\n")

    def ask(self, method: str, **params: object) -> Any:
        self._next_id += 1
        request = {"jsonrpc": "2.0", "id": self._next_id, "method": method, "params": params}
        self.send(json.dumps(request).encode() + b"\n")
        answer = json.loads(self.line())
        assert answer["id"] == self._next_id
        return answer["result"]

    def call(self, **arguments: object) -> Any:
        return self.ask("tools/call", name="fetch", arguments=arguments)

    def end(self) -> tuple[int, bytes, bytes]:
        """Close stdin; exit code, what else came on stdout, and stderr."""
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out, self.errors()

    def errors(self) -> bytes:
        """What came on stderr. The proxy has the same open file, and so the same position in it."""
        return os.pread(self._errors.fileno(), 1024 * 1024, 0)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()
        self._errors.close()


@pytest.fixture(scope="module")
def directory(module_mount: harness.MountFactory) -> Path:
    return module_mount(session="s1").path


@pytest.fixture(scope="module")
def env(suite_dir: Path) -> dict[str, str]:
    return harness.command_environment(suite_dir)


@pytest.fixture(scope="module")
def shared(env: dict[str, str], directory: Path) -> Iterator[Conversation]:
    """One proxy for the cases that leave it running."""
    conversation = Conversation(env, directory)
    yield conversation
    try:
        assert conversation.end()[:2] == (0, b"bye\n")
        assert conversation.errors() in (b"", b"said aside\n")
    finally:
        conversation.discard()


@pytest.fixture
def start(env: dict[str, str], directory: Path) -> Iterator[Callable[..., Conversation]]:
    """Starts a proxy, as often as a case asks."""
    started: list[Conversation] = []

    def one(*options: str, command: Sequence[str | Path] = FAKE) -> Conversation:
        started.append(Conversation(env, directory, *options, command=command))
        return started[-1]

    yield one
    for conversation in started:
        conversation.discard()


@pytest.fixture
def own(start: Callable[..., Conversation]) -> Conversation:
    """A proxy for a case that ends it."""
    return start()


def stored(directory: Path, preview: str) -> bytes:
    """The file that a preview names."""
    path = next(line.removeprefix("Path: ") for line in preview.splitlines() if line.startswith("Path: "))
    assert path.startswith("/large_tool_results/s1/mcp-")
    return (directory / path.lstrip("/")).read_bytes()


def test_a_long_result_is_stored_and_previewed(shared: Conversation, directory: Path) -> None:
    result = shared.call(text=LONG, more={"isError": True, "_meta": {"a": 1}})
    (block,) = result["content"]
    assert stored(directory, block["text"]) == LONG.encode()
    assert len(block["text"]) < 1000
    assert (result["isError"], result["_meta"]) == (True, {"a": 1})


def test_a_result_at_the_limit_is_not_stored(shared: Conversation) -> None:
    assert shared.call(text="x" * LIMIT * 4)["content"] == [{"type": "text", "text": "x" * LIMIT * 4}]


def test_other_methods_results_are_not_stored(shared: Conversation) -> None:
    assert shared.ask("custom", arguments={"text": LONG})["content"] == [{"type": "text", "text": LONG}]


def test_structured_content_that_repeats_it_is_short_too(shared: Conversation, directory: Path) -> None:
    result = shared.call(text=LONG, more={"structuredContent": {"result": LONG * 3}})
    assert len(json.dumps(result)) < 3000
    assert [stored(directory, block["text"]) for block in result["content"]] == [
        LONG.encode(),
        json.dumps({"result": LONG * 3}).encode(),
    ]


def test_equal_ids_of_two_runs_do_not_meet(start: Callable[..., Conversation], directory: Path) -> None:
    first = start().call(text=LONG)["content"][0]["text"]
    second = start().call(text=LONG.upper())["content"][0]["text"]
    assert stored(directory, first) == LONG.encode()
    assert stored(directory, second) == LONG.upper().encode()


def test_a_repeated_id_overwrites_nothing(shared: Conversation, directory: Path) -> None:
    texts = []
    for text in (LONG, LONG.upper()):
        request = {"id": "twice", "method": "tools/call", "params": {"arguments": {"text": text}}}
        shared.send(json.dumps(request).encode() + b"\n")
        texts.append(json.loads(shared.line())["result"]["content"][0]["text"])
    assert [stored(directory, text) for text in texts] == [LONG.encode(), LONG.upper().encode()]


def test_nul_and_surrogates_are_kept(shared: Conversation, directory: Path) -> None:
    for odd in ("\0" * 200 + LONG, "\ud800" + LONG):
        block = shared.call(text=odd)["content"][0]["text"]
        assert stored(directory, block).endswith(LONG.encode())


def test_reading_a_stored_result_does_not_store_another(shared: Conversation) -> None:
    text = shared.call(text=LONG, path="/large_tool_results/s1/mcp-x")["content"][0]["text"]
    assert text.startswith(LONG[: LIMIT * 4 // 5])
    assert text.endswith(LONG[-LIMIT // 5 :])
    assert "read less at once" in text
    assert len(text) < LIMIT * 4


ODD_LINES = [
    b'{ "id":\t1.50e0,"method" : "x\\/y", "z":"\\u00e9\xc3\xa9" }\r\n',
    b"Server listening\n",
    b"\n",
    b"\xff\xfe\x00 \xed\xa0\x80\n" * 100,
    b'[{"id":1,"method":"tools/call"},1,null,[]]\n',
    b'{"method":"tools/call"}\n',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}\n',
    b'{"id":1,"method":"sampling/createMessage","params":{"content":[{"type":"text","text":"%s"}]}}\n' % (b"s" * 9999),
    b'{"id":3,"result":{"content":[{"type":"text","text":"%s"}]}}\n' % (b"not called " * 999),
    b'{"id":4,"error":{"code":-32603,"message":"%s"}}\n' % (b"e" * 9999),
    b"[" * 50_000 + b"\n",
    b'{"id":' + b"9" * 5000 + b',"method":"tools/call"}\n',
    b'{"a":"' + b"b" * 3_000_000 + b'"}\n',
    b"the last one has no newline",
]


def test_every_byte_arrives_as_it_was_both_ways(start: Callable[..., Conversation]) -> None:
    conversation = start(command=("cat",))
    sent = b"".join([*ODD_LINES[:-1], b"z" * (MAX_LINE_BYTES + 5_000_000) + b"\n", *ODD_LINES])
    received, _ = conversation.process.communicate(sent, timeout=60)
    assert hashlib.sha256(received).hexdigest() == hashlib.sha256(sent).hexdigest()
    assert (conversation.process.returncode, conversation.errors()) == (0, b"")


def test_a_flood_without_lines_is_passed_on_in_bounded_memory(own: Conversation) -> None:
    own.tell("overlong", chunks=100)
    assert len(own.line()) == 100 * 1024 * 1024 + 1
    status = Path(f"/proc/{own.process.pid}/status").read_text()
    peak_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
    assert peak_kib < 128 * 1024
    assert own.call(text="still here")["content"][0]["text"] == "still here"


def test_stderr_passes(shared: Conversation) -> None:
    shared.tell("stderr")
    assert shared.ask("custom")["content"]
    assert shared.errors() == b"said aside\n"


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("exit", {"code": 3, "last": "half a line"}, (3, b"half a line")),
        ("exit", {"code": 0, "last": "l" * 200_000}, (0, b"l" * 200_000)),
        ("kill", {}, (128 + signal.SIGKILL, b"")),
        ("leave a child", {}, (0, b"")),
        ("close stdout", {}, (1, b"")),
    ],
)
def test_the_servers_end_is_ours(
    own: Conversation, method: str, params: dict[str, object], expected: tuple[int, bytes]
) -> None:
    own.tell(method, **params)
    # Our stdin stays open: the server's end alone is enough.
    assert own.rest() == expected[1]
    assert own.process.wait(timeout=30) == expected[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_server_and_its_exit_code_comes_back(own: Conversation, number: int) -> None:
    assert own.call(text="ready")
    own.process.send_signal(number)
    assert own.process.wait(timeout=30) == (77 if number == signal.SIGTERM else 128 + number)


@pytest.mark.parametrize(
    ("ignored", "code"), [([], 77), ([int(signal.SIGTERM)], 128 + signal.SIGKILL)], ids=["term", "kill"]
)
def test_a_server_that_ignores_its_end_is_ended(own: Conversation, ignored: list[int], code: int) -> None:
    pid = own.ask("stubborn", ignore=ignored)
    own.tell("stubborn", **{"ignore": ignored, "for ever": True})
    assert own.end()[0] == code
    assert not Path(f"/proc/{pid}").exists()


def test_a_client_that_reads_no_more_ends_the_server(own: Conversation) -> None:
    pid = own.ask("stubborn", ignore=[])
    own.close_stdout()
    own.send(b'{"id":1,"method":"custom"}\n')
    assert own.process.wait(timeout=30) == 0
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("command", "code"), [("/does/not/exist", 127), ("/etc/passwd", 126)])
def test_a_server_that_does_not_start(start: Callable[..., Conversation], command: str, code: int) -> None:
    ended, out, err = start(command=(command,)).end()
    assert (ended, out) == (code, b"")
    assert err.decode().startswith(f"fusefs: {command}: ")
    assert err.count(b"\n") == 1


def test_in_a_mount_the_shell_finds_what_was_stored(env: dict[str, str], directory: Path) -> None:
    conversation = Conversation(env, None, cwd=directory)
    try:
        preview = conversation.call(text=LONG)["content"][0]["text"]
        assert conversation.end()[0] == 0
    finally:
        conversation.discard()
    shell = next(line for line in preview.splitlines() if line.startswith("Shell: "))
    file = shell.removeprefix("Shell: ").split(";")[0]
    done = subprocess.run(["bash", "-c", f'{file}; cat "$F"'], capture_output=True, check=True)
    assert done.stdout == LONG.encode()


# Into the database


def through_database(namespace: harness.Namespace, *more: str) -> tuple[str, ...]:
    return ("--tenant", namespace.tenant, "--agent", namespace.agent, *more)


def test_results_go_into_the_database_of_a_named_agent(suite_dir: Path, module_namespace: harness.Namespace) -> None:
    env = harness.command_environment(suite_dir, module_namespace.dsn)
    conversation = Conversation(env, None, *through_database(module_namespace, "--session", "s1"))
    try:
        preview = conversation.call(text=LONG)["content"][0]["text"]
        assert conversation.end()[0] == 0
    finally:
        conversation.discard()
    path = next(line.removeprefix("Path: ") for line in preview.splitlines() if line.startswith("Path: "))
    rows = module_namespace.execute("select content, updated_by from agent_files where path = %s", (path,))
    assert rows == [(LONG, "system")]


def test_the_server_does_not_get_the_way_to_the_database(suite_dir: Path, module_namespace: harness.Namespace) -> None:
    env = harness.command_environment(suite_dir, module_namespace.dsn) | {"HANGO_FS_MCP_TOKEN": "t", "PGHOST": "its"}
    conversation = Conversation(env, None, *through_database(module_namespace, "--session", "s1"))
    try:
        found = conversation.ask("environment")
    finally:
        conversation.discard()
    assert found == ["HANGO_FS_DATA_DIR", "HANGO_FS_MAX_FILE_BYTES", "PGHOST"]


def test_without_the_database_results_are_cut(suite_dir: Path, module_namespace: harness.Namespace) -> None:
    env = harness.command_environment(suite_dir, "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=2")
    conversation = Conversation(env, None, *through_database(module_namespace, "--session", "s1"))
    try:
        text = conversation.call(text=LONG)["content"][0]["text"]
        code, _, said = conversation.end()
    finally:
        conversation.discard()
    assert "it could not be stored" in text
    assert text.endswith(LONG[-20:])
    assert len(text) < len(LONG)
    assert code == 0
    assert b"results are cut until it can be reached" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--session", "s1", "--agent", "nobody"], 3, "nobody"),
        ([], 10, "no session was named"),
        (["--session", "../s"], 10, "no session was named"),
        (["--dir", "/"], 3, "no mounted namespace"),
    ],
)
def test_the_scope_fails_closed(
    suite_dir: Path, module_namespace: harness.Namespace, options: list[str], code: int, said: str
) -> None:
    env = harness.command_environment(suite_dir, module_namespace.dsn)
    conversation = Conversation(env, None, *through_database(module_namespace, *options))
    try:
        # Our stdin stays open: nobody waits for the client.
        assert conversation.rest() == b""
        assert conversation.process.wait(timeout=30) == code
        assert said in conversation.errors().decode()
    finally:
        conversation.discard()


# With the official package at both ends

OFFICIAL_SERVER = """
import sys, anyio
from mcp.server import MCPServer

server = MCPServer("official")

@server.tool()
def page(times: int) -> str:
    return "a line of text\\n" * times

@server.tool()
def rows(count: int) -> list[dict[str, int]]:
    return [{"id": number} for number in range(count)]

anyio.run(server.run_stdio_async, backend="trio")
"""


async def test_the_official_client_takes_what_is_left(env: dict[str, str], directory: Path) -> None:
    """It checks structured content against the schema that the official server made of the functions."""
    options = ["mcp-proxy", "--dir", str(directory), "--token-limit", str(LIMIT), "--"]
    parameters = StdioServerParameters(
        command=str(harness.FUSEFS), args=[*options, sys.executable, "-c", OFFICIAL_SERVER], env=env
    )
    async with Client(stdio_client(parameters)) as client:
        assert all(tool.output_schema for tool in (await client.list_tools()).tools)
        short = await client.call_tool("page", {"times": 2})
        assert short.structured_content == {"result": "a line of text\n" * 2}
        page = await client.call_tool("page", {"times": 1000})
        rows = await client.call_tool("rows", {"count": 1000})
    (block,) = page.content
    assert isinstance(block, TextContent)
    assert stored(directory, block.text) == b"a line of text\n" * 1000
    assert len(str(page.structured_content)) < 4 * LIMIT
    assert [row["id"] for row in rows.structured_content["result"]] == [0, 1, 2, 3, 4, 995, 996, 997, 998, 999]
    first, *others = rows.content
    assert isinstance(first, TextContent)
    assert stored(directory, first.text).startswith(b'{\n  "id": 0')
    assert len(others) == 1
