"""Announcements that nobody made in earnest: who knows a channel's name can send anything on it.

A payload is sent by a login without any right on the tables. A change behind it, of the other session, shows that the
mount has taken it and lives.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests import harness
from tests.mount.sides import Duo, eventually

_numbers = itertools.count(1)
FIELDS = (
    "origin", "op", "path", "old_path", "id", "kind", "ino", "version", "size", "mode", "uid", "gid", "mtime_ns",
    "ctime_ns", "session", "old_size",
)  # fmt: skip


class Forger:
    """Sends announcements on an agent's channel as a login that may do nothing else."""

    def __init__(self, namespace: harness.Namespace, login: str) -> None:
        self.namespace = namespace
        ((self.channel,),) = namespace.execute(
            "select channel from agent_namespaces where tenant_id = %s and agent_id = %s",
            (namespace.tenant_id, namespace.agent_id),
        )
        self.conn = psycopg.connect(make_conninfo(namespace.dsn, user=login), autocommit=True)

    def send(self, payload: str) -> None:
        self.conn.execute("select pg_notify(%s, %s)", (self.channel, payload))

    def true_fields(self, path: str) -> dict[str, Any]:
        """What an announcement of the file as it is would say."""
        ((row),) = self.namespace.execute(
            "select id::text, kind, ino, version, size_bytes, mode, mtime_ns,"
            " (extract(epoch from updated_at) * 1000000)::bigint * 1000, updated_session"
            " from agent_files where agent_id = %s and path = %s",
            (self.namespace.agent_id, path),
        )
        node_id, kind, ino, version, size, mode, mtime_ns, ctime_ns, session = row
        values = ("x", "put", path, None, node_id, kind, ino, version, size, mode, None, None, mtime_ns, ctime_ns)
        return dict(zip(FIELDS, (*values, session, size), strict=True))


@pytest.fixture(scope="module")
def stranger(pg_server: harness.PostgresServer) -> Iterator[str]:
    """A login that may do nothing but connect."""
    name = f"stranger_{uuid.uuid4().hex[:12]}"
    pg_server.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    yield name
    pg_server.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture(scope="module")
def forger(module_namespace: harness.Namespace, mounts: object, stranger: str) -> Iterator[Forger]:
    found = Forger(module_namespace, stranger)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        found.conn.execute("select from agent_files")
    yield found
    found.conn.close()


@pytest.fixture(scope="module")
def mounts(module_mount: harness.MountFactory) -> tuple[harness.Mount, ...]:
    pair = tuple(module_mount(session=name) for name in ("s-one", "s-two"))
    for mount in pair:
        mount.expect_log("malformed")
    return pair


@pytest.fixture
def duo(mounts: tuple[harness.Mount, ...], module_namespace: harness.Namespace) -> Iterator[Duo]:
    found = Duo(mounts, module_namespace, f"d{next(_numbers)}")
    (found.a / "f").write_bytes(b"text")
    (found.a / "sub").mkdir()
    (found.a / "sub" / "g").write_bytes(b"below")
    eventually(lambda: (found.b / "sub" / "g").read_bytes() == b"below", "the files in the other session")
    yield found
    found.close()


def seen(duo: Duo) -> dict[str, Any]:
    """What a fresh read shows: names, attributes and contents, of both sessions. Not a directory's mtime, which is
    stored a moment later."""
    found: dict[str, Any] = {}
    for side in duo.sides:
        for base, directories, files in os.walk(side.root):
            for name in (*directories, *files):
                path = os.path.join(base, name)
                status = os.stat(path)
                shown = [status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_ino]
                content = b""
                if name in files:
                    shown.append(status.st_mtime_ns)
                    with open(path, "rb") as file:
                        content = file.read()
                found[f"{side.mount.session}:{os.path.relpath(path, side.root)}"] = (shown, content)
    return found


def taken(duo: Duo) -> None:
    """Both mounts have taken what was sent before: a change of each is seen by the other."""
    number = str(next(_numbers))
    for writer, reader in ((duo.a, duo.b), (duo.b, duo.a)):
        (writer / "after").write_text(number)
        eventually(lambda reader=reader: (reader / "after").read_text() == number, "the change behind it")
        (writer / "after").unlink()
        eventually(lambda reader=reader: not (reader / "after").exists(), "the removal behind it")
    for side in duo.sides:
        assert side.mount.process.poll() is None  # type: ignore[attr-defined]


# What cannot be understood, or is of nothing that is known

UNKNOWN = dict(
    zip(
        FIELDS,
        ("x", "put", "/no/f", None, "5f9b2f9e-0000-4000-8000-00000000000c", "file", 5000, 1, 1, 420, None, None, 1, 1,
         "s", 0),
        strict=True,
    )
)  # fmt: skip
JUNK = [None, True, False, "", "x", "1", -1, 1.5, [], {}, [1], {"a": 1}, 1 << 63, -(1 << 63) - 1, 10**400]
NUMBERS = ("ino", "version", "size", "mode", "mtime_ns", "ctime_ns")
OPTIONAL_NUMBERS = ("uid", "gid", "old_size")
TEXTS = ("op", "path", "id", "kind", "session")
WHOLE = json.dumps([*UNKNOWN.values()])


