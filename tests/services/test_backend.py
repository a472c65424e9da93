"""The backend by itself: no mount, no door."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import structlog
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusefs import telemetry
from fusefs.db.pool import open_database
from fusefs.rules.errors import Denied, Exists, IsADirectory, NotEmpty, NotFound, NotSupported, StaleVersion
from fusefs.rules.model import Kind, NodeRow
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend, Seen, Unseen
from fusefs.telemetry import operations
from tests import harness


@asynccontextmanager
async def opened(namespace: harness.Namespace, session: str = "s-1") -> AsyncIterator[Backend]:
    async with open_database(namespace.dsn, origin="test", size=2) as db:
        yield Backend(db, Scope(namespace.tenant_id, namespace.agent_id, session, Principal.AGENT))


async def test_a_write_says_what_it_expects(namespace: harness.Namespace) -> None:
    async with opened(namespace) as backend:
        first = await backend.write("/a/b.txt", "one\n", Unseen.ABSENT)
        assert (first.created, first.seen.version, first.size) == (True, 1, 4)
        with pytest.raises(Exists):
            await backend.write("/a/b.txt", "two\n", Unseen.ABSENT)
        second = await backend.write("/a/b.txt", "two\n", first.seen)
        assert (second.created, second.seen) == (False, Seen(first.seen.id, 2))
        with pytest.raises(StaleVersion) as caught:
            await backend.write("/a/b.txt", "lost\n", first.seen)
        assert (caught.value.expected, caught.value.actual) == (1, 2)
        assert (await backend.write("/a/b.txt", "any\n", Unseen.ANY)).seen.version == 3
        assert (await backend.read_bytes("/a/b.txt")).data == b"any\n"
        with pytest.raises(StaleVersion, match="there is no file now"):
            await backend.write("/gone", "x", Seen(first.seen.id, 3))
    rows = namespace.execute("select path, convert_from(content, 'UTF8'), expected_version from agent_file_conflicts")
    assert ("/a/b.txt", "lost\n", 1) in rows


async def test_a_new_file_is_made_with_its_directories_and_the_old_one_stays_in_the_history(
    namespace: harness.Namespace,
) -> None:
    async with opened(namespace) as backend:
        await backend.write("/a/b/c.txt", "one\n", Unseen.ANY)
        await backend.write("/a/b/c.txt", b"\x00\xff", Unseen.ANY)
        content = await backend.read_bytes("/a/b/c.txt")
        assert (content.text, content.data, content.seen.version) == (None, b"\x00\xff", 2)
        assert (await backend.read("/a/b/c.txt")).page is None
        node = await backend.stat("/a/b")
        assert (node.kind, node.mode) == (Kind.DIR, 0o755)
        assert (await backend.stat("/")).kind is Kind.DIR
    rows = namespace.execute("select version, old_content from agent_file_versions where path = '/a/b/c.txt'")
    assert sorted(rows) == [(1, None), (2, "one\n")]


async def test_a_lost_race_keeps_the_bytes_and_says_where(namespace: harness.Namespace) -> None:
    async with opened(namespace) as backend:
        first = await backend.write("/f", "one\n", Unseen.ANY)
        await backend.write("/f", "two\n", first.seen)
        with pytest.raises(StaleVersion) as caught:
            await backend.edit("/f", "two", "mine", expected=first.seen)
        assert "conflict" not in caught.value.given_hint, "nothing was made of the edit: there is nothing to keep"
        with pytest.raises(StaleVersion) as caught:
            await backend.write("/f", "mine\n", first.seen)
    ((conflict, content, session),) = namespace.execute(
        "select id::text, convert_from(content, 'UTF8'), session from agent_file_conflicts"
    )
    assert conflict in caught.value.given_hint
    assert (content, session) == ("mine\n", "s-1")


async def test_edits_at_the_same_time_all_survive(namespace: harness.Namespace) -> None:
    """An edit names the text that it replaces, so it is made again on what another has made of the file."""
    async with opened(namespace) as backend:
        await backend.write("/f", "".join(f"[{number}]\n" for number in range(12)), Unseen.ANY)
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(backend.edit, "/f", f"[{number}]", f"({number})")
        assert (await backend.read_bytes("/f")).text == "".join(f"({number})\n" for number in range(12))


async def test_a_stale_write_does_not_follow_a_file_to_another_place(namespace: harness.Namespace) -> None:
    """An administrator moves it under /skills meanwhile: the same lineage and version, and another rule. Before the
    write, and between its look at the path and its change."""

    class Raced(Backend):
        async def _node(self, path: str) -> NodeRow:
            node = await super()._node(path)
            await owner.rename(path, "/skills/f")
            return node

    async with opened(namespace) as backend:
        owner = Backend(backend.db, replace(backend.scope, principal=Principal.OWNER))
        seen = (await backend.write("/f", "one\n", Unseen.ANY)).seen
        with pytest.raises(StaleVersion):
            await Raced(backend.db, backend.scope).write("/f", "planted\n", seen)
        with pytest.raises(StaleVersion):
            await backend.write("/f", "planted\n", seen)
        assert (await backend.read_bytes("/skills/f")).text == "one\n"


async def test_delete_rename_mkdir(namespace: harness.Namespace) -> None:
    async with opened(namespace) as backend:
        for path in ("/d/a", "/d/sub/b", "/d/sub/c"):
            await backend.write(path, "x\n", Unseen.ANY)
        with pytest.raises(NotEmpty):
            await backend.delete("/d")
        moved = await backend.rename("/d/sub", "/new/place")
        assert (moved.path, [entry.node.path for entry in await backend.ls("/new/place")]) == (
            "/new/place",
            ["/new/place/b", "/new/place/c"],
        )
        with pytest.raises(Exists):
            await backend.rename("/d/a", "/new/place/b")
        assert await backend.delete("/new", recursive=True) == 4
        assert await backend.delete("/d/a") == 1
        await backend.mkdir("/d/x/y")
        with pytest.raises(Exists):
            await backend.mkdir("/d/x")
        with pytest.raises(NotSupported):
            await backend.delete("/", recursive=True)
        assert [entry.node.path for entry in await backend.ls("/d")] == ["/d/x"]


def link(namespace: harness.Namespace, path: str, target: str) -> None:
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, kind) values (%s, %s, %s, %s, 'symlink')",
        (namespace.tenant_id, namespace.agent_id, path, target),
    )


async def test_symlinks_within_the_namespace_are_followed(namespace: harness.Namespace) -> None:
    async with opened(namespace) as backend:
        await backend.write("/real/dir/f", "one\n", Unseen.ANY)
        link(namespace, "/file", "real/dir/f")
        link(namespace, "/real/up", "../file")
        link(namespace, "/dir", "./real//dir/")
        for path in ("/file", "/real/up", "/dir/f"):
            content = await backend.read_bytes(path)
            assert (content.node.path, content.text) == ("/real/dir/f", "one\n")
        assert [entry.node.path for entry in await backend.ls("/dir")] == ["/real/dir/f"]
        assert ("/dir", "./real//dir/") in [(entry.node.path, entry.target) for entry in await backend.ls("/")]
        assert [match.path for match in (await backend.grep("one", "/dir")).found] == ["/real/dir/f"]
        assert (await backend.stat("/file")).kind is Kind.SYMLINK
        assert (await backend.stat("/dir/f")).kind is Kind.FILE
        seen = (await backend.edit("/real/up", "one", "two")).seen
        assert (await backend.write("/file", "three\n", seen)).path == "/real/dir/f"
        assert (await backend.write("/dir/new", "x\n", Unseen.ANY)).path == "/real/dir/new"
        assert await backend.delete("/file") == 1
        assert (await backend.read_bytes("/real/dir/f")).text == "three\n"


async def test_symlinks_lead_nowhere_else(namespace: harness.Namespace) -> None:
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, %s, 'theirs')",
        (namespace.tenant_id, namespace.agent_id, "/large_tool_results/s-2/r"),
    )
    async with opened(namespace) as backend:
        for path, target, error in (
            ("/absolute", "/etc/passwd", NotSupported),
            ("/out", "../../etc/passwd", NotSupported),
            ("/loop", "loop", NotSupported),
            ("/dangling", "nothing", NotFound),
            ("/theirs", "large_tool_results/s-2/r", NotFound),
            ("/root", ".", IsADirectory),
        ):
            link(namespace, path, target)
            with pytest.raises(error):
                await backend.read_bytes(path)
        link(namespace, "/skill", "skills/planted")
        with pytest.raises(Denied):
            await backend.write("/skill", "x", Unseen.ANY)
        link(namespace, "/memo", "memories")
        with pytest.raises(Denied):
            await backend.write("/memo/planted", "x", Unseen.ANY)


async def test_each_change_is_logged_with_its_byte_delta(
    namespace: harness.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF-18: agent, path and delta, whichever way a write says what it expects."""
    stream, saved = io.StringIO(), structlog.get_config()
    telemetry.setup_logging(stream=stream)
    monkeypatch.setattr(operations, "_log", telemetry.get_logger())
    try:
        async with opened(namespace) as backend:
            first = await backend.write("/f", "12345", Unseen.ANY)
            second = await backend.write("/f", "12", first.seen)
            await backend.write("/f", "1234", Unseen.ANY)
            await backend.edit("/f", "4", "the secret")
            assert second.size == 2
    finally:
        structlog.configure(**saved)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    changes = [line for line in lines if line["event"] == "fs.write"]
    assert [line["delta"] for line in changes] == [5, -3, 2, 9]
    assert all((line["path"], line["hango.agent.id"]) == ("/f", namespace.agent_id) for line in changes)
    assert "secret" not in stream.getvalue()


