"""What a model and its API get wrong (DE-02, DE-03, DE-07): each is answered so that the work can go on, or said."""

from __future__ import annotations

import io
import json

import pytest

from fusefs.harness.loop import Stop
from fusefs.harness.model import ModelSettings, open_model
from fusefs.rules.errors import BadConfig, ModelFailed, StaleVersion
from fusefs.services.tooling import ToolCall, ToolResult
from tests.loop.conftest import Script
from tests.loop.modelserver import ModelServer, Turn, begin, call, event, reply, text
from tests.loop.support import KEY, echo, loop_of, run, tool


async def test_an_unknown_tool(scripted: Script) -> None:
    server = scripted(reply(call("Echo", {"word": "x"})), reply(text("ok")))
    answer, _ = await run(tool("echo", echo), tool("other", echo))
    result = server.results()[0]
    assert result["is_error"] is True
    assert "echo, other" in result["content"]
    assert answer.stop is Stop.DONE


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ('{"word": "x"', "not valid JSON"),
        ("{'word': 'x'}", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"word": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
    ids=["cut", "python", "deep", "long number"],
)
async def test_broken_input_is_answered_with_the_schema(scripted: Script, raw: str, why: str) -> None:
    server = scripted(reply(call("echo", raw=raw)), reply(text("ok")))
    await run(tool("echo", lambda _: pytest.fail("the tool ran")))
    result = server.results()[0]
    assert result["is_error"] is True
    assert why in result["content"]
    assert json.dumps(tool("echo", echo).input_schema) in result["content"]
    assert len(result["content"]) < 500
    assert server.requests[1]["messages"][1]["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [({"word": 7}, "word must be of type string"), ({"wort": "x"}, "it takes only word"), ([], "not a JSON object")],
    ids=["type", "name", "array"],
)
async def test_input_that_breaks_the_schema(scripted: Script, arguments: object, why: str) -> None:
    server = scripted(reply(call("echo", raw=json.dumps(arguments))), reply(text("ok")))
    await run(tool("echo", lambda _: pytest.fail("the tool ran")))
    result = server.results()[0]
    assert result["is_error"] is True
    assert why in result["content"]
    assert json.dumps(tool("echo", echo).input_schema) in result["content"]


async def test_a_tool_without_arguments(scripted: Script) -> None:
    """No delta comes for it at all."""
    server = scripted(reply(call("echo", raw="")), reply(text("ok")))
    await run(tool("echo", echo))
    assert server.results()[0]["content"] == "echo: {}"


async def test_a_tool_that_raises(scripted: Script, log: io.StringIO) -> None:
    def fail(_given: ToolCall) -> ToolResult:
        raise KeyError("a secret of the tool")

    server = scripted(reply(call("fail"), call("stale", id="toolu_2")), reply(text("ok")))

    def stale(_given: ToolCall) -> ToolResult:
        raise StaleVersion(path="/a", expected=1, actual=2)

    await run(tool("fail", fail), tool("stale", stale))
    first, second = server.results()
    assert first == {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": "Error: internal error (KeyError)",
        "is_error": True,
    }
    assert "changed since you read it" in second["content"]
    assert second["is_error"] is True
    assert "secret" not in log.getvalue()
    assert [line["error"] for line in map(json.loads, log.getvalue().splitlines())] == ["KeyError"]


async def test_an_empty_reply_is_asked_for_once_more(scripted: Script) -> None:
    server = scripted(reply(), reply(text("  \n")), reply(text("here")))
    answer, loop = await run()
    assert (answer.stop, answer.text) == (Stop.EMPTY, "")
    assert server.bodies[0] == server.bodies[1]
    assert len(server.bodies) == 2
    assert loop.messages == [{"role": "user", "content": "go"}]


async def test_the_second_reply_counts(scripted: Script) -> None:
    scripted(reply(), reply(text("here")))
    answer, _ = await run()
    assert (answer.stop, answer.text) == (Stop.DONE, "here")


async def test_a_stream_without_its_last_event(scripted: Script) -> None:
    scripted(b"".join(begin(text("Half a sen"))))
    answer, loop = await run()
    assert (answer.stop, answer.text) == (Stop.INCOMPLETE, "Half a sen")
    assert loop.messages[-1]["content"] == [{"type": "text", "text": "Half a sen"}]


async def test_a_stream_that_breaks_off_inside_a_call(scripted: Script) -> None:
    """Whole calls run; the one that broke off does not, although what came of its JSON can be read."""
    cut = call("echo", {"word": "cut"}, id="toolu_2")[:-1]
    server = scripted(b"".join(begin(call("echo", {"word": "whole"}), cut)), reply(text("ok")))
    await run(tool("echo", echo))
    whole, broken = server.results()
    assert whole["content"] == 'echo: {"word": "whole"}'
    assert broken["is_error"] is True
    assert "broke off" in broken["content"]


@pytest.mark.parametrize("stop_reason", ["end_turn", "max_tokens", "refusal", "something new"])
async def test_the_stop_reason_is_not_trusted(scripted: Script, stop_reason: str) -> None:
    server = scripted(
        reply(call("echo", {"word": "x"}), stop_reason=stop_reason), reply(text("ok"), stop_reason="tool_use")
    )
    answer, _ = await run(tool("echo", echo))
    assert answer.stop is Stop.DONE
    assert server.results()[0]["content"] == 'echo: {"word": "x"}'


async def test_words_cut_at_the_limit_are_not_called_done(scripted: Script) -> None:
    scripted(reply(text("And then"), stop_reason="max_tokens"))
    answer, _ = await run()
    assert answer.stop is Stop.INCOMPLETE


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (
            (529, b'{"type": "error", "error": {"type": "overloaded_error", "message": "SECRET"}}'),
            "529.*overloaded_error",
        ),
        ((401, b'{"type": "error", "error": {"type": "authentication_error", "message": "SECRET"}}'), "401"),
        ((502, b"<html>SECRET" + b"x" * 1_000_000), "502 with an error without a name"),
        ((400, b'{"error": {"type": "SECRET with blanks"}}'), "400 with an error without a name"),
        (b"".join([*begin(text("a")), event("error", error={"type": "api_error", "message": "SECRET"})]), "api_error"),
        (b"data: no JSON\n\n", None),
    ],
    ids=["overloaded", "key", "proxy", "hostile", "in the stream", "no JSON"],
)
async def test_what_the_api_refuses(scripted: Script, log: io.StringIO, turn: Turn, says: str | None) -> None:
    scripted(turn, turn)
    async with loop_of() as loop:
        if says is None:
            assert (await loop.run("go")).stop is Stop.EMPTY
        else:
            with pytest.raises(ModelFailed, match=says) as caught:
                await loop.run("go")
            assert "SECRET" not in str(caught.value)
            assert KEY not in str(caught.getrepr(style="long", chain=True))
    assert loop.messages == [{"role": "user", "content": "go"}]
    assert KEY not in log.getvalue()


async def test_nobody_answers(scripted: Script) -> None:
    with ModelServer([]).serving() as server:
        address = server.address
    scripted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_BASE_URL", address)
        with pytest.raises(ModelFailed, match="ConnectError"):
            await run()


@pytest.mark.parametrize("key", ["", "  ", "sk-\nsplit", "sk-é"])
async def test_a_key_that_is_none(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    with pytest.raises(BadConfig, match="ANTHROPIC_API_KEY") as caught:
        async with open_model(ModelSettings("scripted")):
            pass
    assert "sk-" not in str(caught.value)
