"""Paths: one table for the form and the limits, one for who may do what where (HF-03, HF-11, HF-12)."""

from __future__ import annotations

import itertools
import os.path
import unicodedata
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules import paths
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadName, BadPath, Denied, FsError, NotFound, PathTooLong
from fusefs.rules.paths import Op
from fusefs.rules.scope import Principal, Scope

LIMITS = Limits()
TENANT, AGENT = str(uuid.uuid4()), str(uuid.uuid4())
CHANGES = [op for op in Op if op is not Op.READ]


def scope(principal: Principal = Principal.AGENT, session: str = "s1", all_sessions: bool = False) -> Scope:
    return Scope(TENANT, AGENT, session, principal, all_sessions)


@pytest.mark.parametrize(
    ("given_path", "normal"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/.", "/"),
        ("/a", "/a"),
        ("/a/", "/a"),
        ("//a///b//", "/a/b"),
        ("/./a/./b/.", "/a/b"),
        ("/...", "/..."),
        ("/a/..b", "/a/..b"),
        ("/a/b..", "/a/b.."),
        ("/ a / b ", "/ a / b "),
        ("/a\nb", "/a\nb"),
        ("/a\\b", "/a\\b"),
        ("/%2e%2e", "/%2e%2e"),
        ("/日记/团队经验.md", "/日记/团队经验.md"),
        ("/" + unicodedata.normalize("NFC", "é"), "/\u00e9"),
        ("/" + unicodedata.normalize("NFD", "é"), "/e\u0301"),
        ("/" + "a" * 255, "/" + "a" * 255),
        ("/" + "/".join("a" * 64), "/" + "/".join("a" * 64)),
        ("/" + "/".join(["a" * 127] * 7 + ["a" * 127]), "/" + "/".join(["a" * 127] * 8)),
    ],
)
def test_normal_form(given_path: str, normal: str) -> None:
    assert paths.normalise(given_path, LIMITS) == normal


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", BadPath),
        ("a", BadPath),
        ("./a", BadPath),
        ("~/a", BadPath),
        ("\\a", BadPath),
        ("\uff0fa", BadPath),  # a full-width slash is no slash
        ("/..", BadPath),
        ("/a/..", BadPath),
        ("/a/../b", BadPath),
        ("/../etc/passwd", BadPath),
        ("/a/.././b", BadPath),
        ("/a\0", BadPath),
        ("/\0/b", BadPath),
        ("/a\udcff", BadName),
        ("/a/\ud800b", BadName),
        ("/" + "a" * 256, PathTooLong),
        ("/" + "é" * 128, PathTooLong),  # 256 bytes, 128 characters
        ("/" + "/".join("a" * 65), PathTooLong),
        ("/" + "/".join(["a" * 127] * 8) + "/b", PathTooLong),
    ],
)
def test_refused_form(path: str, error: type[FsError]) -> None:
    with pytest.raises(error):
        paths.normalise(path, LIMITS)


@pytest.mark.parametrize("value", [None, 7, b"/a", ["/a"]])
def test_a_path_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(BadPath):
        paths.normalise(value, LIMITS)  # type: ignore[arg-type]


def test_a_message_never_holds_a_nul() -> None:
    with pytest.raises(BadPath) as caught:
        paths.check_name("a\0b", LIMITS)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0"])
def test_names_that_no_entry_has(name: str) -> None:
    with pytest.raises(BadPath):
        paths.check_name(name, LIMITS)


def test_limits_are_inclusive_and_in_bytes() -> None:
    limits = Limits(max_name_bytes=6, max_path_bytes=10, max_path_depth=2)
    assert paths.normalise("/日记/ab", limits) == "/日记/ab"  # 6 bytes of name, 10 of path, 2 levels
    for path, said in (("/日记a", "7 bytes"), ("/日记/abc", "11 bytes"), ("/a/b/c", "3 levels")):
        with pytest.raises(PathTooLong, match=said):
            paths.normalise(path, limits)


part = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)


