"""The loop with the real file tools and a real Postgres: what is in the requests that the model's server saw."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusefs.db.pool import Database, open_database
from fusefs.harness.files import file_stack
from fusefs.harness.loop import Loop, Stop
from fusefs.harness.model import ModelSettings, open_model
from fusefs.harness.stack import Stack
from fusefs.rules import paths
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend, Unseen
from fusefs.services.tooling import Tool, ToolCall, ToolResult
from tests.harness import Namespace, make_namespace
from tests.loop.conftest import Script
from tests.loop.modelserver import BOUND_S, Body, call, reply, text
from tests.loop.support import tool

PAYLOAD = "".join(f"{number:06} payload of the tool\n" for number in range(3704))[:100_000]
STORED = re.compile(rf"{paths.LARGE_RESULTS}/[\w./-]+\w")

Said = list[tuple[ToolCall, ToolResult]]


@pytest.fixture
def agent(module_pg: str) -> Namespace:
    """An agent of the test's own."""
    return make_namespace(module_pg)


def scope_of(agent: Namespace, session: str = "s1", principal: Principal = Principal.AGENT) -> Scope:
    return Scope(agent.tenant_id, agent.agent_id, session, principal)


@asynccontextmanager
async def database(agent: Namespace) -> AsyncIterator[Database]:
    async with open_database(agent.dsn, origin="test", size=4) as db:
        yield db


@asynccontextmanager
async def loop_on(stack: Stack, said: Said | None = None) -> AsyncIterator[Loop]:
    """A loop over a stack; `said` collects what the person who watches gets."""

    def watch(given: ToolCall, result: ToolResult) -> None:
        if said is not None:
            said.append((given, result))

    async with open_model(ModelSettings("scripted")) as model:
        with trio.fail_after(BOUND_S):
            yield Loop(model, stack, watch=watch)


def big() -> Tool:
    return tool("big", lambda _: ToolResult(PAYLOAD))


def read(path: str, id: str = "toolu_read") -> bytes:
    return reply(call("read_file", {"path": path}, id=id))


def write(path: str, content: str, id: str = "toolu_write") -> bytes:
    return reply(call("write_file", {"path": path, "content": content}, id=id))


def content_of(agent: Namespace, path: str) -> str:
    rows = agent.execute("SELECT content FROM agent_files WHERE agent_id = %s AND path = %s", (agent.agent_id, path))
    return str(rows[0][0])


# -- HF-21 ---------------------------------------------------------------------------------------------


async def test_the_next_request_holds_the_preview(scripted: Script, agent: Namespace) -> None:
    def read_what_was_stored(request: Body) -> bytes:
        preview = request["messages"][-1]["content"][0]["content"]
        found = STORED.search(preview)
        assert found, preview
        return reply(call("read_file", {"path": found[0], "offset": 1780, "limit": 3}, id="toolu_read"))

    said: Said = []
    server = scripted(reply(call("big", id="toolu_big")), read_what_was_stored, reply(text("Read.")))
    async with database(agent) as db, loop_on(file_stack(db, scope_of(agent), tools=[big()]), said) as loop:
        answer = await loop.run("go")
    assert (answer.stop, answer.text) == (Stop.DONE, "Read.")

    # What went over the wire after the tool gave 100,000 characters.
    second, third = server.bodies[1], server.bodies[2]
    assert len(PAYLOAD) == 100_000
    assert PAYLOAD[50_000:50_050].strip().encode() not in second
    assert len(second) < len(server.bodies[0]) + 2000
    (preview,) = server.results(1)
    assert len(preview["content"]) < 1000
    assert preview.get("is_error", False) is False
    assert all(f"{number:06} payload" in preview["content"] for number in (0, 4, 3699, 3703))
    assert "read_file" in preview["content"]

    # The model read the middle of it back, as lines with their numbers.
    assert b"001779 payload of the tool" in third
    assert b"001781 payload of the tool" in third
    assert b"001782 payload of the tool" not in third
    assert "  1780\t001779 payload" in server.results(2)[0]["content"]

    # Whoever watches still has the whole, and so has the table.
    (first_call, first_result), _ = said
    assert first_call.id == "toolu_big"
    assert first_result.for_user == PAYLOAD
    stored = STORED.search(first_result.for_llm)
    assert stored
    assert stored[0].startswith(f"{paths.LARGE_RESULTS}/s1/")
    assert content_of(agent, stored[0]) == PAYLOAD


