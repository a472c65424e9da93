"""Searches: what is found, what bounds them, and what a scope does not find."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from fusefs.db.pool import open_database
from fusefs.rules.errors import BadPattern, NotFound, TooExpensive
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.store import search
from tests import harness


@asynccontextmanager
async def searching(
    namespace: harness.Namespace,
    session: str = "s-1",
    principal: Principal = Principal.AGENT,
    *,
    all_sessions: bool = False,
) -> AsyncIterator[Backend]:
    scope = Scope(namespace.tenant_id, namespace.agent_id, session, principal, all_sessions=all_sessions)
    async with open_database(namespace.dsn, origin="test", size=2, statement_timeout_s=0) as db:
        yield Backend(db, scope)


def put(namespace: harness.Namespace, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        raw = content if isinstance(content, bytes) else None
        namespace.execute(
            "insert into agent_files (tenant_id, agent_id, path, content, content_bytes) values (%s, %s, %s, %s, %s)",
            (namespace.tenant_id, namespace.agent_id, path, "" if raw else content, raw),
        )


async def lines(backend: Backend, pattern: str, path: str = "/", **options: str) -> list[tuple[str, int, str]]:
    found = await backend.grep(pattern, path, include=options.get("include"))
    assert not found.truncated
    return [(match.path, match.line, match.text) for match in found.found]


# -- Lines -----------------------------------------------------------------------------------------

TEXT = {
    "/re/lf": "foo bar\nFoo\nfoobar\n\nend foo\n",
    "/re/crlf": "foo\r\nbar\r\n\r\n",
    "/re/odd": "a\x0cfoo\u2028b\rc\nlast",
}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("foo", [("crlf", 1), ("lf", 1), ("lf", 3), ("lf", 5), ("odd", 1)]),
        ("(?i)^foo$", [("crlf", 1), ("lf", 2)]),
        ("foo$", [("crlf", 1), ("lf", 5)]),
        ("^foo", [("crlf", 1), ("lf", 1), ("lf", 3)]),
        (r"\bfoo\b", [("crlf", 1), ("lf", 1), ("lf", 5), ("odd", 1)]),
        ("^$", [("crlf", 3), ("lf", 4)]),
        ("foo(?!bar)", [("crlf", 1), ("lf", 1), ("lf", 5), ("odd", 1)]),
        (r"foo(?!\s)", [("crlf", 1), ("lf", 3), ("lf", 5)]),
        (r"(?<=end )foo", [("lf", 5)]),
        (r"foo\Z", [("crlf", 1), ("lf", 5)]),
        ("o.b", [("lf", 1), ("lf", 3), ("odd", 1)]),
        (r"\w{6}", [("lf", 3)]),
        ("[^a-z ]", [("lf", 2), ("odd", 1)]),
        ("(o)\\1", [("crlf", 1), ("lf", 1), ("lf", 2), ("lf", 3), ("lf", 5), ("odd", 1)]),
        ("last|bar", [("crlf", 2), ("lf", 1), ("lf", 3), ("odd", 2)]),
        ("foo bar", [("lf", 1)]),
        ("c$", [("odd", 1)]),
    ],
)
async def test_what_a_pattern_matches(
    module_namespace: harness.Namespace, pattern: str, expected: list[tuple[str, int]]
) -> None:
    if not module_namespace.execute("select 1 from agent_files where path = '/re/lf'"):
        put(module_namespace, dict(TEXT))
    async with searching(module_namespace) as backend:
        found = await lines(backend, pattern, "/re")
    assert [(path.removeprefix("/re/"), line) for path, line, _ in found] == expected
    for path, line, text in found:
        assert text == TEXT[path].replace("\r\n", "\n").split("\n")[line - 1]


async def test_a_literal_is_no_expression(namespace: harness.Namespace) -> None:
    put(namespace, {"/f": "a.b\naxb\n(a\n\\b\n"})
    async with searching(namespace) as backend:
        for text, line in (("a.b", 1), ("(a", 3), ("\\b", 4)):
            found = await backend.grep(text, literal=True)
            assert [match.line for match in found.found] == [line]


async def test_of_a_long_line_the_part_around_the_match(namespace: harness.Namespace) -> None:
    put(
        namespace,
        {"/f": f"{'é' * 50_000}needle{'漢' * 50_000}\n", "/g": f"needle{'x' * 600}\n", "/h": "x" * 495 + "needle"},
    )
    async with searching(namespace) as backend:
        for pattern in (
            "needle",
            "n(ee)dle",
            "ne{2}dle",
            "needle(x|漢|$)",
            r"(n)e{2}(d)le",
            "(?q)needle",
            "(?b)needle",
        ):
            first, second, third = (await backend.grep(pattern)).found
            assert (first.length, len(first.text)) == (100_006, 400)
            assert first.text.index("needle") + first.column == 50_001
            assert (second.column, second.text[:7], len(second.text)) == (1, "needlex", 400)
            assert (third.length, third.text[-6:]) == (501, "needle")
            assert len(third.text) < 110


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "*a", "\\", "(?<name>x)", "a**"])
async def test_what_is_no_expression_is_refused_even_where_nothing_is(
    namespace: harness.Namespace, pattern: str
) -> None:
    async with searching(namespace) as backend:
        with pytest.raises(BadPattern, match="invalid regular expression"):
            await backend.grep(pattern)


async def test_bytes_and_links_are_not_searched(namespace: harness.Namespace) -> None:
    put(namespace, {"/text": "needle\n", "/bytes": b"\0needle\n"})
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, kind)"
        " values (%s, %s, '/needle', 'needle', 'symlink')",
        (namespace.tenant_id, namespace.agent_id),
    )
    async with searching(namespace) as backend:
        assert [path for path, _, _ in await lines(backend, "needle")] == ["/text"]
        assert [node.path for node in (await backend.glob("*")).found] == ["/bytes", "/text"]


# -- Where -----------------------------------------------------------------------------------------


async def test_a_search_stays_at_or_below_its_path(namespace: harness.Namespace) -> None:
    put(namespace, dict.fromkeys(("/a/x", "/a/b/x", "/a-b/x", "/a.x", "/a0/x", "/x"), "needle\n"))
    async with searching(namespace) as backend:
        assert [path for path, _, _ in await lines(backend, "needle", "/a")] == ["/a/b/x", "/a/x"]
        assert [path for path, _, _ in await lines(backend, "needle", "/a/x")] == ["/a/x"]
        assert [node.path for node in (await backend.glob("x", "/a")).found] == ["/a/b/x", "/a/x"]
        assert [node.path for node in (await backend.glob("/**/x", "/a")).found] == ["/a/b/x", "/a/x"]
        assert len(await lines(backend, "needle")) == 6
        for path in ("/nowhere", "/a/nowhere"):
            with pytest.raises(NotFound):
                await backend.grep("needle", path)
            with pytest.raises(NotFound):
                await backend.glob("*", path)


async def test_only_included_files_are_searched(namespace: harness.Namespace) -> None:
    put(namespace, dict.fromkeys(("/src/a.py", "/src/b.txt", "/src/.c.py", "/d.py"), "needle\n"))
    async with searching(namespace) as backend:
        assert [path for path, _, _ in await lines(backend, "needle", include="*.py")] == ["/d.py", "/src/a.py"]
        assert [path for path, _, _ in await lines(backend, "needle", "/src", include="*.{py,txt}")] == [
            "/src/a.py",
            "/src/b.txt",
        ]
        assert [path for path, _, _ in await lines(backend, "ne+dle", include="/src/*")] == ["/src/a.py", "/src/b.txt"]


# -- Bounds ----------------------------------------------------------------------------------------


async def test_a_search_ends_at_its_limit(namespace: harness.Namespace) -> None:
    put(namespace, {"/many": "x\n" * 1500, "/more": "x\n"})
    async with searching(namespace) as backend:
        for pattern in ("x", "x+"):
            found = await backend.grep(pattern)
            assert (len(found.found), found.truncated) == (search.MAX_MATCHES, True)
            assert [match.line for match in found.found] == list(range(1, 1001))
        few = await backend.grep("x", limit=3)
        assert (len(few.found), few.truncated) == (3, True)
        exact = await backend.grep("x", "/more", limit=1)
        assert (len(exact.found), exact.truncated) == (1, False)
        names = await backend.glob("*", limit=1)
        assert ([node.path for node in names.found], names.truncated) == (["/many"], True)


async def test_what_only_the_exact_match_refuses_does_not_end_a_search(
    namespace: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coarse filter takes anything for a bracket, so whole batches fall away."""
    monkeypatch.setattr(search, "_BATCH", 5)
    put(namespace, {f"/d/{number:02}": "x\nx\nx\n" for number in range(30)})
    async with searching(namespace) as backend:
        assert [node.path for node in (await backend.glob("2[79]")).found] == ["/d/27", "/d/29"]
        for pattern in ("x", "x|y"):
            found = await backend.grep(pattern, include="2[79]")
            assert [(match.path, match.line) for match in found.found] == [
                (f"/d/{number}", line) for number in (27, 29) for line in (1, 2, 3)
            ]
        monkeypatch.setattr(search, "_STATEMENTS", 1)
        assert (await backend.glob("2[79]")).truncated
        assert (await backend.grep("x", include="2[79]")).truncated