@given(st.lists(part, max_size=6), st.lists(st.sampled_from(["/", "//", "/./", "///"]), min_size=7, max_size=7))
def test_any_spelling_of_a_path_has_one_normal_form(parts: list[str], slashes: list[str]) -> None:
    spelled = "".join(slash + name for slash, name in zip(slashes, [*parts, ""], strict=False))
    normal = paths.normalise(spelled, LIMITS)
    assert normal == "/" + "/".join(parts)
    assert paths.normalise(normal, LIMITS) == normal
    # POSIX keeps two leading slashes; otherwise Python's own rule agrees where no `..` occurs.
    assert normal == os.path.normpath("/" + spelled.lstrip("/"))


@given(st.text(max_size=40))
def test_any_text_is_a_normal_path_or_a_refusal(text: str) -> None:
    try:
        normal = paths.normalise("/" + text, LIMITS)
    except FsError:
        return
    names = normal.split("/")[1:]
    assert normal == "/" or all(name not in ("", ".", "..") and "\0" not in name for name in names)
    assert len(normal.encode()) <= LIMITS.max_path_bytes


@given(st.lists(part, min_size=1, max_size=6))
def test_split_undoes_join(parts: list[str]) -> None:
    path = paths.normalise("/" + "/".join(parts), LIMITS)
    parent, name = paths.split(path)
    assert (name, paths.join(parent, name)) == (parts[-1], path)
    assert paths.is_within(path, parent)
    assert not paths.is_within(parent, path)


@pytest.mark.parametrize(
    ("path", "prefix", "within"),
    [
        ("/a", "/a", True),
        ("/a/b", "/a", True),
        ("/ab", "/a", False),
        ("/a", "/a/b", False),
        ("/a", "/", True),
        ("/", "/", True),
        ("/", "/a", False),
        ("/A/b", "/a", False),
    ],
)
def test_within(path: str, prefix: str, within: bool) -> None:
    assert paths.is_within(path, prefix) is within


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/large_tool_results", None),
        ("/large_tool_results/s1", "s1"),
        ("/large_tool_results/s1/call_1", "s1"),
        ("/large_tool_results/s1.md", "s1.md"),
        ("/large_tool_results2/s1", None),
        ("/conversation_history", None),
        ("/conversation_history/s1.md", "s1"),
        ("/conversation_history/s1", "s1"),
        ("/conversation_history/s1.md.md", "s1.md"),
        ("/docs/large_tool_results/s1", None),
        ("/Large_tool_results/s1", None),
        ("/", None),
    ],
)
def test_owner_of_a_machine_written_path(path: str, owner: str | None) -> None:
    assert paths.session_owner(path) == owner


OTHERS = ["/large_tool_results/s2", "/large_tool_results/s2/call", "/conversation_history/s2.md"]


@pytest.mark.parametrize(("path", "op", "principal"), list(itertools.product(OTHERS, Op, Principal)))
def test_another_sessions_files_do_not_exist(path: str, op: Op, principal: Principal) -> None:
    caller = scope(principal)
    assert not paths.visible(caller, path)
    with pytest.raises(NotFound) as caught:
        paths.check(caller, op, path)
    assert str(caught.value) == f"{path}: No such file or directory"


@pytest.mark.parametrize("path", OTHERS)
def test_an_administrator_may_see_every_session(path: str) -> None:
    caller = scope(Principal.ADMIN, all_sessions=True)
    assert paths.visible(caller, path)
    paths.check(caller, Op.READ, path)


def test_a_session_whose_name_begins_like_another_is_another() -> None:
    caller = scope(session="s1")
    for path in ("/large_tool_results/s10/x", "/large_tool_results/s", "/conversation_history/s1.md.md"):
        assert not paths.visible(caller, path), path


RESERVED = ["/memories", "/memories/a.md", "/memories/deep/er", "/skills", "/skills/x/SKILL.md"]


@pytest.mark.parametrize(("path", "op"), list(itertools.product(RESERVED, CHANGES)))
@pytest.mark.parametrize("principal", [Principal.AGENT, Principal.MEMBER])
def test_reserved_prefixes_refuse_with_a_reason(path: str, op: Op, principal: Principal) -> None:
    with pytest.raises(Denied, match="is reserved: its files go into later prompts") as caught:
        paths.check(scope(principal), op, path)
    assert caught.value.path == path
    assert "owner or admin" in caught.value.given_hint


@pytest.mark.parametrize(("path", "op"), list(itertools.product(RESERVED, Op)))
@pytest.mark.parametrize("principal", [Principal.ADMIN, Principal.OWNER, Principal.SYSTEM])
def test_administrators_write_reserved_prefixes(path: str, op: Op, principal: Principal) -> None:
    paths.check(scope(principal), op, path)