async def test_what_is_read_of_a_stored_result_is_not_stored_again(scripted: Script, agent: Namespace) -> None:
    """A limit so low that every answer of read_file is over it."""

    def read_all(request: Body) -> bytes:
        found = STORED.search(request["messages"][-1]["content"][0]["content"])
        assert found
        return reply(call("read_file", {"path": found[0], "limit": 100}, id="toolu_read"))

    server = scripted(reply(call("big", id="toolu_big")), read_all, reply(text("Read.")))
    stack_of = {"limit_tokens": 100, "tools": [big()]}
    async with database(agent) as db, loop_on(file_stack(db, scope_of(agent), **stack_of)) as loop:  # type: ignore[arg-type]
        await loop.run("go")
    assert "000099 payload" in server.results(2)[0]["content"]
    (count,) = agent.execute(
        "SELECT count(*) FROM agent_files WHERE agent_id = %s AND kind = 'file' AND path LIKE '/large_tool_results/%%'",
        (agent.agent_id,),
    )
    assert count == (1,)


# -- Several contexts on the same files (HF-09) --------------------------------------------------------


async def test_two_sessions_and_a_conflict(scripted: Script, agent: Namespace) -> None:
    async with database(agent) as db:
        await Backend(db, scope_of(agent)).write("/notes.md", "one\n", Unseen.ABSENT)
        stacks = [file_stack(db, scope_of(agent, session)) for session in ("s1", "s2")]

        scripted(read("/notes.md"), reply(text("Seen.")))
        async with loop_on(stacks[0]) as first:
            await first.run("read")

        scripted(read("/notes.md"), write("/notes.md", "two\n"), reply(text("Changed.")))
        async with loop_on(stacks[1]) as second:
            await second.run("change it")

        server = scripted(
            write("/notes.md", "mine\n"), read("/notes.md"), write("/notes.md", "two and mine\n"), reply(text("Done."))
        )
        async with loop_on(stacks[0]) as again:
            await again.run("change it too")
    refused, seen, written = (server.results(number)[0] for number in (1, 2, 3))
    assert refused["is_error"] is True
    assert "changed since you read it; read it again and retry" in refused["content"]
    assert "version 1" in refused["content"]
    assert "version 2" in refused["content"]
    assert "two" in seen["content"]
    assert "is_error" not in written
    assert content_of(agent, "/notes.md") == "two and mine\n"


async def test_a_parent_and_a_child_that_expect_the_same_version(scripted: Script, agent: Namespace) -> None:
    """Both have read before either writes; exactly one write is taken, and the other is told why."""
    both_have_read = threading.Barrier(2, timeout=BOUND_S)

    def write_when_both_have_read(who: str) -> Callable[[Body], bytes]:
        def turn(request: Body) -> bytes:
            assert "plan" in request["messages"][-1]["content"][0]["content"]
            both_have_read.wait()
            return write("/plan.md", f"by the {who}\n")

        return turn

    async def run_one(who: str, db: Database, results: dict[str, Body]) -> None:
        server = scripted(read("/plan.md"), write_when_both_have_read(who), reply(text("Done.")))
        async with loop_on(file_stack(db, scope_of(agent))) as loop:
            started.release()
            await loop.run("go")
        results[who] = server.results(2)[0]

    results: dict[str, Body] = {}
    started = trio.Semaphore(0)
    async with database(agent) as db:
        await Backend(db, scope_of(agent)).write("/plan.md", "plan\n", Unseen.ABSENT)
        async with trio.open_nursery() as nursery:
            for who in ("parent", "child"):
                nursery.start_soon(run_one, who, db, results)
                # The address of the model is in the environment: one reads it before the other changes it.
                await started.acquire()
    (loser,) = (who for who, result in results.items() if result.get("is_error"))
    (winner,) = results.keys() - {loser}
    assert "changed since you read it; read it again and retry" in results[loser]["content"]
    assert "version 2" in results[winner]["content"]
    assert content_of(agent, "/plan.md") == f"by the {winner}\n"