def forged(fields: dict[str, Any]) -> str:
    return json.dumps([fields[name] for name in FIELDS])


def variants(name: str, values: list[Any]) -> list[str]:
    return [forged({**UNKNOWN, name: value}) for value in values]


def table(at: str) -> dict[str, list[str]]:
    """Payloads by what is wrong with them; `at` is the path of a file that is there."""
    outside = ["/", "", ".", "..", "/..", "/../a", "a", "a/b", "//", "/a//b", "/a/./b", "/a/../b", "/a/", "/\0"]
    outside += ["/" + "x" * 256, "/a" * 600, "/\ud800", "/.fusefs", "/.fusefs/errors", "/memories/../f"]
    outside += [f"{at}/..", f"{at}/", f"{at}/below", f"{at}/../f"]
    pairs: list[tuple[Any, Any]] = [("/", at), (at, "/"), ("/", "/"), (at, at), (f"{at}/x", at), (at, f"{at}/x")]
    pairs += [(at, "/none"), ("/none/a", at), ("/../a", at), (at, "/../a"), (at, 7), (at, ""), (at, None)]
    pairs += [("/.fusefs", at), (at, "/.fusefs")]
    return {
        "no JSON": [
            *("", " ", "nonsense", "{", "[", '"', "[" * 7000, "{" * 7000, "NaN", "[NaN]", "\x01", '"\\ud800"'),
            *(WHOLE[:-1], WHOLE + "]", WHOLE[1:], WHOLE * 2),
        ],
        "other JSON": [
            *("7", "null", "true", "{}", "[]", '["x"]', '["x","put"]', '["x",null]', '[null,"put"]', '{"op":"put"}'),
            *(json.dumps(["x", "put"] + [filler] * count) for filler in (None, 1, "/a") for count in (13, 14, 15, 40)),
        ],
        "wrong types": [
            *(payload for name in NUMBERS for payload in variants(name, JUNK)),
            *(payload for name in OPTIONAL_NUMBERS for payload in variants(name, JUNK[1:])),
            *(payload for name in TEXTS for payload in variants(name, [None, True, 7, [], {}, 10**400])),
        ],
        "kinds": variants("kind", ["door", "FILE", "dir ", "block", "\0", ""]),
        "operations": variants("op", ["truncate", "PUT", "drop table", "exchange", "rename", "", "mount"]),
        "paths outside": variants("path", outside),
        "renames": [
            forged({**UNKNOWN, "op": op, "path": new, "old_path": old})
            for op in ("rename", "exchange")
            for new, old in pairs
        ],
        "deletes": [forged({**UNKNOWN, "op": "delete", "path": path}) for path in (at, "/", "/none", f"{at}/below")],
        "long": ["x" * 7999, " " * 7999, *variants("path", ["/" + "x" * (7999 - len(WHOLE) + 4)])],
    }


@pytest.mark.parametrize("kind", table("/d/f"))
def test_a_forged_announcement_changes_nothing(duo: Duo, forger: Forger, kind: str) -> None:
    before = seen(duo)
    for payload in table(duo.files.path("f"))[kind]:
        forger.send(payload)
    taken(duo)
    assert seen(duo) == before


def test_what_is_wrong_is_wrong_of_a_file_that_is_known_too(duo: Duo, forger: Forger) -> None:
    """With the true lineage and incarnation a number beyond its column must not reach the attributes."""
    before = seen(duo)
    true = forger.true_fields(duo.files.path("f"))
    beyond = {
        "version": [-1, 1 << 31, 1 << 70],
        "size": [-1, 1 << 31, 1 << 40, 1 << 70],
        "mode": [-1, 0o10000, 0o100644, 1 << 40],
        "uid": [-1, 1 << 32, 1 << 70],
        "gid": [-1, 1 << 32],
        "mtime_ns": [1 << 63, -(1 << 63) - 1, 1 << 100],
        "ctime_ns": [1 << 63, 1 << 100],
        "old_size": [-1, 1 << 62],
        "kind": ["door", "FILE"],
        "ino": [0, 1, 2, 1023, 1 << 39, 1 << 40 | 1024, -1],
    }
    for name, values in beyond.items():
        for value in values:
            forger.send(forged({**true, "ctime_ns": true["ctime_ns"] + 1_000_000_000, name: value}))
    taken(duo)
    assert seen(duo) == before
    for side in duo.sides:
        os.statvfs(side.root)


