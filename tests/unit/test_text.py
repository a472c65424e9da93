"""Lines, their numbers, and where an answer ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules.text import (
    MAX_ANSWER_CHARS,
    MAX_LINE_CHARS,
    Page,
    binary_notice,
    number_lines,
    read_page,
    split_lines,
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\n", ["a", ""]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\nb\nc", ["a", "b", "c"]),
        ("10%\r50%\r\n", ["10%\r50%"]),
        ("a\r", ["a\r"]),
        ("a\r\r\n", ["a\r"]),
        ("a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\n", ["a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i"]),
    ],
)
def test_a_line_ends_with_lf_or_crlf_only(text: str, lines: list[str]) -> None:
    assert split_lines(text) == lines


def test_numbers_are_six_wide_and_followed_by_a_tab() -> None:
    assert number_lines(["a", "", "\tb"], 9) == "     9\ta\n    10\t\n    11\t\tb"
    assert number_lines([], 1) == ""
    for first in (1, 998, 1000, 999_999):
        expected = [f"{number:6d}\tx" for number in range(first, first + 2500)]
        assert number_lines(["x"] * 2500, first).split("\n") == expected


def page(text: str, **arguments: int) -> tuple[tuple[str, ...], int, int, int | None, int | None]:
    found = read_page(text, **arguments)
    return found.lines, found.first, found.total, found.next_offset, found.next_column


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (("a", "b", "c"), 1, 3, None, None)),
        ({"limit": 2}, (("a", "b"), 1, 3, 3, None)),
        ({"offset": 3}, (("c",), 3, 3, None, None)),
        ({"offset": 2, "limit": 1}, (("b",), 2, 3, 3, None)),
        ({"offset": 4}, ((), 4, 3, None, None)),
        ({"offset": 500, "limit": 5}, ((), 500, 3, None, None)),
        ({"limit": 0}, ((), 1, 3, None, None)),
    ],
)
def test_offset_and_limit(arguments: dict[str, int], expected: object) -> None:
    assert page("a\nb\nc\n", **arguments) == expected
    assert page("a\r\nb\r\nc", **arguments) == expected


def test_an_empty_text_has_no_lines() -> None:
    assert read_page("") == Page((), 1, 0, 1, (), None, None)


def test_a_long_line_is_cut_and_says_so() -> None:
    exact, over = "x" * MAX_LINE_CHARS, "é" * (MAX_LINE_CHARS + 1)
    found = read_page(f"{exact}\n{over}\nend\n")
    assert found.lines == (exact, over[:-1], "end")
    assert found.cut == ((2, MAX_LINE_CHARS + 1),)
    assert found.next_offset is None


def test_an_answer_ends_at_a_whole_line_and_says_where_to_go_on() -> None:
    text = "".join(f"row {number}\n" for number in range(1, 60_001))
    first = read_page(text, limit=60_000)
    assert len(number_lines(first.lines, 1)) <= MAX_ANSWER_CHARS
    assert first.next_offset == len(first.lines) + 1
    second = read_page(text, offset=first.next_offset, limit=60_000)
    assert second.lines[0] == f"row {first.next_offset}"


def test_cut_lines_that_are_not_on_the_page_are_not_named() -> None:
    found = read_page(f"{'x' * 6000}\n" * 40)
    assert [number for number, _ in found.cut] == list(range(1, found.last + 1))


def test_a_line_that_is_longer_than_an_answer_is_read_to_its_end() -> None:
    line = "é漢" * 100_000 + "END"
    text = f"before\n{line}\nafter\n"
    got, offset, column, calls = "", 2, 1, 0
    while offset == 2:
        found = read_page(text, offset=offset, column=column) if column > 1 else read_page(text, offset=2, limit=1)
        got += found.lines[0]
        assert len(found.lines[0]) <= MAX_ANSWER_CHARS
        if column == 1:
            assert found.cut == ((2, len(line)),)
            column = MAX_LINE_CHARS + 1
        else:
            assert found.next_offset is not None
            offset, column = found.next_offset, found.next_column or 0
        calls += 1
    assert (got, offset, column) == (line, 3, 0)
    assert calls <= 4


@pytest.mark.parametrize(("offset", "column"), [(1, 3), (1, 100), (9, 2)])
def test_a_column_past_the_end_gives_nothing(offset: int, column: int) -> None:
    assert read_page("ab\n", offset=offset, column=column).lines == ()


@given(
    st.text(st.sampled_from("ab\r\n\x0c\u2028é"), max_size=60),
    st.integers(1, 12),
    st.integers(0, 12),
)
def test_pages_in_turn_are_the_whole_text(text: str, offset: int, limit: int) -> None:
    every = split_lines(text)
    assert "\n".join(every) == text.replace("\r\n", "\n").removesuffix("\n")
    found = read_page(text, offset=offset, limit=limit)
    assert list(found.lines) == every[offset - 1 : offset - 1 + limit]
    got: list[str] = []
    following: int | None = 1
    while following is not None:
        step = read_page(text, offset=following, limit=max(limit, 1))
        got += step.lines
        following = step.next_offset
    assert got == every


def test_binary_content_says_its_size() -> None:
    assert binary_notice(12) == "Binary output (12 bytes). Pipe to file if needed."
