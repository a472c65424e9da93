#!/usr/bin/env python3
"""What `fusefs mcp-proxy` adds to a tool call, beside what the official package's own round trip costs.

    benchmarks/mcp_proxy.py [--calls N] [--rounds N]

The official client (on trio, in this process) and the official server (on trio, over stdio), directly and with the
proxy between them, in turns. A short result passes unread, one of 60 KB as well, one of 200 KB is stored in an embedded
Postgres. Prints the median of a call, and what comes on top; then after how long a started server has answered its
handshake.
With the interpreter that has fusefs: .venv/bin/python benchmarks/mcp_proxy.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import trio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

FUSEFS = Path(sys.executable).with_name("fusefs")
SIZES = {"100 B": 100, "60 KB": 60_000, "200 KB": 200_000}
GOAL = 0.5
SERVER = """
import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

async def list_tools(ctx, params):
    return types.ListToolsResult(tools=[types.Tool(name="any", input_schema={"type": "object"})])

async def call(ctx, params):
    line = "one line of a result that a tool gave\\n"
    text = (line * (params.arguments["size"] // len(line) + 1))[: params.arguments["size"]]
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

async def main():
    server = Server("bare", on_list_tools=list_tools, on_call_tool=call)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())

anyio.run(main, backend="trio")
"""


@asynccontextmanager
async def connected(command: list[str]) -> AsyncIterator[tuple[Client, float]]:
    """A client of a started server, and the seconds until it was ready."""
    start = time.perf_counter()
    parameters = StdioServerParameters(command=command[0], args=command[1:])
    async with Client(stdio_client(parameters)) as client:
        yield client, time.perf_counter() - start


async def compare(dsn: str, calls: int, rounds: int) -> None:
    server = [sys.executable, "-c", SERVER]
    where = ["--dsn", dsn, "--tenant", "b", "--agent", "b", "--session", "s1"]
    commands = {"direct": server, "proxy": [str(FUSEFS), "mcp-proxy", *where, "--", *server]}
    ready: dict[str, list[float]] = {name: [] for name in commands}
    taken: dict[tuple[str, str], list[float]] = {(name, size): [] for name in commands for size in SIZES}
    for _ in range(rounds):
        async with AsyncExitStack() as stack:
            clients = {}
            for name, command in commands.items():
                clients[name], started = await stack.enter_async_context(connected(command))
                ready[name].append(started)
            # Call by call in turns: what else the machine does meets both alike.
            for size, number in SIZES.items():
                for _ in range(calls):
                    for name, client in clients.items():
                        begin = time.perf_counter()
                        await client.call_tool("any", {"size": number})
                        taken[name, size].append(time.perf_counter() - begin)
    for size in SIZES:
        direct, proxy = (statistics.median(taken[name, size]) * 1e6 for name in commands)
        goal = f" (goal: below {GOAL})" if size != "200 KB" else " (read and stored)"
        print(f"a call of {size}: direct {direct:.0f} us, with the proxy {proxy:.0f} us")
        print(f"the proxy adds, {size}: {proxy / direct - 1:.2f}{goal}")
    direct, proxy = (statistics.median(ready[name]) * 1000 for name in commands)
    print(f"ready: direct {direct:.0f} ms, with the proxy {proxy:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    from fusefs.db import embedded

    with tempfile.TemporaryDirectory(prefix="fusefs-proxy-") as name:
        top = Path(name)
        top.chmod(0o755)
        dsn = embedded.ensure_running(top / "data")
        try:
            for words in (("init",), ("tenant", "add", "b"), ("agent", "add", "b", "--tenant", "b")):
                subprocess.run([FUSEFS, *words, "--dsn", dsn], check=True, stdout=subprocess.DEVNULL)
            trio.run(compare, dsn, args.calls, args.rounds)
        finally:
            embedded.stop(top / "data")


if __name__ == "__main__":
    main()
