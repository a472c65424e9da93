#!/usr/bin/env python3
"""What the file tools cost beside the bare SQL that they need.

    benchmarks/tools.py [--rounds N]

On an embedded Postgres in a temporary directory, in one process: each tool and, in turn with it, the prepared
statement that fetches or updates the same row, or finds the same rows, through psycopg in the daemon's role. Prints the
medians of N rounds (200 if nothing else is said; of searches 40), their ratio, and the goal.

- read_file: 2000 lines of 30 characters, numbered; beside it the row's content as text.
- edit_file: one line of the same file; beside it the update of the row with its triggers. Both commit.
- grep: 10,000 files of 2 KB for a text that is in three of them.

Run it with the interpreter that has fusefs: .venv/bin/python benchmarks/tools.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg
import trio

from fusefs.db import embedded, migrate
from fusefs.db.pool import open_database
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.services.tooling import ToolCall
from fusefs.services.toolset import Toolset

LINES = [f"line {number:6d} of an agent's file" for number in range(1, 2001)]
FILES = 10_000
NEEDLE = "the rare needle"

FETCH = "select content, version from agent_files where tenant_id = %s and agent_id = %s and path = %s"
UPDATE = (
    "update agent_files set content = %s, write_id = %s, write_op = 'write', updated_at = clock_timestamp()"
    " where tenant_id = %s and id = %s and version = %s returning version"
)
SEARCH = (
    "select path from agent_files where tenant_id = %s and agent_id = %s and kind = 'file'"
    " and strpos(content, %s) > 0 order by path"
)


async def in_turn(
    name: str, goal: float, rounds: int, tool: Callable[[], Awaitable[None]], bare: Callable[[], object]
) -> None:
    """Print the medians of both and their ratio."""
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        # Each comes first as often: who comes second finds the server's pages in the processor's cache.
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            if which == 0:
                await tool()
            else:
                bare()
            took[which].append(time.perf_counter() - start)
    ours, sql = (statistics.median(each) * 1000 for each in took)
    print(f"{name}: {ours:.2f} ms, bare SQL {sql:.2f} ms, ratio: {ours / sql:.2f} ({goal})")


async def measure(dsn: str, rounds: int) -> None:
    tenant, agent = str(uuid.uuid4()), str(uuid.uuid4())
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into tenants (id) values (%s)", (tenant,))
        conn.execute("insert into agents (id, tenant_id) values (%s, %s)", (agent, tenant))
        conn.execute("select set_config('fusefs.tenant', %s, false)", (tenant,))
        conn.execute("set role fusefs_daemon")
        conn.prepare_threshold = 0
        async with open_database(dsn, origin="benchmark", size=2) as db:
            tools = Toolset(Backend(db, Scope(tenant, agent, "s-1", Principal.AGENT)))

            async def call(name: str, **arguments: object) -> str:
                result = await tools.call(ToolCall("1", name, arguments))
                tools.end_batch()
                if result.is_error:
                    raise SystemExit(result.for_llm)
                return result.for_llm

            await call("write_file", path="/notes/long.txt", content="\n".join(LINES) + "\n")
            await reading(call, conn, tenant, agent, rounds)
            await editing(call, conn, tenant, agent, rounds)
            fill(conn, tenant, agent)
            await searching(call, conn, tenant, agent)


async def reading(
    call: Callable[..., Awaitable[str]], conn: psycopg.Connection, tenant: str, agent: str, rounds: int
) -> None:
    async def tool() -> None:
        if (await call("read_file", path="/notes/long.txt")).count("\n") != 2000:
            raise SystemExit("read_file did not give 2000 lines and a note")

    def bare() -> None:
        conn.execute(FETCH, (tenant, agent, "/notes/long.txt")).fetchone()

    await in_turn("read_file of 2000 lines", 4, rounds, tool, bare)


async def editing(
    call: Callable[..., Awaitable[str]], conn: psycopg.Connection, tenant: str, agent: str, rounds: int
) -> None:
    await call("write_file", path="/notes/bare.txt", content="\n".join(LINES) + "\n")
    (row,) = conn.execute("select id, version from agent_files where path = '/notes/bare.txt'").fetchall()
    contents = [
        "\n".join([*LINES[:1000], text, *LINES[1001:]]) + "\n" for text in (LINES[1000], "the line is another now")
    ]
    done = edits = 0

    async def tool() -> None:
        nonlocal edits
        edits += 1
        texts = (LINES[1000], "the line is another now")
        old, new = texts if edits % 2 else texts[::-1]
        await call("edit_file", path="/notes/long.txt", old_string=old, new_string=new)

    def bare() -> None:
        nonlocal done
        done += 1
        update = (contents[done % 2], uuid.uuid4(), tenant, row[0], row[1] + done - 1)
        if conn.execute(UPDATE, update).fetchone() is None:
            raise SystemExit("the update met another version")

    await in_turn("edit_file", 4, rounds, tool, bare)


def fill(conn: psycopg.Connection, tenant: str, agent: str) -> None:
    """Files of 2 KB of words that compress as text does."""
    conn.execute(
        "insert into agent_files (tenant_id, agent_id, path, content)"
        " select %s, %s, '/many/' || i % 100 || '/f' || i,"
        " left((select string_agg(md5(i::text || j::text) || case j %% 2 when 0 then E'\\n' else ' a word ' end, '')"
        " from generate_series(1, 60) j), 2048 - 20) || case when i %% 4000 = 0 then %s else '' end || E'\\n'"
        " from generate_series(1, %s) i".replace("i % 100", "i %% 100"),
        (tenant, agent, NEEDLE, FILES + 1),
    )


async def searching(call: Callable[..., Awaitable[str]], conn: psycopg.Connection, tenant: str, agent: str) -> None:
    async def tool() -> None:
        if (await call("grep", pattern=NEEDLE)).count("/many/") != 2:
            raise SystemExit("grep did not find what is there")

    def bare() -> None:
        if len(conn.execute(SEARCH, (tenant, agent, NEEDLE)).fetchall()) != 2:
            raise SystemExit("the bare search did not find what is there")

    await in_turn("grep of 10,000 files", 1.5, 40, tool, bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusefs-tools-") as name:
        Path(name).chmod(0o755)
        dsn = embedded.ensure_running(Path(name) / "data")
        try:
            migrate.up(dsn)
            trio.run(measure, dsn, args.rounds)
        finally:
            embedded.stop(Path(name) / "data")


if __name__ == "__main__":
    main()