@pytest.mark.parametrize("path", RESERVED)
def test_reserved_files_can_be_read(path: str) -> None:
    paths.check(scope(), Op.READ, path)


@pytest.mark.parametrize(
    "path",
    [
        "/memories2",
        "/Memories/a",
        "/memories ",
        "/ｍemories/a",
        "/mem\u200bories",
        "/sk\u0456lls/x",
        "/a/memories/b",
        "/",
    ],
)
@pytest.mark.parametrize("op", Op)
def test_a_look_alike_is_simply_another_path(path: str, op: Op) -> None:
    paths.check(scope(), op, path)


MACHINE: dict[tuple[Op, str], type[FsError] | None] = {
    # (operation, path): what the session's own agent gets; None: it may
    (Op.MKDIR, "/large_tool_results"): None,
    (Op.MKDIR, "/large_tool_results/s1"): None,
    (Op.MKDIR, "/large_tool_results/s1/sub"): None,
    (Op.CREATE, "/large_tool_results/s1/call"): None,
    (Op.CREATE, "/large_tool_results/s1"): Denied,
    (Op.CREATE, "/large_tool_results/file"): NotFound,  # `file` would be another session's folder
    (Op.CREATE, "/large_tool_results"): Denied,
    (Op.WRITE, "/large_tool_results/s1/call"): Denied,
    (Op.DELETE, "/large_tool_results/s1/call"): Denied,
    (Op.RENAME, "/large_tool_results/s1/call"): Denied,
    (Op.SETATTR, "/large_tool_results/s1/call"): Denied,
    (Op.DELETE, "/large_tool_results"): Denied,
    (Op.MKDIR, "/conversation_history"): Denied,
    (Op.CREATE, "/conversation_history/s1.md"): Denied,
    (Op.WRITE, "/conversation_history/s1.md"): Denied,
    (Op.DELETE, "/conversation_history/s1.md"): Denied,
    (Op.READ, "/conversation_history/s1.md"): None,
    (Op.READ, "/large_tool_results/s1/call"): None,
}


@pytest.mark.parametrize(("op", "path"), MACHINE, ids=lambda value: getattr(value, "value", value))
def test_machine_written_files_of_the_own_session(op: Op, path: str) -> None:
    error = MACHINE[op, path]
    if error is None:
        paths.check(scope(), op, path)
        return
    with pytest.raises(error) as caught:
        paths.check(scope(), op, path)
    if error is Denied:
        assert "written by the harness only" in str(caught.value)


@pytest.mark.parametrize(("op", "path"), MACHINE, ids=lambda value: getattr(value, "value", value))
def test_the_harness_itself_may_do_everything_there(op: Op, path: str) -> None:
    paths.check(scope(Principal.SYSTEM, session="s1", all_sessions=True), op, path)


@pytest.mark.parametrize("principal", [Principal.ADMIN, Principal.OWNER])
def test_administrators_delete_machine_written_files_and_do_not_forge_them(principal: Principal) -> None:
    caller = scope(principal, all_sessions=True)
    paths.check(caller, Op.DELETE, "/conversation_history/s2.md")
    with pytest.raises(Denied):
        paths.check(caller, Op.WRITE, "/conversation_history/s2.md")


@pytest.mark.parametrize(("op", "path"), list(itertools.product(CHANGES, ["/.fusefs", "/.fusefs/errors"])))
def test_the_control_directory_is_nobodys(op: Op, path: str) -> None:
    for principal in (Principal.AGENT, Principal.MEMBER, Principal.ADMIN, Principal.OWNER):
        with pytest.raises(Denied):
            paths.check(scope(principal), op, path)


@pytest.mark.parametrize("path", ["/.fusefs2", "/a/.fusefs", "/.fusefs.md"])
def test_only_the_roots_control_name_is_taken(path: str) -> None:
    paths.check(scope(), Op.CREATE, path)


@pytest.mark.parametrize(("op", "principal"), list(itertools.product(Op, Principal)))
def test_an_ordinary_path_is_everybodys(op: Op, principal: Principal) -> None:
    paths.check(scope(principal), op, "/src/main.py")
