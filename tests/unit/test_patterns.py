"""Patterns for paths and for lines: their form, and the coarse filters that Postgres applies first."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules import globs, regexes
from fusefs.rules.errors import BadPattern
from fusefs.store.search import matcher

TREE = [
    "/top.py",
    "/src/a.py",
    "/src/deep/er/b.py",
    "/src/c.txt",
    "/.github/workflows/ci.yml",
    "/.env",
    "/src/.hid/d.py",
    "/src/.hid/.e.py",
    "/with space/e f.py",
    "/br[1]/g.py",
    "/a_b/h.py",
    "/axb/i.py",
    "/100%/j.py",
    "/UP/K.PY",
    "/!x",
    "/src/new\nline.py",
    "/back\\slash",
]


def found(pattern: str, root: str = "/") -> list[str]:
    prepared = globs.parse(pattern, root)
    fits = matcher(prepared)
    matched = [path for path in TREE if fits(path)]
    # Postgres sees no newline as special in such a pattern, nor does Python with DOTALL.
    coarse = re.compile(prepared.coarse, re.DOTALL)
    assert [path for path in matched if not coarse.search(path)] == [], "the coarse filter loses a match"
    return matched


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", [path for path in TREE if path.endswith(".py") and ".hid" not in path]),
        ("/*.py", ["/top.py"]),
        ("./*.py", ["/top.py"]),
        ("src/**/*.py", ["/src/a.py", "/src/deep/er/b.py", "/src/new\nline.py"]),
        ("src/**", ["/src/a.py", "/src/deep/er/b.py", "/src/c.txt", "/src/new\nline.py"]),
        ("src/deep/", ["/src/deep/er/b.py"]),
        ("**/ci.yml", ["/.github/workflows/ci.yml"]),
        ("ci.yml", ["/.github/workflows/ci.yml"]),
        (".github/workflows/*.yml", ["/.github/workflows/ci.yml"]),
        ("**/.*/*.py", ["/src/.hid/d.py"]),
        (".env", ["/.env"]),
        (".*", ["/.env"]),
        ("a_b/*.py", ["/a_b/h.py"]),
        ("100%/*", ["/100%/j.py"]),
        ("src/?.py", ["/src/a.py"]),
        ("src/[a-b].py", ["/src/a.py"]),
        ("src/[!a].txt", ["/src/c.txt"]),
        ("br\\[1\\]/*", ["/br[1]/g.py"]),
        ("br[[]1]/*", ["/br[1]/g.py"]),
        ("*/e f.py", ["/with space/e f.py"]),
        ("{top,src/a}.py", ["/top.py", "/src/a.py"]),
        ("src/{a,c}.{py,txt}", ["/src/a.py", "/src/c.txt"]),
        ("!x", ["/!x"]),
        ("back\\\\slash", ["/back\\slash"]),
        ("K.py", []),
        ("nothing/*.zz", []),
    ],
)  # fmt: skip
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert sorted(found(pattern)) == sorted(expected)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["/src/c.txt"]),
        ("deep/**/*.py", ["/src/deep/er/b.py"]),
        ("/src/*.txt", ["/src/c.txt"]),
        ("/*.py", ["/top.py"]),
    ],
)
def test_patterns_are_relative_to_the_searched_directory(pattern: str, expected: list[str]) -> None:
    """What is not below it is not asked for: Postgres gives no other paths."""
    assert found(pattern, "/src") == expected


@pytest.mark.parametrize(
    "pattern", ["", "..", "../**/*", "a/../b", "/", "//", "a\0", "x" * 1001, "{a,b}" * 12, "{" * 900]
)
def test_refused_patterns(pattern: str) -> None:
    with pytest.raises(BadPattern):
        matcher(globs.parse(pattern, "/"))


NAMES = st.text(st.sampled_from("ab.*?[]{},\\!-é\n"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)
PARTS = st.one_of(NAMES, st.sampled_from(["**", "*", "*.b", "[a-b]", "{a,b}", "a", "{a,b/c}"]))


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(NAMES, min_size=1, max_size=4))
def test_the_coarse_filter_loses_nothing(pattern: list[str], names: list[str]) -> None:
    try:
        prepared = globs.parse("/".join(pattern), "/")
        fits = matcher(prepared)
    except BadPattern:
        return
    path = "/" + "/".join(names)
    if fits(path):
        assert re.compile(prepared.coarse, re.DOTALL).search(path)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('plain words, with punctuation: <a href="x">\'', 'plain words, with punctuation: <a href="x">\''),
        (r"foo\.py", "foo.py"),
        (r"\(x\)\[0\]", "(x)[0]"),
        (r"a\\b", "a\\b"),
        ("a.b", None),
        (r"\d", None),
        (r"a\sb", None),
        ("^a", None),
        ("a|b", None),
        ("***=a.b", None),
    ],
)
def test_which_expressions_are_texts(pattern: str, text: str | None) -> None:
    assert regexes.as_text(pattern) == text


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\bfoo\b", r"\yfoo\y"),
        (r"\Bfoo\z", r"\Yfoo\Z"),
        (r"[\b]", r"[\b]"),
        (r"[^]\b]x\b", r"[^]\b]x\y"),
        (r"[[:alpha:]\b]\b", r"[[:alpha:]\b]\y"),
        (r"\\b", r"\\b"),
        (r"\\\b", r"\\\y"),
        ("[unclosed\\b", "[unclosed\\b"),
        ("a\\", "a\\"),
    ],
)
def test_spellings(pattern: str, expected: str) -> None:
    assert regexes.for_postgres(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a.*b$", "(?n)^a.*b$"),
        ("(?i)a", "(?ni)a"),
        ("(?s)a.b", ""),
        ("(?x)a", ""),
        ("a(?!b)", ""),
        ("(?<=a)b", ""),
        (r"a\Z", ""),
        ("***:a", ""),
    ],
)
def test_what_a_whole_file_is_asked(pattern: str, expected: str) -> None:
    assert regexes.for_whole_text(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a|b(c)", "(a|b(c))"), ("(?i)a", "(?i)(a)"), (r"(a)\1", r"(a)\1"), ("***:a", "***:a"), ("(?iq)a", "(?iq)a")],
)
def test_the_first_group_is_the_place(pattern: str, expected: str) -> None:
    assert regexes.for_place(pattern) == expected


@pytest.mark.parametrize("pattern", ["", "a\nb", "a\0b", "x" * 4001])
def test_refused_expressions(pattern: str) -> None:
    with pytest.raises(BadPattern):
        regexes.check(pattern)