async def test_what_an_operation_records(namespace: harness.Namespace) -> None:
    """HF-18: a span for each operation with its path and counts, never a content."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with opened(namespace) as backend:
        telemetry.configure(tracer_provider=provider)
        try:
            await backend.write("/d/f", "the secret\n", Unseen.ABSENT)
            await backend.read("/d/f")
            await backend.edit("/d/f", "secret", "other")
            await backend.ls("/d")
            await backend.glob("*", "/d")
            await backend.grep("other", "/d")
            await backend.delete("/d/f")
        finally:
            telemetry.configure()
            provider.shutdown()
    spans = exporter.get_finished_spans()
    found = {span.name: dict(span.attributes or {}) for span in spans}
    assert {"fs.write", "fs.read", "fs.edit", "fs.ls", "fs.glob", "fs.grep", "fs.delete"} <= set(found)
    assert all(attributes["hango.agent.id"] == namespace.agent_id for attributes in found.values())
    assert (found["fs.read"]["hango.fs.path"], found["fs.read"]["hango.fs.bytes"]) == ("/d/f", 11)
    assert found["fs.grep"]["hango.fs.matches"] == found["fs.glob"]["hango.fs.matches"] == 1
    assert found["fs.edit"]["hango.fs.path"] == "/d/f"
    assert "secret" not in "".join(span.to_json() for span in spans)
