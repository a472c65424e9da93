"""`fusefs mcp --http`: the official client, and who may ask."""

from __future__ import annotations

import gc
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import mcp_types as types
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests import harness
from tests.doors.mcp_door import arguments, cancel_a_query, locked, text_of


@pytest.fixture(scope="module")
def env(suite_dir: Path, module_namespace: harness.Namespace) -> dict[str, str]:
    return harness.command_environment(suite_dir, module_namespace.dsn)


TOKEN = "a-token-of-some-length"


class Http:
    """The command serving HTTP on a free port of the loopback."""

    def __init__(self, namespace: harness.Namespace, env: dict[str, str], *more: str) -> None:
        self.process = subprocess.Popen(
            [harness.FUSEFS, *arguments(namespace, "--http", "127.0.0.1:0", *more)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
        )
        assert self.process.stderr is not None
        self._stderr = self.process.stderr
        said = self._stderr.readline().decode()
        assert said.startswith("serving MCP at http://127.0.0.1:"), said
        self.url = said.split()[-1]

    def post(self, **headers: str) -> int:
        """The status of an initialize that carries these headers."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        info = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        return httpx2.post(
            self.url,
            json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": info},
            headers={"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {TOKEN}", **given},
        ).status_code

    def end(self) -> tuple[int, bytes]:
        """Stop it as a supervisor does; exit code, and what it said meanwhile."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        said = self._stderr.read()
        self._stderr.close()
        return code, said


@pytest.fixture(scope="module")
def http(module_namespace: harness.Namespace, env: dict[str, str]) -> Iterator[Http]:
    server = Http(module_namespace, env | {"HANGO_FS_MCP_TOKEN": TOKEN}, "--http-name", "files.example.org")
    yield server
    code, said = server.end()
    assert code == 0
    assert b"Traceback" not in said


# The official client leaves generators of its HTTP library to the garbage collector.
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_the_official_client_works_over_http(http: Http, module_namespace: harness.Namespace) -> None:
    told: list[float] = []
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as web,
        Client(streamable_http_client(http.url, http_client=web)) as client,
    ):
        await client.call_tool("write_file", {"path": "/over http", "content": "é\n"})
        assert "     1\té\n" in text_of(await client.call_tool("read_file", {"path": "/over http"}))
        (contents,) = (await client.read_resource("fusefs:///over%20http")).contents
        assert isinstance(contents, types.TextResourceContents)
        assert contents.text == "é\n"
        with locked(module_namespace) as lock:

            async def note(progress: float, total: float | None, message: str | None) -> None:
                told.append(progress)
                lock.rollback()

            await client.call_tool("grep", {"pattern": "é"}, progress_callback=note)
        await cancel_a_query(client, module_namespace)
    assert told == [1.0]
    gc.collect()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "files.example.org"}, 200),
        ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
        ({"Host": "evil.example.org"}, 421),
        ({"Host": "127.0.0.1.evil.example.org"}, 421),
        ({"Origin": "http://evil.example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong-token-of-some-length"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": TOKEN}, 401),
    ],
)
def test_who_may_ask_over_http(http: Http, headers: dict[str, str], status: int) -> None:
    assert http.post(**headers) == status


def test_a_token_comes_from_a_file(module_namespace: harness.Namespace, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    server = Http(module_namespace, env, "--token-file", str(tmp_path / "token"))
    try:
        assert (server.post(), server.post(Authorization="Bearer no")) == (200, 401)
        assert TOKEN not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
    finally:
        assert server.end() == (0, b"")
