"""The offload: what is stored, what the model and the user get, and that nothing which breaks ends the loop."""

from __future__ import annotations

import errno
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusefs import telemetry
from fusefs.db.pool import open_database
from fusefs.rules.config import MIB, Limits
from fusefs.rules.errors import Exists, NotFound, OverQuota, ReadOnly, TooLarge, Unavailable
from fusefs.rules.results import NEVER_STORED
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.services.database_results import DatabaseResults
from fusefs.services.offload import Offload, ResultStore, offloading, unobserved
from fusefs.services.tooling import ToolCall, ToolResult
from fusefs.services.toolset import Toolset
from fusefs.store import files
from tests import harness
from tests.relay import Relay

BIG = "".join(f"line {number} of the result\n" for number in range(1, 5001))  # 118,893 bytes
SECRET = "the secret content"


@dataclass
class Memory:
    """A store that keeps results in a dict, or fails as told."""

    session: str = "s-1"
    max_file_bytes: int = MIB
    root: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    failure: Exception | None = None
    fails_from: int = 0

    async def make_file(self, path: str, data: bytes) -> None:
        if self.failure is not None and len(self.files) >= self.fails_from:
            raise self.failure
        if path in self.files or path in self.directories:
            raise Exists(path=path)
        self.files[path] = data

    async def make_directory(self, path: str) -> None:
        if path in self.files or path in self.directories:
            raise Exists(path=path)
        self.directories.add(path)


def call_of(tool_call_id: str = "call_1", name: str = "fetch") -> ToolCall:
    return ToolCall(tool_call_id, name, {})


def run_tool(
    store: ResultStore, result: ToolResult | str, call: ToolCall | None = None, limit_tokens: int = 20_000
) -> ToolResult:
    """One call of a tool that gives `result`, through the wrapper."""
    made = ToolResult(result) if isinstance(result, str) else result

    async def tool(_call: ToolCall) -> ToolResult:
        await trio.lowlevel.checkpoint()
        return made

    wrapped = offloading(tool, Offload(store, limit_tokens=limit_tokens, observe=unobserved))
    return trio.run(wrapped, call or call_of())


# What is stored


@pytest.mark.parametrize(("size", "is_stored"), [(80_000, False), (80_001, True)])
def test_a_result_over_the_limit_is_stored_and_one_at_it_is_not(size: int, is_stored: bool) -> None:
    store = Memory()
    result = ToolResult("x" * size)
    done = run_tool(store, result)
    assert (done is result) is not is_stored
    assert store.files == ({"/large_tool_results/s-1/call_1": b"x" * size} if is_stored else {})


def test_the_limit_is_settable() -> None:
    store = Memory()
    run_tool(store, "x" * 401, limit_tokens=100)
    assert list(store.files) == ["/large_tool_results/s-1/call_1"]


def test_the_model_sees_the_preview_and_the_user_the_whole() -> None:
    store = Memory()
    done = run_tool(store, ToolResult("x" * 100_000, is_error=True))
    assert len(done.for_llm) < 1000
    assert "/large_tool_results/s-1/call_1" in done.for_llm
    assert done.for_user == "x" * 100_000
    assert done.is_error


def test_what_was_meant_for_the_user_stays() -> None:
    assert run_tool(Memory(), ToolResult(BIG, for_user="a picture")).for_user == "a picture"


@pytest.mark.parametrize("name", sorted(NEVER_STORED))
def test_case_l15_results_of_the_file_tools_are_never_stored(name: str) -> None:
    """Reading a stored result must not store it again: read_file bounds its own answers."""
    store = Memory()
    result = ToolResult(BIG * 10)
    assert run_tool(store, result, call_of(name=name)) is result
    assert store.files == {}


@pytest.mark.parametrize(
    "tool_call_id", ["", "same", "../../memories/evil", "a\0b", "a\nb", "x" * 5000, "..", "\ud800"]
)
def test_case_l13_equal_ids_never_overwrite(tool_call_id: str) -> None:
    store = Memory()
    texts = [f"{number}{BIG}" for number in range(3)]
    previews = [run_tool(store, text, call_of(tool_call_id)).for_llm for text in texts]
    assert sorted(store.files.values()) == sorted(text.encode() for text in texts)
    for text, preview in zip(texts, previews, strict=True):
        (path,) = [path for path, data in store.files.items() if data == text.encode()]
        assert path.startswith("/large_tool_results/s-1/")
        assert path.count("/") == 3
        assert f"Path: {path}\n" in preview


