"""The loop against a model that follows a script: what goes over the wire, bounds, and the calls of one reply.

The tools are stand-ins; with the real ones it is test_files.py."""

from __future__ import annotations

import pytest
import trio

from fusefs.harness.loop import LoopSettings, Stop
from fusefs.harness.replies import Assembly
from fusefs.harness.stack import Middleware, Slot
from fusefs.services.tooling import ToolCall, ToolResult
from tests.loop.conftest import Script
from tests.loop.modelserver import begin, call, event, reply, text
from tests.loop.support import KEY, assert_paired, echo, loop_of, results_of, run, tool

# -- What goes over the wire ---------------------------------------------------------------------------


async def test_a_conversation(scripted: Script) -> None:
    server = scripted(
        reply(text("Let me see. 数"), call("echo", {"word": "été"}), stop_reason="tool_use"), reply(text("Done."))
    )
    async with loop_of(tool("echo", echo), system="Be brief.") as loop:
        answer = await loop.run("Say it.")
    assert answer.text == "Done."
    assert answer.stop is Stop.DONE
    first, second = server.requests
    assert first == {
        "model": "scripted",
        "max_tokens": 1000,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "Say it."}],
        "tools": [{"name": "echo", "description": "Does echo.", "input_schema": tool("echo", echo).input_schema}],
    }
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see. 数"},
                {"type": "tool_use", "id": "toolu_1", "name": "echo", "input": {"word": "été"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": 'echo: {"word": "\\u00e9t\\u00e9"}'}
            ],
        },
    ]
    assert server.headers[0]["x-api-key"] == KEY
    assert server.headers[0]["anthropic-version"] == "2023-06-01"