async def test_a_second_edit_in_one_batch_is_refused(scripted: Script, agent: Namespace) -> None:
    """The first of the reply is the one that counts, and the next reply may edit again (HF-08)."""

    def edit(old: str, new: str, id: str) -> list[bytes]:
        return call("edit_file", {"path": "/a.md", "old_string": old, "new_string": new}, id=id)

    server = scripted(
        read("/a.md"),
        reply(edit("one", "1", "toolu_1"), edit("two", "2", "toolu_2")),
        reply(edit("two", "2", "toolu_3")),
        reply(text("Done.")),
    )
    async with database(agent) as db:
        await Backend(db, scope_of(agent)).write("/a.md", "one two\n", Unseen.ABSENT)
        async with loop_on(file_stack(db, scope_of(agent))) as loop:
            await loop.run("go")
    first, second = server.results(2)
    assert "is_error" not in first
    assert second["is_error"] is True
    assert "is_error" not in server.results(3)[0]
    assert content_of(agent, "/a.md") == "1 2\n"


async def test_reserved_places_are_refused_with_an_explanation(scripted: Script, agent: Namespace) -> None:
    server = scripted(write("/memories/x.md", "remember"), reply(text("Well.")))
    async with database(agent) as db, loop_on(file_stack(db, scope_of(agent))) as loop:
        await loop.run("go")
    (refused,) = server.results()
    assert refused["is_error"] is True
    assert "/memories is reserved" in refused["content"]
    assert "owner or admin" in refused["content"]


# -- The stack of an agent's files (HF-20) -------------------------------------------------------------


async def test_the_stack_of_an_agents_files(agent: Namespace) -> None:
    async with database(agent) as db:
        stack = file_stack(db, scope_of(agent), tools=[big()])
    assert [type(middleware).__name__ for middleware in stack.middlewares] == [
        "FilesystemMiddleware",
        "OffloadMiddleware",
    ]
    assert list(stack.tools) == ["ls", "read_file", "write_file", "edit_file", "glob", "grep", "big"]


async def test_the_prompt_names_only_roots_and_reserved_prefixes(agent: Namespace) -> None:
    async with database(agent) as db:
        stack = file_stack(db, scope_of(agent))
    (prompt,) = stack.prompt()
    assert set(re.findall(r"/[\w./-]*", prompt)) == {
        "/",
        *paths.RESERVED,
        f"{paths.LARGE_RESULTS}/s1",
        f"{paths.HISTORY}/s1.md",
    }
    # What may be done there is the tools' to say.
    assert not [name for name in stack.tools if name != "ls" and name in prompt]
    assert len(prompt) < 300
    assert "/memories" in stack.tools["write_file"].description


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_spans_of_files_lie_below_that_of_the_tool(
    scripted: Script, agent: Namespace, spans: InMemorySpanExporter
) -> None:
    looking = reply(call("big", id="toolu_big"), call("ls", {"path": "/"}, id="toolu_ls"))
    scripted(looking, write("/memories/x", "x"), reply(text("ok")))
    async with database(agent) as db, loop_on(file_stack(db, scope_of(agent), tools=[big()])) as loop:
        await loop.run("go")
    (of_big,), (of_ls,), (of_write,) = (named(spans, f"execute_tool {name}") for name in ("big", "ls", "write_file"))
    (event,) = of_big.events
    assert event.name == "tool.result_offloaded"
    attributes = dict(event.attributes or {})
    assert attributes["gen_ai.tool.name"] == "big"
    assert attributes["hango.tokens.before"] == 25_000
    assert int(str(attributes["hango.tokens.after"])) < 250
    assert str(attributes["hango.fs.path"]).startswith(f"{paths.LARGE_RESULTS}/s1/")
    assert dict(of_ls.attributes or {})["gen_ai.tool.name"] == "ls"
    below = {
        span.name for span in spans.get_finished_spans() if span.parent and span.parent.span_id == of_ls.context.span_id
    }
    assert below == {"fs.ls"}
    assert dict(of_write.attributes or {})["error.type"] == "Denied"
    assert "payload" not in "".join(span.to_json() for span in spans.get_finished_spans())
