"""Replacing an exact text, and what a model is told that nearly got it right."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.rules.errors import NoMatch, NotUnique
from fusefs.rules.matching import replace


def changed(text: str, old: str, new: str, *, replace_all: bool = False) -> str:
    return replace(text, old, new, replace_all=replace_all).text


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("abc\n", "b", "B", "aBc\n"),
        ("keep\nremove me\nkeep\n", "remove me\n", "", "keep\nkeep\n"),
        ("no newline", "newline", "end", "no end"),
        ("# Role:\nyou are\n", "you are", "you are\nmore", "# Role:\nyou are\nmore\n"),
        ("a.c abc", "a.c", "x", "x abc"),
        # Line ends: the file has CR LF, the old text what read_file shows.
        ("a\r\nb\r\nc\r\n", "a\nb\n", "a\nB\nB2\n", "a\r\nB\r\nB2\r\nc\r\n"),
        ("a\r\nb\r\nc\r\n", "b\r\n", "B\r\n", "a\r\nB\r\nc\r\n"),
        ("a\r\nb\r\nc", "c", "C\nD", "a\r\nb\r\nC\r\nD"),
        ("a\r\nb", "a\nb", "ab", "ab"),
        ("a\r\nb\r\n", "a\nb\n", "", ""),
        ("a\nb\n", "b\r\n", "b1\r\nb2\r\n", "a\nb1\nb2\n"),
        # Mixed: what is inserted ends as the line in which it is inserted; the rest keeps its bytes.
        ("one\nstray\r\nthree\nfour\r\n", "stray\nthree\nfour", "stray\n3\n4\nfour", "one\nstray\r\n3\n4\nfour\r\n"),
        ("one\nstray\r\n", "stray", "a\nb", "one\na\r\nb\r\n"),
        ("10%\r50%\r100%\ndone\n", "done", "DONE", "10%\r50%\r100%\nDONE\n"),
        ("10%\r50%\r\nx\r\n", "50%\nx", "50%\ny", "10%\r50%\r\ny\r\n"),
    ],
)
def test_one_place_is_replaced(text: str, old: str, new: str, expected: str) -> None:
    assert changed(text, old, new) == expected


def test_it_says_how_many_and_where() -> None:
    found = replace("a\nx\ny x\nx", "x", "z", replace_all=True)
    assert (found.text, found.count, found.line) == ("a\nz\ny z\nz", 3, 2)


def test_replace_all_goes_from_the_left_without_overlap() -> None:
    assert changed("aaa aaaa", "aa", "b", replace_all=True) == "ba bb"
    assert changed("x\r\ny\r\nx\r\n", "x\n", "z\nz\n", replace_all=True) == "z\r\nz\r\ny\r\nz\r\nz\r\n"


@pytest.mark.parametrize(
    ("text", "old", "said"),
    [
        ("x = 1\ny = 2\nx = 1\n", "x = 1", "2 times (lines 1, 3)"),
        ("aaa\n", "aa", "2 times (lines 1, 1)"),
        ("a\n\n\n\nb\n", "\n\n", "3 times (lines 1, 2, 3)"),
        ("x\n" * 30, "x", "30 times (lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 …)"),
        ("a" * 5000, "a", "1000 times or more"),
    ],
)
def test_an_ambiguous_text_is_refused_with_count_and_lines(text: str, old: str, said: str) -> None:
    with pytest.raises(NotUnique) as caught:
        replace(text, old, "new")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "old", "said", "shown"),
    [
        ("abc", "", "is empty", ""),
        ("abc", "abc", "identical", ""),
        ("abc", "nope", "is not in the file", ""),
        ("def f():\n\treturn 1\n", "    return 1", "only white space differs", "     2\t\treturn 1"),
        ("a  b\n", "a b", "only white space differs", "     1\ta  b"),
        ("one two\n", "one\ntwo", "only white space differs", ""),
        ("10%\r50%\n", "10%\n50%", "only line ends differ", ""),
        ("caf\u00e9\n", "cafe\u0301", "only the Unicode form differs", "     1\tcaf\u00e9"),
        ("say “hi”\n", 'say "hi"', "quotes, dashes or blanks", "     1\tsay “hi”"),
        ("a\u00a0b\n", "a b", "quotes, dashes or blanks", "     1\ta\u00a0b"),
        ("Hello\n", "hello", "only upper and lower case differ", "     1\tHello"),
        ("foo\nbar\n", "     1\tfoo\n     2\tbar", "holds line numbers of read_file", ""),
        ("last line", "last line\n", "without the final newline", ""),
        (
            "x = 1\ncompute(alpha, beta)\n",
            "compute(alpha, gamma)",
            "is not in the file",
            "     2\tcompute(alpha, beta)",
        ),
        ("a\nb\nthe long distinctive line\nc\n", "z\nthe long distinctive line\nc", "", "     2\tb\n     3\tthe long"),
    ],
)
def test_help_for_a_text_that_is_not_there(text: str, old: str, said: str, shown: str) -> None:
    with pytest.raises(NoMatch) as caught:
        replace(text, old, "abc" if text == old else "new")
    assert said in str(caught.value)
    assert shown in caught.value.excerpt if shown else True


def test_a_message_never_quotes_the_file() -> None:
    with pytest.raises(NoMatch) as caught:
        replace("password = hunter2\n", "password = hunter3", "x")
    assert "hunter2" in caught.value.excerpt
    assert "hunter" not in str(caught.value)


def test_help_is_bounded_for_huge_texts() -> None:
    with pytest.raises(NoMatch) as caught:
        replace("x" * 1_000_000, "y" * 1_000_000, "z")
    assert caught.value.excerpt == ""
    with pytest.raises(NoMatch) as caught:
        replace(("word " * 2000 + "\n") * 100, "wrod " * 2000, "z")
    assert len(caught.value.excerpt) < 5000


TEXTS = st.text(st.sampled_from("ab\n\r é"), max_size=30)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
@example("a\r", "\n", "b", "")
def test_what_is_not_replaced_keeps_its_bytes(before: str, old: str, after: str, new: str) -> None:
    """For a file with LF only, this is Python's own replacement."""
    before, old, after, new = (each.replace("\r\n", "\n") for each in (before, old, after, new))
    text = before + old + after
    if "\r\n" in text or "\r\n" in new or not old or old == new:
        return
    if sum(text.startswith(old, at) for at in range(len(text))) == 1:
        assert changed(text, old, new) == before + new + after


@given(st.lists(st.sampled_from(["a", "b", "", "é"]), min_size=1, max_size=8), st.data())
def test_a_file_with_crlf_is_edited_as_one_with_lf(lines: list[str], data: st.DataObject) -> None:
    plain = "\n".join(lines) + data.draw(st.sampled_from(["", "\n"]))
    start = data.draw(st.integers(0, len(plain)))
    old = plain[start : data.draw(st.integers(start, len(plain)))]
    new = data.draw(st.text(st.sampled_from("ab\n"), max_size=6))
    try:
        expected = changed(plain, old, new, replace_all=True)
    except NoMatch:
        return
    got = changed(plain.replace("\n", "\r\n"), old, new, replace_all=True)
    assert got == (expected.replace("\n", "\r\n") if "\n" in plain else expected)


@given(st.text(max_size=40), st.text(min_size=1, max_size=20))
def test_any_two_texts_give_a_text_or_a_refusal(text: str, old: str) -> None:
    try:
        found = replace(text, old, "new", replace_all=True)
    except NoMatch:
        assert old.replace("\r\n", "\n") not in text.replace("\r\n", "\n") or old == "new"
    else:
        assert found.count >= 1
        assert "new" in found.text