async def test_an_expensive_expression_is_ended_and_said(
    namespace: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "STATEMENT_MS", 50)
    put(namespace, {"/f": "a" * 2001 + "b"})
    async with searching(namespace) as backend:
        with trio.fail_after(60), pytest.raises(TooExpensive) as caught:
            await backend.grep(r"^(a*)(a*)(a*)\1\2\3b$")
        assert "a*" not in str(caught.value)
        monkeypatch.setattr(search, "STATEMENT_MS", 10_000)
        assert len((await backend.grep("a")).found) == 1, "the limit was this search's alone"


async def test_a_pattern_of_many_stars_is_answered(namespace: harness.Namespace) -> None:
    """wcmatch would take minutes for a name that does not match: Postgres leaves it out."""
    put(namespace, {f"/{'a' * 250}": "x"})
    async with searching(namespace) as backend:
        assert (await backend.glob("*a" * 20 + "b")).found == ()
        assert len((await backend.glob("*a" * 20)).found) == 1


# -- Who -------------------------------------------------------------------------------------------


async def test_other_tenants_and_agents_are_not_searched(pg: str) -> None:
    mine = harness.make_namespace(pg)
    others = [harness.make_namespace(pg, tenant=mine.tenant), harness.make_namespace(pg)]
    for namespace in (mine, *others):
        put(namespace, {"/f": f"needle of {namespace.agent}\n"})
    async with searching(mine) as backend:
        for pattern in ("needle", "need.e"):
            assert await lines(backend, pattern) == [("/f", 1, f"needle of {mine.agent}")]
        assert len((await backend.glob("**")).found) == 1


