"""One connection: what travels in a round trip, what values survive it, what a failure leaves behind."""

from __future__ import annotations

import gc
import math
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.db.connection import DAEMON_ROLE, Connection
from fusefs.db.failures import LostInFlight, NotConnected, Retryable, TimedOut, from_state
from fusefs.db.queries import Query
from fusefs.db.values import Param, encode
from fusefs.rules import errors
from fusefs.rules.errors import FsError
from tests.db.conftest import execute, wait_active
from tests.relay import open_relay

PID = Query("ask_pid", "select pg_backend_pid()")
TENANT = Query("ask_tenant", "select current_setting('fusefs.tenant')")
SLEEP = Query("sleep_long", "select pg_sleep(30)")
REFUSE = Query("refuse_it", "select refuse($1, $2)")

Connect = Callable[..., Awaitable[Connection]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections that are closed after the test."""
    made: list[Connection] = []

    async def open_one(dsn: str, *, origin: str = "o1", **options: Any) -> Connection:
        made.append(await Connection.open(dsn, origin=origin, **options))
        return made[-1]

    yield open_one
    for conn in made:
        conn.close()


def one(text: str) -> Query:
    """A query with a name of its own."""
    return Query(f"q_{uuid.uuid4().hex[:12]}", text)


async def test_first_use_takes_one_round_trip_with_tenant_and_prepare(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    tenant = str(uuid.uuid4())
    assert await conn.run(TENANT, (), tenant) == [(tenant,)]
    assert conn.trips == 1
    assert await conn.run(TENANT, (), tenant) == [(tenant,)]
    assert await conn.run(TENANT) == [("",)], "no tenant means none, not the last one"
    assert conn.trips == 3


async def test_tenant_is_sent_only_when_it_differs(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    await conn.run(TENANT, (), "t1")
    await conn.run(one("select set_config('fusefs.tenant', 'changed behind its back', false)"), (), "t1")
    assert await conn.run(TENANT, (), "t1") == [("changed behind its back",)]
    assert await conn.run(TENANT, (), "t2") == [("t2",)]


async def test_tenant_is_right_after_a_statement_that_failed(connect: Connect, plain: str) -> None:
    """A failed statement takes the setting of its own round trip back with it."""
    conn = await connect(plain)
    await conn.run(TENANT, (), "t1")
    with pytest.raises(errors.NotFound):
        await conn.run(REFUSE, ("FS001", "x"), "t2")
    assert await conn.run(TENANT, (), "t1") == [("t1",)]
    with pytest.raises(errors.NotFound):
        await conn.run(REFUSE, ("FS001", "x"), "t2")
    assert await conn.run(TENANT, (), "t2") == [("t2",)]


async def test_session_is_set_up(connect: Connect, plain: str) -> None:
    conn = await connect(plain, statement_timeout_s=7)
    query = one(
        "select current_setting('fusefs.origin'), current_setting('jit'), current_setting('statement_timeout'),"
        " current_setting('application_name'), pg_backend_pid()"
    )
    assert await conn.run(query) == [("o1", "off", "7s", "fusefs", conn.backend_pid)]
    assert conn.server_version >= 140000


async def test_becomes_the_daemons_role(connect: Connect, pg: str) -> None:
    """A superuser's login must not get past row-level security."""
    who = one("select current_user::text, session_user::text")
    for role, expected in ((DAEMON_ROLE, DAEMON_ROLE), (None, "postgres"), ("no_such_role", "postgres")):
        conn = await connect(pg, origin="o1", role=role)
        assert await conn.run(who) == [(expected, "postgres")]


ALL_TYPES: list[tuple[str, object]] = [
    ("null::text", None),
    ("true", True),
    ("false", False),
    ("(-32768)::int2", -32768),
    ("(-2147483648)::int4", -(2**31)),
    ("9223372036854775807::int8", 2**63 - 1),
    ("4294967295::oid", 2**32 - 1),
    ("1.5::float4", 1.5),
    ("'-inf'::float8", -math.inf),
    ("0.1::float8", 0.1),
    ("'Ünï'::text", "Ünï"),
    ("'ab'::varchar(5)", "ab"),
    ("'ab'::char(3)", "ab "),
    ("'n'::name", "n"),
    (r"'\x00ff'::bytea", b"\x00\xff"),
    ("'{\"a\": 1}'::json", '{"a": 1}'),
    ("'{\"a\":1}'::jsonb", '{"a": 1}'),
    ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("array[]::text[]", []),
    ("array['a', null, '']::text[]", ["a", None, ""]),
    ("array['x']::varchar[]", ["x"]),
    ("array[1, -1]::int8[]", [1, -1]),
    ("array[1, -1]::int4[]", [1, -1]),
    ("array[1, -1]::int2[]", [1, -1]),
    ("array['a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11']::uuid[]", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ("pg_notify('nobody', '')", None),
]


async def test_every_result_type(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    for expression, expected in ALL_TYPES:
        ((found,),) = await conn.run(one(f"select {expression}"))
        assert found == expected, expression
        assert type(found) is type(expected), expression


@pytest.mark.parametrize("expression", ["now()", "1.5::numeric", "array[[1,2],[3,4]]::int4[]", "'1 day'::interval"])
async def test_other_result_types_are_an_error(connect: Connect, plain: str, expression: str) -> None:
    conn = await connect(plain)
    with pytest.raises(FsError, match=r"must cast it|more than one dimension"):
        await conn.run(one(f"select {expression} as odd"))
    assert await conn.run(PID) == [(conn.backend_pid,)]


HOSTILE = [
    "",
    "'",
    '"',
    "\\",
    "{}",
    "a,b",
    "NULL",
    "null",
    "\\N",
    " ",
    "\n\t",
    "$1",
    "%s",
    "'; drop table notes; --",
    "é😀",
]


async def test_values_arrive_as_they_were_sent(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    echo = one("select $1::text, $2::bytea, $3::int8, $4::bool, $5::float8, $6::text[], $7::int8[], $8::uuid")
    key = str(uuid.uuid4())
    for text in HOSTILE:
        sent: tuple[Param, ...] = (text, text.encode() + b"\0\xff", -(2**63), False, 1e-300, [text, text], (1, -2), key)
        ((*found,),) = await conn.run(echo, sent)
        assert found == [text, text.encode() + b"\0\xff", -(2**63), False, 1e-300, [text, text], [1, -2], key]
    assert await conn.run(echo, (None,) * 8) == [(None,) * 8]
    assert await conn.run(one("select $1::bytea, $2::bytea"), (bytearray(b"a"), memoryview(b"b"))) == [(b"a", b"b")]


async def test_any_text_survives_an_array(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    echo = one("select $1::text[]")
    lists = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5)
    sent: list[list[str]] = []

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(lists)
    def collect(texts: list[str]) -> None:
        sent.append(texts)

    collect()
    for texts in sent:
        assert await conn.run(echo, (texts,)) == [(texts,)]


async def test_null_in_an_array(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    assert await conn.run(one("select $1::bigint[]"), ([1, None, -2],)) == [([1, None, -2],)]


@pytest.mark.parametrize(
    "value", ["a\0b", "\udc80", ["a\0b"], [b"x"], [True], [["a"]], object(), {"a": 1}, uuid.uuid4()]
)
def test_a_value_that_would_be_damaged_is_refused(value: Param) -> None:
    with pytest.raises(FsError, match="database"):
        encode((value,))


async def test_sixteen_mebibytes_both_ways(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    raw = bytes(range(256)) * 65536
    assert await conn.run(one("select $1::bytea, length($1::bytea)"), (raw,)) == [(raw, len(raw))]
    assert conn.trips == 1


async def test_rows_and_no_rows(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    insert = one("insert into notes (write_id, content) values ($1, $2)")
    assert await conn.run(insert, ("w1", "c")) == []
    assert await conn.run(one("select n::int4, 'x' || n from generate_series(1, $1::int4) n"), (3,)) == [
        (1, "x1"),
        (2, "x2"),
        (3, "x3"),
    ]
    assert await conn.run(one("select write_id from notes where false")) == []


OURS = [
    ("FS001", errors.NotFound),
    ("FS002", errors.Exists),
    ("FS003", errors.NotADirectory),
    ("FS004", errors.IsADirectory),
    ("FS005", errors.NotEmpty),
    ("FS006", errors.StaleVersion),
    ("FS009", errors.OverQuota),
    ("FS010", errors.BadPath),
    ("FS012", errors.PathTooLong),
    ("40001", Retryable),
    ("40P01", Retryable),
    ("25006", Retryable),
    ("53100", errors.Unavailable),
    ("57014", TimedOut),
    ("08006", errors.Unavailable),
    ("23505", errors.Exists),
    ("2201B", errors.BadPattern),
    ("42P01", errors.SchemaMismatch),
    ("42703", errors.SchemaMismatch),
    ("22012", FsError),
]


async def test_every_sqlstate_becomes_its_error_without_details(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    for state, expected in OURS:
        with pytest.raises(FsError) as caught:
            await conn.run(REFUSE, (state, "the reason"))
        assert type(caught.value) is expected, state
        assert "SECRET" not in str(caught.value)
        assert ("the reason" in str(caught.value)) == state.startswith(("FS", "42", "2201B")), state
    assert conn.trips == len(OURS)
    assert await conn.run(PID) == [(conn.backend_pid,)]


async def test_messages_that_quote_a_value_are_not_shown(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    with pytest.raises(FsError) as caught:
        await conn.run(one("select $1::text::uuid"), ("my-secret-content",))
    assert "secret" not in str(caught.value)
    assert "InvalidTextRepresentation (22P02)" in str(caught.value)
    assert "raised by a stranger" not in str(from_state("P0001", "raised by a stranger"))
    assert "no known reason (ZZ999)" in str(from_state("ZZ999", ""))


async def test_a_statement_that_cannot_be_prepared_can_be_repaired(connect: Connect, plain: str) -> None:
    """A failed PREPARE is not remembered as done."""
    conn = await connect(plain)
    query = one("select a from later")
    with pytest.raises(errors.SchemaMismatch, match="later"):
        await conn.run(query)
    execute(plain, "create table later (a int)")
    assert await conn.run(query) == []
    execute(plain, "drop table later")


async def test_cancelled_in_the_middle_of_a_statement(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    with trio.move_on_after(0.05) as scope:
        await conn.run(SLEEP)
    assert scope.cancelled_caught
    assert conn.broken
    assert not conn.idle
    assert not conn.alive()
    with pytest.raises(NotConnected):
        await conn.run(PID)


async def test_statement_timeout(connect: Connect, plain: str) -> None:
    conn = await connect(plain, statement_timeout_s=0.05)
    with pytest.raises(errors.Unavailable, match="took too long"):
        await conn.run(SLEEP)
    assert conn.idle


async def test_lost_in_the_middle_of_a_statement(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def kill() -> None:
            await wait_active(plain, conn.backend_pid)
            execute(plain, "select pg_terminate_backend(%s)", conn.backend_pid)

        with pytest.raises(LostInFlight):
            await conn.run(SLEEP)
    assert conn.broken


async def test_an_idle_connection_that_died_is_noticed_before_sending(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    assert conn.alive()
    execute(plain, "select pg_terminate_backend(%s, 5000)", conn.backend_pid)
    assert not conn.alive()
    assert conn.broken


async def test_closing_wakes_the_task_that_waits(connect: Connect, plain: str) -> None:
    conn = await connect(plain)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def close() -> None:
            await wait_active(plain, conn.backend_pid)
            conn.close()
            conn.close()

        with pytest.raises(LostInFlight):
            await conn.run(SLEEP)


async def test_a_connection_given_up_while_connecting_is_closed(plain: str) -> None:
    """The thread goes on; what it opens must not stay open, nor warn."""
    async with open_relay(plain) as relay:
        relay.freeze()
        with trio.move_on_after(0.1) as scope:
            await Connection.open(relay.dsn, origin="o1")
        assert scope.cancelled_caught
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            relay.cut_happened = trio.Event()
            relay.thaw()
            with trio.fail_after(10):
                await relay.cut_happened.wait()
            gc.collect()
        assert relay.accepted == 1


async def test_a_peer_that_falls_silent_after_the_password(plain: str) -> None:
    """libpq bounds the connecting only, not what is asked on the new connection."""
    async with open_relay(plain) as relay:
        relay.freeze_at = b"pg_stat_get_activity"
        with trio.fail_after(30), pytest.raises(NotConnected, match="no answer in time"):
            await Connection.open(relay.dsn, origin="o1", connect_timeout_s=2)
        assert relay.freeze_at is None
        relay.thaw()


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("postgresql://u:pw-secret@127.0.0.1:1/db", r"at 127\.0\.0\.1:1: Connection refused"),
        ("host=/nonexistent password=pw-secret", r"at /nonexistent: No such file or directory"),
    ],
)
async def test_a_server_that_does_not_answer(dsn: str, text: str) -> None:
    with pytest.raises(NotConnected, match=text) as caught:
        await Connection.open(dsn, origin="o1")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_database_that_does_not_exist(plain: str) -> None:
    with pytest.raises(NotConnected, match='database "nowhere" does not exist'):
        await Connection.open(f"{plain} dbname=nowhere", origin="o1")


async def test_a_dsn_that_is_none() -> None:
    with pytest.raises(errors.BadConfig) as caught:
        await Connection.open("postgresql://u:pw-secret@[broken", origin="o1")
    assert "secret" not in str(caught.value)


async def test_a_pooler_in_session_mode_is_as_good_as_the_server(connect: Connect, plain: str) -> None:
    async with open_relay(plain) as relay:
        relay.is_pooler = True
        conn = await connect(relay.dsn, prove_session=True)
        assert relay.accepted == 2, "it was asked what it is"
        assert await conn.run(PID) == [(conn.backend_pid,)]
        relay.is_pooler = False
        await connect(relay.dsn, prove_session=True)
        assert relay.accepted == 3, "a server is not asked"


@pytest.mark.parametrize("answer", ["4711", "(random() * 1000)::int"], ids=["shared", "changing"])
async def test_a_pooler_in_transaction_mode_is_refused(
    connect: Connect, plain: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Two connections find themselves on one backend, or one connection on several."""
    monkeypatch.setattr("fusefs.db.connection._ASK_PID", f"select {answer}".encode())
    async with open_relay(plain) as relay:
        relay.is_pooler = True
        with pytest.raises(errors.BadConfig, match="is a pooler in transaction mode") as caught:
            await connect(relay.dsn, prove_session=True)
        assert "session mode" in caught.value.given_hint
