"""The estimate of tokens: what of a request is counted, and that more of it is never less."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules import tokens
from fusefs.rules.tokens import Estimator, estimate, estimate_request

MESSAGE, BLOCK = tokens.MESSAGE_TOKENS, tokens.BLOCK_TOKENS
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 100_000}}
TEXT = {"type": "text", "text": "x" * 40, "cache_control": {"type": "ephemeral"}}


def with_block(block: dict[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 4, 2), ("经" * 4, 3), ("\ud800" * 4, 1)],
)
def test_a_text(text: str, expected: int) -> None:
    assert estimate(text) == expected


@pytest.mark.parametrize(
    ("request_body", "expected"),
    [
        ({}, 0),
        ({"model": "m" * 400, "max_tokens": 9, "stream": True}, 0),
        ({"system": "x" * 40}, BLOCK + 10),
        ({"system": [TEXT, TEXT]}, 2 * (BLOCK + 10)),
        ({"messages": [{"role": "user", "content": "x" * 40}]}, MESSAGE + BLOCK + 10),
        ({"messages": [{"role": "user", "content": [TEXT, PICTURE]}]}, MESSAGE + 2 * BLOCK + 10 + tokens.IMAGE_TOKENS),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "abcd"}]}
                ]
            },
            MESSAGE + 2 * BLOCK + 1,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [TEXT, PICTURE]}]}]},
            MESSAGE + 3 * BLOCK + 10 + tokens.IMAGE_TOKENS,
        ),
        (
            # The name, the object, the key, its value.
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "ls", "input": {"path": "/"}}]}
                ]
            },
            MESSAGE + BLOCK + (1 + 1) + 1 + 1 + (1 + 1),
        ),
        # The object, the key `name`, its value.
        ({"tools": [{"name": "ls"}]}, tokens.TOOLS_TOKENS + tokens.TOOL_TOKENS + 1 + 1 + (1 + 1)),
        ({"tools": []}, 0),
    ],
)
def test_a_request(request_body: dict[str, object], expected: int) -> None:
    assert estimate_request(request_body) == expected


def test_injected_fragments_are_counted() -> None:
    request = {"messages": [{"role": "user", "content": "hello"}]}
    added = estimate_request(request, ["x" * 40, "abcd"]) - estimate_request(request)
    assert added == 2 * tokens.FRAGMENT_TOKENS + 10 + 1


def test_an_exact_counter_can_be_plugged_in() -> None:
    words: Estimator = partial(estimate_request, count=lambda text: len(text.split()))
    assert words({"system": "one two three"}, ["four five"]) == BLOCK + 3 + tokens.FRAGMENT_TOKENS + 2


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": None, "system": None, "tools": None},
        {"messages": "only text", "system": 7, "tools": "none"},
        {"messages": [None, 3, ["x"], {"content": {"type": "text", "text": 9}}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}, {"type": "tool_use"}, {"type": None}]}]},
        {"messages": [{"role": "user", "content": "\ud83d \udfff"}]},
    ],
    ids=str,
)
def test_odd_shapes_are_counted_somehow(request_body: dict[str, object]) -> None:
    assert estimate_request(request_body) >= 0


def test_a_deep_value_is_counted() -> None:
    """Deeper than Python's recursion goes."""
    value: object = "abcd"
    for _ in range(5000):
        value = [value]
    nested: dict[str, object] = {"type": "tool_result", "content": "abcd"}
    for _ in range(5000):
        nested = {"type": "tool_result", "content": [nested]}
    assert estimate_request({"tools": [value]}) == tokens.TOOLS_TOKENS + tokens.TOOL_TOKENS + 5000 + (1 + 1)
    assert estimate_request({"messages": [{"content": [nested]}]}) == MESSAGE + 5002 * BLOCK + 1


# Lone surrogates too: a model's JSON may hold them.
any_text = st.text(st.characters(exclude_categories=()), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
blocks = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, any_text),
    st.builds(lambda name, value: {"type": "tool_use", "id": "t", "name": name, "input": value}, any_text, json_values),
    st.builds(lambda value: {"type": "tool_result", "tool_use_id": "t", "content": value}, json_values),
    st.just(PICTURE),
    json_values,
)
messages = st.lists(st.builds(lambda content: {"role": "user", "content": content}, st.lists(blocks, max_size=3)))


@given(st.dictionaries(st.sampled_from(["system", "messages", "tools", "model"]), json_values))
def test_any_shape_has_an_estimate(request_body: dict[str, object]) -> None:
    assert estimate_request(request_body) >= 0


@given(messages, blocks, st.data())
def test_more_is_never_less(conversation: list[dict[str, list[object]]], block: object, data: st.DataObject) -> None:
    """One block more, wherever, costs what it costs alone."""
    before = estimate_request({"messages": conversation})
    alone = estimate_request({"messages": [{"role": "user", "content": [block]}]}) - MESSAGE
    assert alone > 0
    message: dict[str, list[object]] = {"role": "user", "content": []}
    if conversation:
        message = data.draw(st.sampled_from(conversation))
    else:
        conversation, before = [message], MESSAGE
    message["content"].insert(data.draw(st.integers(0, len(message["content"]))), block)
    assert estimate_request({"messages": conversation}) == before + alone * sum(m is message for m in conversation)


@given(any_text, any_text)
def test_a_longer_text_is_never_less(text: str, more: str) -> None:
    assert 0 <= estimate(text) <= estimate(text + more) <= estimate(text) + estimate(more)
    # What it stands for: a quarter of the bytes that are sent.
    assert estimate(text) <= len(json.dumps(text, ensure_ascii=True))