async def test_row_level_security_binds_a_search_too(pg: str) -> None:
    """With another tenant's ids in the statement and the own tenant in the setting, there is nothing."""
    mine, other = harness.make_namespace(pg), harness.make_namespace(pg)
    put(other, {"/f": "needle\n"})
    async with open_database(pg, origin="test", size=1) as db:
        ids = other.tenant_id, other.agent_id, "/", "0", [], []
        assert await db.run(mine.tenant_id, search._LIST_FILES, *ids, None, 10) == []
        assert await db.run(mine.tenant_id, search._GREP_TEXT, *ids, None, "needle", 0, 10) == []
        assert await db.run(mine.tenant_id, search._GREP_PATTERN, *ids, None, "needle", 0, 10, "", "(needle)") == []


async def test_a_session_finds_only_its_own_results(namespace: harness.Namespace) -> None:
    paths = [
        "/conversation_history/s-1.md",
        "/conversation_history/s-2.md",
        "/large_tool_results/s-1.md/r",
        "/large_tool_results/s-1/r",
        "/large_tool_results/s-1x/r",
        "/large_tool_results/s-2/r",
        "/large_tool_results_are/not/these",
    ]
    put(namespace, dict.fromkeys(paths, "needle\n"))
    own = [path for path in paths if not any(other in path for other in ("s-2", "s-1x", "s-1.md/"))]
    async with searching(namespace) as backend:
        assert [path for path, _, _ in await lines(backend, "needle")] == own
        assert [node.path for node in (await backend.glob("**")).found] == own
        with pytest.raises(NotFound):
            await backend.grep("needle", "/large_tool_results/s-2")
    async with searching(namespace, principal=Principal.OWNER, all_sessions=True) as backend:
        assert [path for path, _, _ in await lines(backend, "needle")] == paths
        assert [path for path, _, _ in await lines(backend, "needle", "/large_tool_results/s-2")] == [paths[5]]
