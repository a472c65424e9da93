"""What the proxy finds in a line, and what it makes of it: every byte that need not change stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.tools.mcp_messages import Calls, find_large, id_text

LIMIT = 50
LONG = "word\n" * 60
"""300 bytes, 75 tokens."""


def called(request_id: object = 1, tool: str = "fetch", arguments: object = None) -> Calls:
    """Calls that know of one."""
    calls = Calls()
    params = {"name": tool, "arguments": arguments}
    calls.note(json.dumps({"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}).encode())
    return calls


def answer(result: object, request_id: object = 1) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result})


def text(content: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": content, **more}


def rewritten(line: str, calls: Calls) -> tuple[list[list[str]], bytes]:
    """What of each result would be stored, and the line with `P0`, `P1`… in the places."""
    large = find_large(line.encode(), calls, LIMIT)
    assert large is not None
    for result in large.results:
        result.replace([f"P{number}" for number in range(len(result.texts))])
    return [result.texts for result in large.results], large.rewritten()


def result_of(line: bytes) -> Any:
    return json.loads(line)["result"]


def test_a_long_text_is_replaced_and_nothing_else_of_the_line() -> None:
    before = '{ "jsonrpc":"2.0","result":\t{"_meta" : {"n":1.50e0, "k":"\\u00e9"}, "content":'
    after = ', "isError":false},"id":1, "x":null }\r\n'
    block = f'[ {{"annotations":{{"priority":0.5}},"type":"text","text":{json.dumps(LONG)}}} ]'
    texts, line = rewritten(before + block + after, called())
    assert texts == [[LONG]]
    assert line == (before + '[{"annotations": {"priority": 0.5}, "type": "text", "text": "P0"}]' + after).encode()


@pytest.mark.parametrize(
    "line",
    [
        answer({"content": [text("a" * 200)]}) + " " * 200,
        answer({"content": [text(LONG)]}, request_id=2),
        answer({"content": LONG}),
        answer({"content": {"type": "text", "text": LONG}}),
        answer({"contents": [text(LONG)]}),
        answer([LONG]),
        answer(None) + " " * 300,
        json.dumps({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": LONG}}),
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "x", "result": {"content": [text(LONG)]}}),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": LONG}}),
        json.dumps({"jsonrpc": "2.0", "result": {"content": [text(LONG)]}}),
        answer({"content": [{"type": "image", "data": LONG, "mimeType": "image/png"}]}),
        answer({"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": LONG}}]}),
        answer({"content": [{"type": "text", "text": [LONG]}, None, 1, LONG]}),
        answer({"content": [text(LONG)]})[:-1],
        answer({"content": [text(LONG)]}) + "}",
        "Server listening on stdio " + LONG,
        "[" * 100_000,
        '{"id":1,"result":{"content":[' + "[" * 100_000,
        json.dumps(LONG),
        "[" + LONG,
        "{,}" + LONG,
        '{"id":1 "result"' + LONG,
        "{1:2}" + LONG,
    ],
)
def test_what_is_no_oversized_result_stays(line: str) -> None:
    assert find_large(line.encode(), called(), LIMIT) is None


def test_what_is_no_utf8_stays() -> None:
    assert find_large(answer({"content": [text(LONG)]}).encode().replace(b"word", b"w\xffrd"), called(), LIMIT) is None


def test_the_limit_is_the_estimate_of_the_text_not_of_the_line() -> None:
    at_limit, over = "é" * (2 * LIMIT), "é" * (2 * LIMIT) + "x"
    assert find_large(answer({"content": [text(at_limit)]}).encode(), called(), LIMIT) is None
    assert rewritten(answer({"content": [text(over)]}), called())[0] == [[over]]


def test_blocks_count_together_and_become_one() -> None:
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    page = {"type": "resource", "resource": {"uri": "doc:1", "text": "b" * 120}}
    content = [image, text("a" * 120), page, {"type": "resource_link", "uri": "doc:2", "name": "n"}, text("c")]
    texts, line = rewritten(answer({"content": content, "isError": True}), called())
    assert texts == [["a" * 120 + "\n\ndoc:1\n" + "b" * 120 + "\n\nc"]]
    assert result_of(line) == {"content": [image, text("P0"), content[3]], "isError": True}


def test_an_embedded_resource_becomes_a_text() -> None:
    texts, line = rewritten(
        answer({"content": [{"type": "resource", "resource": {"uri": "doc:1", "text": LONG}}]}), called()
    )
    assert texts == [[LONG]]
    assert result_of(line)["content"] == [text("P0")]


ROWS = [{"id": number, "name": "n" * 20} for number in range(40)]


@pytest.mark.parametrize(
    ("shown", "structured"),
    [
        (LONG * 10, {"result": LONG * 10}),
        (json.dumps({"rows": ROWS}, indent=2), {"rows": ROWS}),
    ],
)
def test_structured_content_that_repeats_the_text_is_shortened(shown: str, structured: dict[str, Any]) -> None:
    texts, line = rewritten(answer({"content": [text(shown)], "structuredContent": structured}), called())
    assert texts == [[shown]]
    result = result_of(line)
    assert result["content"] == [text("P0")]
    assert len(json.dumps(result["structuredContent"])) <= 4 * LIMIT
    assert type(result["structuredContent"]) is dict


def test_structured_content_keeps_its_shape() -> None:
    structured = {"rows": [{"id": number} for number in range(100)], "text": "t" * 5000, "n": 1.5, "none": None}
    large = find_large(answer({"content": [], "structuredContent": structured}).encode(), called(), 200)
    assert large is not None
    large.results[0].replace(["P0"])
    result = result_of(large.rewritten())
    assert [row["id"] for row in result["structuredContent"]["rows"]] == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]
    assert result["structuredContent"]["text"].startswith("t" * 200 + "[... cut; 5000 characters")
    assert (result["structuredContent"]["n"], result["structuredContent"]["none"]) == (1.5, None)
    assert result["content"] == [text("P0")]


def test_structured_content_that_says_more_is_stored_as_well() -> None:
    structured = {"rows": ROWS}
    texts, line = rewritten(answer({"content": [text(LONG)], "structuredContent": structured}), called())
    assert texts == [[LONG, json.dumps(structured)]]
    assert result_of(line)["content"] == [text("P0"), text("P1")]


def test_short_structured_content_stays_byte_for_byte() -> None:
    line = answer({"content": [text(LONG)]}).replace('"content"', '"structuredContent": { "n":1.0 }, "content"')
    assert (
        b'"structuredContent": { "n":1.0 }, "content": [{"type": "text", "text": "P0"}]' in rewritten(line, called())[1]
    )


def test_messages_of_a_batch_are_judged_each() -> None:
    calls = called(1)
    calls.note(b'[{"id":"b","method":"tools\\/call","params":{"name":"x"}},{"method":"notifications/x"}]')
    short, other = answer({"content": [text("s")]}, 8), answer({"content": [text(LONG)]}, 9)
    line = f"[ {answer({'content': [text(LONG)]}, 'b')} ,{short},{other},  {answer({'content': [text(LONG)]}, 1)}]\n"
    texts, new = rewritten(line, calls)
    assert texts == [[LONG], [LONG]]
    first, _, _, last = json.loads(new)
    assert first["result"]["content"] == last["result"]["content"] == [text("P0")]
    assert f",{short},{other},  ".encode() in new
    assert new.startswith(b"[ {")


def test_a_repeated_key_means_its_last_value() -> None:
    line = f'{{"id":1,"result":{{"content":[]}},"result":{{"content":[{json.dumps(text(LONG))}]}}}}'
    _, new = rewritten(line, called())
    assert new == b'{"id":1,"result":{"content":[]},"result":{"content":[{"type": "text", "text": "P0"}]}}'


def test_a_call_is_answered_once() -> None:
    calls, line = called(), answer({"content": [text(LONG)]}).encode()
    assert find_large(line, calls, LIMIT) is not None
    assert find_large(line, calls, LIMIT) is None


def test_an_id_that_comes_back_as_text_is_known() -> None:
    assert rewritten(answer({"content": [text(LONG)]}, "1"), called(1))[0] == [[LONG]]


def test_the_tool_and_a_read_of_a_stored_result_are_remembered() -> None:
    calls = called(1, "read_file", {"path": "/large_tool_results/s1/x"})
    found = calls.take(1)
    assert found is not None
    assert (found.tool, found.reads_stored) == ("read_file", True)
    other = called(1, "read_file", {"path": "/notes"}).take(1)
    assert other is not None
    assert not other.reads_stored


def test_the_calls_that_are_remembered_are_bounded() -> None:
    calls = Calls(at_most=3)
    for number in range(5):
        calls.note(b'{"id":%d,"method":"tools/call","params":{"name":"t"}}' % number)
    assert [number for number in range(5) if calls.take(number)] == [2, 3, 4]


@pytest.mark.parametrize("line", [b"tools/call", b'{"method":"tools/call"}', b'"tools/call"', b'[["tools/call"]]'])
def test_a_call_without_an_id_is_none(line: bytes) -> None:
    calls = Calls()
    calls.note(line)
    assert calls.take(None) is None


def test_ids_have_names_of_their_own() -> None:
    ids: list[object] = [1, "1", -1, "-1", 10**30, "", "a", "../a", "a/b", "A" * 100, "\ud800", 1.5, "x" * 49, "é"]
    names = [id_text(one) for one in ids]
    assert len(set(names)) == len(ids)
    assert all(name.replace("-", "").replace(".", "").isalnum() and len(name) <= 48 for name in names), names
    assert id_text(7) == "7"
    assert id_text("call_7") == "call_7"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    meta=json_values, extra=st.dictionaries(st.sampled_from(["a", "é", "zz"]), json_values), ascii_only=st.booleans()
)
def test_everything_but_the_content_is_the_same_value(meta: object, extra: dict[str, object], ascii_only: bool) -> None:
    message = {**extra, "id": 1, "result": {"_meta": meta, "content": [text(LONG)], **extra}}
    line = json.dumps(message, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    large = find_large(line, called(), LIMIT)
    assert large is not None
    large.results[0].replace(["P0"])
    message["result"]["content"] = [text("P0")]  # type: ignore[index]
    assert large.rewritten() == line.replace(json.dumps([text(LONG)]).encode(), json.dumps([text("P0")]).encode())
    assert json.loads(large.rewritten()) == message


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda one: one.encode(errors="surrogatepass")))
def test_any_bytes_are_an_answer_or_stay(line: bytes) -> None:
    calls = called()
    calls.note(line)
    assert find_large(line, calls, 1) is None
