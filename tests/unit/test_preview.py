"""The preview of a stored text: under 1000 characters whatever it stands for, and true in every number."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.rules.preview import PREVIEW_CHARS, Digest, Place, cut_in_place, encode, preview, shown

PLACE = Place("/large_tool_results/s-1/call_1")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=3000)  # lone surrogates included
LINES = [f"line {number} of the log" for number in range(1, 20_001)]
LOG = ("\n".join(LINES) + "\n").encode()


def body(text: str) -> list[str]:
    """The numbered lines and the gap of a preview."""
    return [line for line in text.split("\n") if re.match(r" *\d+\t|\[…", line)]


def test_a_long_log() -> None:
    assert preview(Digest.of(LOG), PLACE) == (
        "[Too long to show: 428,894 bytes, 20,000 lines, about 107,224 tokens; all of it is stored.]\n"
        "Path: /large_tool_results/s-1/call_1\n"
        "Tool: read_file with this path, offset=101, limit=100 (in lines).\n"
        "Shell (in the mounted directory): F=large_tool_results/s-1/call_1; "
        'sed -n \'101,200p\' "$F"; grep -n TEXT "$F"; head -c 4000 "$F"\n'
        "     1\tline 1 of the log\n"
        "     2\tline 2 of the log\n"
        "     3\tline 3 of the log\n"
        "     4\tline 4 of the log\n"
        "     5\tline 5 of the log\n"
        "[… 19,990 lines …]\n"
        " 19996\tline 19996 of the log\n"
        " 19997\tline 19997 of the log\n"
        " 19998\tline 19998 of the log\n"
        " 19999\tline 19999 of the log\n"
        " 20000\tline 20000 of the log"
    )


@pytest.mark.parametrize("lines", [1, 4, 5, 6, 9, 10, 11, 12, 17])
@pytest.mark.parametrize("end", ["", "\n"], ids=["open", "ended"])
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_up_to_ten_lines_are_all_shown(lines: int, end: str, piece: int) -> None:
    text = ("\n".join(LINES[:lines]) + end).encode()
    digest = Digest()
    for start in range(0, len(text), piece):
        digest.feed(text[start : start + piece])
    numbered = [f"{number:6d}\t{LINES[number - 1]}" for number in range(1, lines + 1)]
    gap = [f"[… {lines - 10} line{'s' if lines > 11 else ''} …]"] if lines > 10 else []
    assert digest.lines == lines
    assert body(preview(digest, PLACE)) == [*numbered[:5], *gap, *numbered[max(5, lines - 5) :]]


def test_one_line_of_100_000_characters_is_cut() -> None:
    text = preview(Digest.of(b"x" * 100_000), PLACE)
    assert len(text) <= PREVIEW_CHARS
    assert "100,000 bytes, 1 line, about 25,000 tokens" in text
    (line,) = body(text)
    assert line.startswith("     1\txxx")
    assert line.endswith("x…")
    assert 'head -c 4000 "$F"; tail -c 4000 "$F"' in text


def test_a_short_line_leaves_its_room_to_a_long_one() -> None:
    text = preview(Digest.of(b"a\n" * 9 + b"b" * 50_000), PLACE)
    assert len(text) == PREVIEW_CHARS
    assert body(text)[:9] == [f"{number:6d}\ta" for number in range(1, 10)]


def test_only_a_line_feed_ends_a_line() -> None:
    """As read_file and grep count: the numbers of the preview are theirs (case 69)."""
    digest = Digest.of("a\fb\vc\x1cd\x85e\u2028f\rg\r\nh".encode())
    assert digest.lines == 2
    assert body(preview(digest, PLACE)) == ["     1\ta␌b␋c␜d�e�f␍g", "     2\th"]


@pytest.mark.parametrize("data", [b"a\0b", "äö".encode("utf-16"), b"caf\xe9", "é".encode()[:1]])
def test_bytes_that_are_no_text_are_marked(data: bytes) -> None:
    text = preview(Digest.of(data * 3), PLACE)
    assert "NUL is shown as ␀, other bytes as �" in text
    assert 'xxd "$F"' in text
    assert text.isprintable() or set(text) - {"\n", "\t"} == {c for c in text if c.isprintable()}
    assert "␀" in text or "�" in text


def test_text_in_pieces_is_text() -> None:
    digest = Digest()
    for byte in "äö中🙂\n".encode():
        digest.feed(bytes([byte]))
    assert digest.is_text
    digest.feed("é".encode()[:1])
    assert not digest.is_text


def test_nothing_in_a_preview_steers_a_terminal_or_turns_the_text() -> None:
    text = preview(Digest.of("\x1b[2Jred\x07\u202eevil\u2066\n".encode()), PLACE)
    assert body(text) == ["     1\t␛[2Jred␇�evil�"]


@given(ANY_TEXT, st.integers(1, 400), ANY_TEXT, st.integers(0, 999), st.none() | st.text(max_size=300))
@example("\n" * 3000, 400, "x" * 3000, 999, "/mnt")
@example("🙂" * 3000, 1, "/large_tool_results/" + "s" * 64 + "/" + "i" * 113, 64, "/" + "d" * 180)
@example("", 1, "", 0, "")
def test_any_text_at_any_path_has_a_preview_under_1000_characters(
    text: str, times: int, path: str, parts: int, root: str | None
) -> None:
    data = encode(text) * times
    digest = Digest.of(data)
    made = preview(digest, Place(f"/{path}", parts, 10**12, root))
    assert len(made) < 1000
    assert made.encode()  # it goes into a request, as UTF-8
    assert "\0" not in made
    assert digest.size == len(data)
    assert digest.lines == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=20))
def test_a_digest_does_not_depend_on_the_pieces(data: bytes, cuts: list[int]) -> None:
    whole, pieces = Digest.of(data), Digest()
    bounds = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(bounds):
        pieces.feed(data[start:end])
    pieces.feed(data[max(bounds) :])
    assert (pieces.size, pieces.lines, pieces.edges()) == (whole.size, whole.lines, whole.edges())
    assert pieces.is_text == whole.is_text


@given(st.text(st.characters(codec="utf-8"), max_size=50), st.binary(max_size=20))
def test_bytes_that_were_made_text_become_themselves_again(text: str, data: bytes) -> None:
    assert encode(text) == text.encode()
    assert encode(data.decode(errors="surrogateescape")) == data


def test_a_surrogate_that_stands_for_nothing_is_kept() -> None:
    assert encode("a\ud800b\udcff") == b"a\xed\xa0\x80b\xed\xb3\xbf"


def test_the_path_is_a_word_of_a_shell() -> None:
    text = preview(Digest.of(LOG), Place("/large_tool_results/s-1/call_1", root="/home/a user/work"))
    assert "Shell: F='/home/a user/work/large_tool_results/s-1/call_1'; sed -n '101,200p' \"$F\"" in text


def test_parts_and_what_is_missing_are_told() -> None:
    text = preview(Digest.of(LOG), Place("/large_tool_results/s-1/call_1", parts=3, missing=1234, root="/work"))
    assert "all but 1,234 bytes of its middle is stored" in text
    assert "Path: /large_tool_results/s-1/call_1/001 to /003, one text in 3 files" in text
    assert 'F=/work/large_tool_results/s-1/call_1; cat "$F"/* | sed -n \'101,200p\'; grep -n TEXT "$F"/*' in text


def test_a_long_path_is_shortened_and_not_given_to_a_shell() -> None:
    text = preview(Digest.of(LOG), Place("/" + "d/" * 400 + "f"))
    assert len(text) < 1000
    assert "…" in text.split("\n")[1]
    assert "Shell" not in text


def test_a_text_cut_in_place_says_why_and_how_much_is_left_out() -> None:
    text = cut_in_place(Digest.of(b"x" * 100), (b"a\0b", b"z"), "disk full")
    assert text == (
        "[Too long to show: 100 bytes, 1 line, about 25 tokens; it could not be stored (disk full). "
        "96 bytes of its middle are not shown.]\na␀b\n[… 96 bytes …]\nz"
    )
    whole = cut_in_place(Digest.of(b"abc"), (b"abc", b""), "disk full")
    assert whole == "[Too long to show: 3 bytes, 1 line, about 1 token; it could not be stored (disk full).]\nabc"


def test_a_line_of_dos_is_shown_without_its_return() -> None:
    assert shown(b"a\r") == "a"