def test_an_announcement_with_the_mounts_own_origin_is_not_read(mount: harness.MountFactory, stranger: str) -> None:
    """What it says of itself was applied when it committed."""
    mounted = mount(session="s-one")
    forger = Forger(mount.namespace, stranger)
    (mounted.path / "f").write_bytes(b"text")
    origin = mount.namespace.only_follower()
    true = {**forger.true_fields("/f"), "origin": origin}
    for fields in ({**true, "op": "delete", "version": 999}, {**true, "version": 999, "mode": 0, "ctime_ns": 1 << 62}):
        forger.send(forged(fields))
    forger.send(f'["{origin}", not JSON')
    forger.conn.close()
    mount.namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/after', 'x')",
        (mount.namespace.tenant_id, mount.namespace.agent_id),
    )
    eventually((mounted.path / "after").exists, "the change behind it")
    assert (mounted.path / "f").read_bytes() == b"text"
    assert (mounted.path / "f").stat().st_mode & 0o777 == 0o644


def test_the_removal_of_something_below_a_file_is_nothing(duo: Duo, forger: Forger) -> None:
    """A file is no directory, whose time would change; the kernel is made to ask."""
    path = duo.a / "f"
    before = path.stat().st_mtime_ns
    forger.send(forged({**UNKNOWN, "op": "delete", "path": duo.files.path("f/below")}))
    taken(duo)
    os.chmod(path, 0o600)
    assert path.stat().st_mtime_ns == before


def test_postgres_takes_no_longer_one(forger: Forger) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        forger.send("x" * 8000)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_field = _json | st.sampled_from(
    ["put", "delete", "rename", "exchange", "reload", "/a", "/a/b", "file", "dir", 1024, 1 << 31]
)


@given(
    payloads=st.lists(st.lists(_field, min_size=14, max_size=18).map(json.dumps) | st.text(max_size=60), max_size=12)
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_payload_leaves_the_mount_as_it_was(duo: Duo, forger: Forger, payloads: list[str]) -> None:
    before = seen(duo)
    for payload in payloads:
        if "\0" not in payload and len(payload.encode(errors="surrogatepass")) < 8000:
            forger.send(payload.encode(errors="replace").decode())
    taken(duo)
    assert seen(duo) == before


def test_who_sees_the_name_of_a_channel(forger: Forger, stranger: str, pg_server: harness.PostgresServer) -> None:
    """A listening connection shows it in pg_stat_activity: to its own role and to who monitors the server."""
    query = "select query from pg_stat_activity where datname = current_database()"
    assert forger.channel not in str(forger.conn.execute(query).fetchall())
    pg_server.execute(sql.SQL("grant pg_monitor to {}").format(sql.Identifier(stranger)))
    assert forger.channel in str(forger.conn.execute(query).fetchall())
    pg_server.execute(sql.SQL("revoke pg_monitor from {}").format(sql.Identifier(stranger)))


# What is well made, by somebody who knows the channel and what is there

BELIEVED: dict[str, dict[str, Any]] = {
    "newer": {"version": 999, "ctime_ns": 1 << 62},
    "mode": {"mode": 0, "ctime_ns": 1 << 62},
    "owner": {"uid": 12345, "gid": 1, "ctime_ns": 1 << 62},
    "size": {"size": 1, "ctime_ns": 1 << 62},
    "gone": {"op": "delete", "version": 999},
    "elsewhere": {"op": "rename"},
    "another": {"id": "5f9b2f9e-0000-4000-8000-00000000000b", "ino": 1 << 38},
    "replaced": {"ino": (1 << 38) + 1, "version": 999},
}


def believed(duo: Duo, forger: Forger, case: str) -> str:
    fields = {**forger.true_fields(duo.files.path("f")), **BELIEVED[case]}
    if case == "elsewhere":
        fields |= {"path": duo.files.path("elsewhere"), "old_path": fields["path"]}
    return forged(fields)


@pytest.mark.parametrize("case", BELIEVED)
def test_a_well_made_forgery_changes_nothing_that_is_stored(duo: Duo, forger: Forger, case: str) -> None:
    """Not what is in Postgres, and not what is written afterwards: a write that builds on a lie is refused, and one
    that is taken has the old content in its history."""
    namespace = duo.files.namespace
    query = "select t::text from agent_files t where path = %s"
    before = namespace.execute(query, (duo.files.path("f"),))
    forger.send(believed(duo, forger, case))
    taken(duo)
    assert namespace.execute(query, (duo.files.path("f"),)) == before
    try:
        (duo.a / "f").write_bytes(b"written afterwards")
    except OSError:
        assert duo.files.content("f") == b"text"
    else:
        assert duo.files.content("f") == b"written afterwards"
        assert b"text" in duo.files.superseded("f")


def test_a_fresh_mount_shows_the_truth(duo: Duo, forger: Forger, module_mount: harness.MountFactory) -> None:
    for case in BELIEVED:
        forger.send(believed(duo, forger, case))
    taken(duo)
    fresh = module_mount(session="s-fresh").path / duo.files.path("").strip("/")
    assert (fresh / "f").read_bytes() == b"text"
    assert sorted(os.listdir(fresh)) == ["f", "sub"]