def test_a_text_over_the_file_limit_is_stored_in_parts() -> None:
    store = Memory(max_file_bytes=50_000)
    done = run_tool(store, BIG)
    assert store.directories == {"/large_tool_results/s-1/call_1"}
    parts = [store.files[f"/large_tool_results/s-1/call_1/{number:03d}"] for number in (1, 2, 3)]
    assert len(store.files) == 3
    assert b"".join(parts).decode() == BIG
    assert "call_1/001 to /003, one text in 3 files" in done.for_llm
    again = run_tool(store, BIG + "again")
    assert len(store.files) == 6
    assert "all of it is stored" in again.for_llm


def test_case_l17_nul_and_undecodable_bytes_are_kept() -> None:
    store = Memory()
    binary = b"\xff\xfeh\0i\0\0\xc3" * 20_000
    done = run_tool(store, binary.decode(errors="surrogateescape"))
    assert store.files["/large_tool_results/s-1/call_1"] == binary
    assert "NUL is shown as ␀, other bytes as �" in done.for_llm
    assert done.for_llm.encode()


# What breaks


FAILURES = [
    (Unavailable(), "Postgres does not answer"),
    (TooLarge("2 bytes, the limit is 1", path="/p"), "/p: 2 bytes, the limit is 1"),
    (OverQuota(path="/p"), "/p: The namespace would be larger than its quota"),
    (ReadOnly(), "This mount is read-only"),
    (NotFound("no such mount"), "no such mount"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
    (OSError("odd"), "OSError"),
    (Exists(path="/p"), "/large_tool_results/s-1: every name that was tried is taken"),
    (RuntimeError(SECRET), "internal error (RuntimeError)"),
    (ExceptionGroup("", [RuntimeError(SECRET)]), "internal error (ExceptionGroup)"),
]


@pytest.mark.parametrize(("failure", "reason"), FAILURES, ids=[type(each).__name__ for each, _ in FAILURES])
def test_what_cannot_be_stored_is_cut_in_place_and_says_so(failure: Exception, reason: str) -> None:
    done = run_tool(Memory(failure=failure), ToolResult(BIG))
    assert done.for_llm.startswith(f"[Too long to show: {len(BIG):,} bytes, 5,000 lines")
    assert (
        f"it could not be stored ({reason}). {len(BIG) - 80_000:,} bytes of its middle are not shown.]" in done.for_llm
    )
    assert BIG[:64_000] in done.for_llm
    assert done.for_llm.endswith(BIG[-16_000:])
    assert len(done.for_llm) < 80_300
    assert SECRET not in done.for_llm
    assert done.for_user == BIG


def test_parts_that_were_stored_before_it_broke_are_told() -> None:
    store = Memory(max_file_bytes=50_000, failure=OverQuota(), fails_from=2)
    done = run_tool(store, BIG)
    assert len(store.files) == 2
    kept = sum(map(len, store.files.values()))
    assert f"its first {kept:,} bytes are in /large_tool_results/s-1/call_1/001 to /002" in done.for_llm


def test_a_tool_that_raises_is_not_touched() -> None:
    async def tool(_call: ToolCall) -> ToolResult:
        raise RuntimeError("not the offload's to handle")

    with pytest.raises(RuntimeError, match="not the offload's"):
        trio.run(offloading(tool, Offload(Memory(), observe=unobserved)), call_of())


def test_a_cancellation_is_not_a_failure() -> None:
    class Hanging(Memory):
        async def make_file(self, path: str, data: bytes) -> None:
            await trio.sleep_forever()

    async def main() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await Offload(Hanging(), observe=unobserved).text("call_1", "fetch", BIG)
        return scope.cancelled_caught

    assert trio.run(main)


# In the database


@asynccontextmanager
async def results_of(
    namespace: harness.Namespace,
    session: str = "s-1",
    principal: Principal = Principal.AGENT,
    limits: Limits | None = None,
) -> AsyncIterator[DatabaseResults]:
    async with open_database(namespace.dsn, origin="offload", size=4, write_timeout_s=0.2) as db:
        yield DatabaseResults(
            db, Scope(namespace.tenant_id, namespace.agent_id, session, principal), limits or Limits()
        )


async def read(store: DatabaseResults, path: str) -> bytes:
    """A stored result, read as the agent of its session."""
    scope = replace(store.scope, principal=Principal.AGENT)
    node = await files.stat(store.db, scope, path)
    return (await files.read(store.db, scope, [node.id]))[node.id][1]


def test_in_the_database_the_agent_reads_what_was_stored(module_namespace: harness.Namespace) -> None:
    async def main() -> None:
        async with results_of(module_namespace, "s-reads") as store:
            offload = Offload(store, observe=unobserved)
            done = await offload.text("call_1", "fetch", BIG)
            assert done.path == "/large_tool_results/s-reads/call_1"
            assert await read(store, done.path) == BIG.encode()
            assert f"Path: {done.path}\n" in done.text
            node = await files.stat(store.db, store.scope, done.path)
            assert (node.version, node.mode) == (1, 0o644)

    trio.run(main)
    assert module_namespace.execute(
        "select updated_by from agent_files where path = '/large_tool_results/s-reads/call_1'"
    ) == [("system",)]


def test_another_session_does_not_find_a_stored_result(module_namespace: harness.Namespace) -> None:
    async def main() -> None:
        async with results_of(module_namespace, "s-mine") as store:
            done = await Offload(store, observe=unobserved).text("call_1", "fetch", BIG)
            assert done.path is not None
            other = replace(store, scope=replace(store.scope, session="s-other"))
            with pytest.raises(NotFound):
                await read(other, done.path)

    trio.run(main)


@pytest.mark.parametrize("tool_call_id", ["", "same", "../../memories/evil", "a\0b", "x" * 5000])
def test_case_l13_in_the_database_at_once(module_namespace: harness.Namespace, tool_call_id: str) -> None:
    """Eight results of one id, stored at once, are eight files."""
    texts = [f"{number}{BIG}" for number in range(8)]
    found: dict[str, str] = {}

    async def one(store: DatabaseResults, text: str) -> None:
        done = await Offload(store, observe=unobserved).text(tool_call_id, "fetch", text)
        assert done.path is not None, done.text[:300]
        found[done.path] = (await read(store, done.path)).decode()

    async def main() -> None:
        async with results_of(module_namespace, "s-ids") as store, trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(one, store, text)

    trio.run(main)
    assert sorted(found.values()) == texts
    assert all(path.rpartition("/")[0] == "/large_tool_results/s-ids" for path in found)


@pytest.mark.parametrize("data", [b"a\0" * 50_000, "UTF-16 äö\n".encode("utf-16") * 5000, b"\xff" * 90_000])
def test_case_l17_in_the_database_the_bytes_are_kept(module_namespace: harness.Namespace, data: bytes) -> None:
    async def main() -> None:
        async with results_of(module_namespace, "s-binary") as store:
            done = await Offload(store, observe=unobserved).text("", "fetch", data.decode(errors="surrogateescape"))
            assert done.path is not None
            assert await read(store, done.path) == data
            after = await Offload(store, observe=unobserved).text("next", "fetch", BIG)
            assert after.path is not None

    trio.run(main)


def test_in_the_database_a_text_over_the_file_limit_is_in_parts(module_namespace: harness.Namespace) -> None:
    async def main() -> None:
        async with results_of(module_namespace, "s-parts", limits=Limits(max_file_bytes=50_000)) as store:
            for _ in range(2):
                done = await Offload(store, observe=unobserved).text("call_1", "fetch", BIG)
                assert done.path is not None
                parts = [await read(store, f"{done.path}/{number:03d}") for number in (1, 2, 3)]
                assert b"".join(parts).decode() == BIG

    trio.run(main)


@pytest.mark.parametrize(
    ("session", "text"),
    [
        ("s-lines", "".join(f"line {number}\n" for number in range(60_000)) + "the end"),
        ("s-line", "x" * 400_000 + "the end"),
        ("s-long-lines", ("y" * 30_000 + "\n") * 10 + "the end"),
    ],
)
def test_case_l15_reading_a_stored_result_comes_to_its_end(
    module_namespace: harness.Namespace, session: str, text: str
) -> None:
    """Through the tools with the offload around them: what each answer says of going on leads to the end, none is over
    the limit, and none is stored."""

    async def main() -> str:
        async with results_of(module_namespace, session) as store:
            offload = Offload(store, observe=unobserved)
            read_file = offloading(Toolset(Backend(store.db, store.scope)).call, offload)
            arguments: dict[str, object] = {"path": (await offload.text("", "fetch", text)).path}
            for _ in range(100):
                answer = (await read_file(ToolCall("", "read_file", arguments))).for_llm
                assert len(answer) <= 80_000
                on = re.findall(r"go on (?:in it )?with offset=(\d+)(?:, column=(\d+))?", answer)
                if not on:
                    return answer
                arguments |= {"offset": int(on[-1][0]), "column": int(on[-1][1] or 1)}
            pytest.fail("reading does not come to an end")

    assert "the end" in trio.run(main)
    assert module_namespace.execute(
        "select count(*) from agent_files where kind = 'file' and updated_session = %s", [session]
    ) == [(1,)]


def test_postgres_that_goes_away_does_not_end_the_loop(module_namespace: harness.Namespace) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            relay = Relay(module_namespace.dsn, nursery)
            await relay.open()
            async with results_of(replace(module_namespace, dsn=relay.dsn), "s-away") as store:
                offload = Offload(store, observe=unobserved)
                await relay.shut()
                done = await offload.text("call_1", "fetch", BIG)
                assert (done.path, done.error_type) == (None, "NotConnected")
                assert "it could not be stored (" in done.text
                assert done.text.endswith(BIG[-16_000:])
                await relay.open()
                again = await offload.text("call_1", "fetch", BIG)
                assert again.path == "/large_tool_results/s-away/call_1"
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_full_quota_does_not_end_the_loop(pg: str) -> None:
    namespace = harness.make_namespace(pg)

    async def main() -> None:
        async with results_of(namespace) as store:
            await Offload(store, observe=unobserved).text("first", "fetch", BIG)
            quota = (namespace.tenant_id, namespace.agent_id, len(BIG) + 10)
            namespace.execute("select fusefs_set_quotas_v1(%s, %s, %s, null)", quota)
            done = await Offload(store, observe=unobserved).text("second", "fetch", BIG)
            assert (done.path, done.error_type) == (None, "OverQuota")
            assert "it could not be stored (" in done.text

    trio.run(main)


# Telemetry


def test_what_is_recorded_of_a_stored_result() -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider(metric_readers=[reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.configure(tracer_provider=tracers, meter_provider=meters)
    telemetry.counters.result_offloads.clear()
    try:
        with trace.use_span(tracers.get_tracer("t").start_span("execute_tool"), end_on_exit=True):
            trio.run(recorded)
    finally:
        telemetry.configure()
        tracers.shutdown()
    (span,) = exporter.get_finished_spans()
    stored, failed = span.events
    assert {stored.name, failed.name} == {"tool.result_offloaded"}
    assert dict(stored.attributes or {}) == {
        "gen_ai.tool.name": "fetch",
        "hango.fs.path": "/large_tool_results/s-1/call_1",
        "hango.tokens.before": 31_247,
        "hango.tokens.after": -(-len(preview_of_secrets()) // 4),
    }
    assert (failed.attributes or {})["error.type"] == "Unavailable"
    assert "hango.fs.path" not in (failed.attributes or {})
    data = reader.get_metrics_data()
    meters.shutdown()
    assert data is not None
    found = {metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {
        (tuple(point.attributes.items()), point.value)  # type: ignore[union-attr]
        for point in found["hango.tool.result_offloads"]
    } == {((), 1), ((("error.type", "Unavailable"),), 1)}
    (tokens,) = found["hango.tool.result_tokens"]
    assert (tokens.count, tokens.sum) == (3, 62_495)  # type: ignore[union-attr]
    assert "secret" not in span.to_json() + str(data.to_json())


SECRETS = f"{SECRET}\n" * 6578 + "secr"  # 124,986 bytes


def preview_of_secrets() -> bytes:
    return run_tool(Memory(), SECRETS).for_llm.encode()


async def recorded() -> None:
    offload = Offload(Memory(), observe=telemetry.observe_result)
    await offload.result(call_of(name="read_file"), ToolResult("abc"))
    await offload.text("call_1", "fetch", SECRETS)
    await Offload(Memory(failure=Unavailable()), observe=telemetry.observe_result).text("call_2", "fetch", SECRETS)
