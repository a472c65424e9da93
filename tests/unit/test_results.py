"""Names of stored results, and the pieces that a text is kept in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules import paths, results
from fusefs.rules.config import MIB, Limits
from fusefs.rules.results import Held

HOSTILE = [
    "../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a\\b", "a\0b", "a\nb", "-rf", ".hidden", " ", "é", "\ud800",
    "x" * 101, "x" * 100_000, "$(id)", "`id`", "*", "001/002",
]  # fmt: skip


def first(tool_call_id: str, count: int = 1) -> list[str]:
    return list(itertools.islice(results.names(tool_call_id), count))


@pytest.mark.parametrize("tool_call_id", ["call_1", "toolu_01AbC", "a.b-c_d", "0", "_", "x" * 100])
def test_a_harmless_id_is_the_name(tool_call_id: str) -> None:
    assert first(tool_call_id) == [tool_call_id]


@pytest.mark.parametrize("tool_call_id", ["", *HOSTILE])
def test_any_other_id_gives_a_name_that_leads_nowhere_else(tool_call_id: str) -> None:
    for name in first(tool_call_id, 3):
        assert len(name) <= 70
        path = paths.normalise(f"/large_tool_results/s/{name}", Limits())
        assert paths.split(path) == ("/large_tool_results/s", name)
        assert name[0] not in ".-"
        assert name.isascii()
        assert set(name).isdisjoint(" \n*$`/\\")


def test_no_two_ids_have_a_name_in_common() -> None:
    ids = [*HOSTILE, "call", "call_1", "..-" + "0" * 16, "a_b"]
    assert len({name for each in ids for name in first(each, 2)}) == 2 * len(ids)
    assert len(set(first("", 1000))) == 1000


@given(st.text(st.characters(exclude_categories=())))
def test_any_id_gives_a_name(tool_call_id: str) -> None:
    for name in first(tool_call_id, 2):
        paths.check_name(name, Limits(max_name_bytes=113))


def text_of(size: int) -> bytes:
    """A text of short lines, each of its KB another."""
    rest = b"a line\n" * 145 + b"\n"
    return b"".join(b"%07d\n%s" % (number, rest) for number in range(size // 1024 + 1))[:size]


def test_what_fits_is_one_part() -> None:
    assert results.plan(Held.of(b"abc"), 3) == results.Plan((b"abc",), 0)
    assert results.plan(Held.of(b""), 3) == results.Plan((b"",), 0)


@pytest.mark.parametrize("size", [MIB + 1, 3 * MIB, 32 * MIB])
def test_parts_in_order_are_the_text(size: int) -> None:
    text = text_of(size)
    plan = results.plan(Held.of(text), MIB)
    assert b"".join(plan.parts) == text
    assert plan.missing == 0
    assert all(len(part) <= MIB for part in plan.parts)
    assert all(part.endswith(b"\n") for part in plan.parts[:-1])
    assert len(plan.parts) <= results.MAX_PARTS


@pytest.mark.parametrize("piece", [64 * 1024, 1_000_003, 40 * MIB])
def test_of_a_longer_text_start_and_end_are_kept(piece: int) -> None:
    text = text_of(40 * MIB + 5)
    held = Held()
    for start in range(0, len(text), piece):
        held.feed(text[start : start + piece])
    plan = results.plan(held, MIB)
    kept = b"".join(plan.parts)
    assert plan.missing == len(text) - len(kept) == 8 * MIB + 5
    assert kept[: 24 * MIB] == text[: 24 * MIB]
    assert kept[24 * MIB :] == text[-8 * MIB :]


def test_a_small_limit_keeps_what_64_parts_hold() -> None:
    text = text_of(10_000)
    plan = results.plan(Held.of(text), 100)
    kept = b"".join(plan.parts)
    assert len(plan.parts) <= results.MAX_PARTS
    assert len(kept) >= 48 * 100 - 8
    assert plan.missing == len(text) - len(kept)
    assert text.startswith(kept[:3000])
    assert text.endswith(kept[-1000:])


@given(st.text(st.characters(codec="utf-8"), max_size=400), st.integers(4, 40))
def test_no_character_is_cut(text: str, limit: int) -> None:
    data = text.encode()
    plan = results.plan(Held.of(data), limit)
    assert "".join(part.decode() for part in plan.parts) == text if not plan.missing else True
    for part in plan.parts:
        assert 0 <= len(part) <= limit
        part.decode()


@pytest.mark.parametrize("bound", [6, 7, 8, 9])
def test_start_and_end_are_whole_characters(bound: int) -> None:
    head, tail = Held.of("中🙂é".encode() * 20).edges(bound, bound)
    assert "中🙂é".startswith(head.decode())
    assert "中🙂é".endswith(tail.decode())


@given(st.binary(max_size=400), st.integers(1, 40), st.integers(1, 40))
def test_edges_are_the_start_and_the_end(data: bytes, head_bytes: int, tail_bytes: int) -> None:
    held = Held(50, 45)
    for start in range(0, len(data), 7):
        held.feed(data[start : start + 7])
    head, tail = held.edges(head_bytes, tail_bytes)
    assert data.startswith(head)
    assert data.endswith(tail)
    if len(data) <= head_bytes + tail_bytes:
        assert (head, tail) == (data, b"")
    else:
        assert head_bytes - 3 <= len(head) <= head_bytes
        assert tail_bytes - 3 <= len(tail) <= tail_bytes


def test_a_held_stream_is_bounded() -> None:
    held = Held(1000, 500)
    for _ in range(1000):
        held.feed(b"x" * 999)
    assert held.size == 999_000
    assert len(held._head) + len(held._tail) <= 1000 + 2 * 500 + 999