async def test_the_transcript_goes_on(scripted: Script) -> None:
    server = scripted(reply(text("One.")), reply(text("Two.")), reply(text("Three.")))
    async with loop_of() as loop:
        await loop.run("first")
        # Two at once queue: neither is sent in the middle of the other.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run, "second")
            nursery.start_soon(loop.run, "second")
    assert [message["role"] for message in server.requests[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    said = [message["content"] for message in server.requests[2]["messages"] if message["role"] == "user"]
    assert said == ["first", "second", "second"]
    assert "tools" not in server.requests[0]
    assert "system" not in server.requests[0]


async def test_a_lone_surrogate_does_not_reach_the_wire(scripted: Script) -> None:
    server = scripted(reply(call("odd", {"word": "x"})), reply(text("ok")))
    await run(tool("odd", lambda _: ToolResult("a\ud800b")))
    assert server.results()[0]["content"] == "a?b"


async def test_thinking_is_sent_back_as_it_came(scripted: Script) -> None:
    thinking = [
        event("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
        event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Well"}),
        event("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "c2ln"}),
        event("content_block_stop", index=0),
    ]
    server = scripted(reply(thinking, call("echo", {"word": "x"})), reply(text("ok")))
    await run(tool("echo", echo))
    assert server.requests[1]["messages"][1]["content"][0] == {
        "type": "thinking",
        "thinking": "Well",
        "signature": "c2ln",
    }


def test_the_order_in_which_events_mean_something() -> None:
    """Whatever comes is taken or passed over."""
    assembly = Assembly()
    for odd in (
        None,
        [],
        {},
        {"type": "tomorrow"},
        {"type": "content_block_delta", "index": 9, "delta": {"type": "text_delta", "text": "nowhere"}},
        {"type": "content_block_start", "index": "0", "content_block": {"type": "text"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {"type": "content_block_delta", "index": 0, "delta": None},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "tomorrow_delta"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "here"}},
        {"type": "message_delta", "delta": {"stop_reason": None}},
    ):
        assembly.feed(odd)
    assert (assembly.reply().text, assembly.reply().complete, assembly.reply().calls) == ("here", False, ())


# -- Bounds --------------------------------------------------------------------------------------------


async def test_the_bound_on_turns(scripted: Script) -> None:
    server = scripted(*[reply(text(f"{turn}"), call("echo", {"word": "x"})) for turn in range(4)])
    answer, loop = await run(tool("echo", echo), settings=LoopSettings(max_turns=3))
    assert (answer.stop, answer.text, len(server.bodies)) == (Stop.TURNS, "2", 3)
    assert_paired(loop)


async def test_tokens_are_estimated_before_each_request(scripted: Script) -> None:
    server = scripted(reply(call("echo", {"word": "x"})), reply(text("ok")))
    seen = []

    def exact(request: object, injected: object = ()) -> int:
        seen.append((len(server.bodies), request))
        return 7

    async with loop_of(tool("echo", echo), estimator=exact) as loop:
        answer = await loop.run("go")
    assert answer.estimates == (7, 7)
    assert [(sent, request) for sent, request in seen] == [(0, server.requests[0]), (1, server.requests[1])]


async def test_a_request_over_the_bound_is_not_sent(scripted: Script) -> None:
    server = scripted(reply(call("big", {"word": "x"})))
    answer, loop = await run(
        tool("big", lambda _: ToolResult("x" * 40_000)), settings=LoopSettings(max_request_tokens=9000)
    )
    assert answer.stop is Stop.TOO_LARGE
    assert len(answer.estimates) == len(server.bodies) == 1
    assert_paired(loop)


# -- The calls of one reply ----------------------------------------------------------------------------


async def test_calls_run_at_once_and_results_keep_their_order(scripted: Script) -> None:
    """Each waits until all have begun; they end in the reverse order."""
    begun, ended = 0, 0
    moved = trio.Condition()

    async def meet(given: ToolCall) -> ToolResult:
        nonlocal begun, ended
        number = int(given.id)
        async with moved:
            begun += 1
            moved.notify_all()
            while begun < 3 or ended < 2 - number:
                await moved.wait()
            ended += 1
            moved.notify_all()
        return ToolResult(f"result {number}")

    server = scripted(reply(*(call("meet", id=str(number)) for number in range(3))), reply(text("ok")))
    await run(tool("meet", meet))
    assert [(result["tool_use_id"], result["content"]) for result in server.results()] == [
        (str(number), f"result {number}") for number in range(3)
    ]


async def test_what_changes_something_runs_alone_and_in_order(scripted: Script) -> None:
    running: list[str] = []
    order: list[str] = []

    async def work(given: ToolCall) -> ToolResult:
        assert given.name == "look" or not running
        assert "change" not in running
        running.append(given.name)
        order.append(given.id)
        await trio.lowlevel.checkpoint()
        running.remove(given.name)
        return ToolResult("ok")

    names = ["change", "look", "look", "change", "change", "look"]
    scripted(reply(*(call(name, id=f"{at}") for at, name in enumerate(names))), reply(text("ok")))
    _, loop = await run(tool("look", work), tool("change", work, read_only=False))
    assert all(not result.get("is_error") for result in results_of(loop))
    assert [at for at in order if names[int(at)] == "change"] == ["0", "3", "4"]
    assert order[0] == "0"
    assert set(order[1:3]) == {"1", "2"}
    assert order[3:] == ["3", "4", "5"]


async def test_a_cancelled_batch_leaves_no_call_without_its_result(scripted: Script) -> None:
    server = scripted(reply(call("quick", id="1"), call("slow", id="2"), call("never", id="3")), reply(text("back")))
    watched = []
    slow_runs = trio.Event()

    async def slow(_given: ToolCall) -> ToolResult:
        slow_runs.set()
        await trio.sleep_forever()
        raise AssertionError

    tools = (
        tool("quick", lambda _: ToolResult("quick")),
        tool("slow", slow, read_only=False),
        tool("never", lambda _: pytest.fail("it ran")),
    )
    ended = []

    class Batches(Middleware):
        slot = Slot.FILESYSTEM

        def end_batch(self) -> None:
            ended.append(len(watched))

    async with loop_of(*tools, middlewares=[Batches()], watch=lambda given, _: watched.append(given.id)) as loop:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run, "go")
            await slow_runs.wait()
            nursery.cancel_scope.cancel()
        assert_paired(loop)
        assert [result.get("is_error", False) for result in results_of(loop)] == [False, True, True]
        assert "ancelled" in str(results_of(loop)[1]["content"])
        assert (watched, ended) == (["1"], [1])
        # It goes on from there.
        assert (await loop.run("again")).text == "back"
    assert server.results(1) == []
    assert len(server.requests[1]["messages"]) == 4


async def test_a_cancelled_request_leaves_the_transcript_as_it_was(scripted: Script) -> None:
    asked = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hang(_body: object) -> bytes:
        token.run_sync_soon(asked.set)
        return b"".join(begin(text("Half")))

    scripted(hang, reply(text("back")))
    async with loop_of() as loop:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run, "go")
            await asked.wait()
            nursery.cancel_scope.cancel()
        assert loop.messages[0] == {"role": "user", "content": "go"}
        assert (await loop.run("again")).text == "back"
