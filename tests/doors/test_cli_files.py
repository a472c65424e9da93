"""Versions, conflicts, export and import, on a real database."""

from __future__ import annotations

import io
import socket
import struct
import tarfile
import tempfile
import threading
import uuid
from pathlib import Path

import pytest

from fusefs.cli import registry
from fusefs.cli.registry import Record
from tests import harness
from tests.doors.command import Fusefs
from tests.doors.test_cli_admin import put

# Versions


def listed(fusefs: Fusefs, path: str, agent: harness.Namespace) -> list[tuple[int, str, bool, bool]]:
    found = fusefs("versions", path, "--agent", agent.agent, "--json").json
    return [(one["version"], one["op"], one["readable"], one["current"]) for one in found]


def test_versions_across_lineages(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "one")
    put(agent, "/a", "two")
    agent.execute("delete from agent_files where path = '/a'")
    put(agent, "/a", "three")
    assert listed(fusefs, "/a", agent) == [
        (1, "create", True, True),
        (3, "delete", False, False),
        (2, "write", True, False),
        (1, "create", True, False),
    ]
    show = ("versions", "/a", "--agent", agent.agent, "--version")
    assert fusefs(*show, "1").stdout == b"three"
    assert fusefs(*show, "2").stdout == b"two"
    lineage = fusefs("versions", "/a", "--agent", agent.agent, "--json").json[-1]["file_id"]
    assert fusefs(*show, "1", "--lineage", lineage).stdout == b"one"
    assert "there is no version 3" in fusefs.fails(3, *show, "3")
    assert "current" in fusefs("versions", "/a", "--agent", agent.agent).text


def test_versions_made_by_appends_are_prefixes(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/log", "ä1\n")
    for line in ("2\n", "3\n"):
        agent.execute(
            "update agent_files set content = content || %s, write_op = 'append', write_id = gen_random_uuid()"
            " where path = '/log'",
            (line,),
        )
    put(agent, "/log", "new")
    show = ("versions", "/log", "--agent", agent.agent, "--version")
    contents = [fusefs(*show, str(version)).stdout.decode() for version in (1, 2, 3, 4)]
    assert contents == ["ä1\n", "ä1\n2\n", "ä1\n2\n3\n", "new"]


def test_binary_versions(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/b", "text")
    agent.execute("update agent_files set content_bytes = %s where path = '/b'", (b"\0\xff",))
    put(agent, "/b", "text again")
    show = ("versions", "/b", "--agent", agent.agent, "--version")
    assert [fusefs(*show, str(version)).stdout for version in (1, 2, 3)] == [b"text", b"\0\xff", b"text again"]


def test_versions_of_a_path_that_never_was(fusefs: Fusefs, agent: harness.Namespace) -> None:
    assert "/nope: No such file" in fusefs.fails(3, "versions", "/nope", "--agent", agent.agent)
    assert "must be absolute" in fusefs.fails(9, "versions", "nope", "--agent", agent.agent)


def test_another_sessions_history_is_not_there_for_an_agent(fusefs: Fusefs, agent: harness.Namespace) -> None:
    path = "/large_tool_results/s-1/call"
    put(agent, path, "result")
    args = ("versions", path, "--agent", agent.agent, "--as", "agent", "--session")
    assert fusefs(*args, "s-1").code == 0
    assert "No such file" in fusefs.fails(3, *args, "s-2")


def test_restore(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "one")
    put(agent, "/a", "two")
    text = fusefs("restore", "/a", "--agent", agent.agent, "--version", "1").text
    assert text == "restored /a from version 1: it is at version 3 now\n"
    assert agent.execute("select content, version, updated_by from agent_files where path = '/a'") == [
        ("one", 3, "owner")
    ]
    assert listed(fusefs, "/a", agent)[:2] == [(3, "restore", True, True), (2, "write", True, False)]


def test_restore_of_a_deleted_tree(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/d/e/f", "precious")
    for path in ("/d/e/f", "/d/e", "/d"):
        agent.execute("delete from agent_files where path = %s", (path,))
    (gone,) = fusefs("versions", "/", "--agent", agent.agent, "--deleted", "--json").json
    assert (gone["path"], gone["version"], gone["readable"]) == ("/d/e/f", 1, True)
    assert fusefs("versions", "/d", "--agent", agent.agent, "--deleted", "--json").json == [gone]
    assert fusefs("versions", "/e", "--agent", agent.agent, "--deleted", "--json").json == []
    fusefs("restore", "/d/e/f", "--agent", agent.agent, "--version", "1")
    assert agent.execute("select content from agent_files where path = '/d/e/f'") == [("precious",)]
    assert fusefs("versions", "/", "--agent", agent.agent, "--deleted", "--json").json == []


def test_restore_obeys_the_policy_and_the_limit(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/memories/m", "1" * 2000)
    put(agent, "/memories/m", "2")
    args = ("restore", "/memories/m", "--agent", agent.agent, "--version", "1")
    assert "reserved" in fusefs.fails(7, *args, "--as", "agent")
    assert "the limit is 1000" in fusefs.fails(8, *args, "--max-file-bytes", "1000")
    fusefs(*args, "--as", "admin")


def test_paths_in_a_mounted_directory_name_their_agent(
    fusefs: Fusefs, agent: harness.Namespace, pg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(agent, "/d/a", "x")
    monkeypatch.delenv("HANGO_FS_TENANT")
    monkeypatch.delenv("HANGO_FS_AGENT")
    monkeypatch.delenv("HANGO_FS_DSN")

    def mounted(name: str, layout: str, tenant_id: str | None, agent_id: str | None) -> Path:
        root = tmp_path / name
        root.mkdir()
        registry.write(
            Record(str(root), 1, 0, 0, layout, None, None, tenant_id, agent_id, "s", pg, "2026-01-01T00:00:00", "")
        )
        return root

    one = mounted("one", "agent", agent.tenant_id, agent.agent_id)
    host = mounted("host", "host", None, None) / agent.tenant / agent.agent / "s-1"
    everything = mounted("all", "all", None, None) / agent.tenant / agent.agent
    for root in (one, host, everything):
        assert fusefs("versions", str(root / "d" / "a"), "--json").json[0]["path"] == "/d/a", root
    monkeypatch.chdir(one)
    assert fusefs("versions", "d/../d/a", "--version", "1").stdout == b"x"
    assert "not inside a mounted directory" in fusefs.fails(9, "versions", str(tmp_path / "elsewhere"))
    assert "not inside an agent's directory" in fusefs.fails(9, "versions", str(tmp_path / "host" / "x"))


def test_a_password_that_the_mounts_record_does_not_keep_is_asked_for(
    bare_fusefs: Fusefs, tmp_path: Path, suite_dir: Path
) -> None:
    folder = tempfile.mkdtemp(dir=suite_dir)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/.s.PGSQL.5432")
        server.listen()
        server.settimeout(60)
        asking = threading.Thread(target=ask_for_a_password, args=(server,))
        asking.start()
        registry.write(
            Record(
                str(tmp_path), 1, 0, 0, "agent", "t", "a", str(uuid.uuid4()), str(uuid.uuid4()), "s",
                f"host={folder} user=u dbname=x", "2026-01-01T00:00:00", "",
            )
        )  # fmt: skip
        error = bare_fusefs.fails(11, "versions", str(tmp_path / "a"))
        asking.join()
    assert "no password supplied" in error
    assert "hint: Set HANGO_FS_DSN to a DSN with the password, or put the password into ~/.pgpass." in error


def ask_for_a_password(server: socket.socket) -> None:
    """Be a Postgres that does not let one client in without its password."""
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)  # the start-up message
        connection.sendall(b"R" + struct.pack("!ii", 8, 3))  # AuthenticationCleartextPassword
        assert connection.recv(4096) == b""  # it goes away


# Conflicts


def conflict(agent: harness.Namespace, path: str, content: bytes, op: str = "write") -> str:
    made = str(uuid.uuid4())
    agent.execute(
        "insert into agent_file_conflicts (tenant_id, agent_id, id, path, expected_version, actual_version, op,"
        " content, session, principal) values (%s, %s, %s, %s, 1, 2, %s, %s, 's-1', 'agent')",
        (agent.tenant_id, agent.agent_id, made, path, op, content),
    )
    return made


def test_conflicts(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "winner")
    lost = conflict(agent, "/a", b"loser\xff")
    other = conflict(agent, "/b/c", b"to a place that is gone")
    assert {one["id"] for one in fusefs("conflicts", "list", "--json").json} == {lost, other}
    assert [one["id"] for one in fusefs("conflicts", "list", "/a", "--agent", agent.agent, "--json").json] == [lost]
    assert "/b/c" in fusefs("conflicts", "list").text
    assert fusefs("conflicts", "show", lost).stdout == b"loser\xff"
    assert "/a is at version 2 now" in fusefs("conflicts", "accept", lost).text
    assert fusefs("versions", "/a", "--agent", agent.agent, "--version", "1").stdout == b"winner"
    assert fusefs("versions", "/a", "--agent", agent.agent, "--version", "2").stdout == b"loser\xff"
    fusefs("conflicts", "accept", other)
    assert fusefs("conflicts", "list", "--json").json == []
    for wrong in (lost, "nonsense"):
        assert "there is no conflict" in fusefs.fails(3, "conflicts", "show", wrong)


def test_accepting_an_append_appends(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/log", "one\n")
    fusefs("conflicts", "accept", conflict(agent, "/log", b"two\n", "append"))
    fusefs("conflicts", "accept", conflict(agent, "/new", b"first\n", "append"))
    rows = agent.execute("select path, content from agent_files where kind = 'file' order by path")
    assert rows == [("/log", "one\ntwo\n"), ("/new", "first\n")]


def test_dropping_a_conflict_asks(fusefs: Fusefs, agent: harness.Namespace) -> None:
    lost = conflict(agent, "/a", b"12345")
    assert "5 B" in fusefs.fails(2, "conflicts", "drop", lost)
    assert fusefs("conflicts", "list", "--json").json
    fusefs("conflicts", "drop", lost, "--yes")
    assert fusefs("conflicts", "list", "--json").json == []


def test_a_refused_accept_keeps_the_conflict(fusefs: Fusefs, agent: harness.Namespace) -> None:
    lost = conflict(agent, "/skills/x", b"1")
    assert "reserved" in fusefs.fails(7, "conflicts", "accept", lost, "--as", "agent")
    assert fusefs("conflicts", "list", "--json").json


# Inside a mount


@pytest.fixture
def mounted(fusefs: Fusefs, agent: harness.Namespace, pg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is in a mount of the agent's session s-mount, and nothing else names the agent."""
    for name in ("HANGO_FS_TENANT", "HANGO_FS_AGENT", "HANGO_FS_DSN"):
        monkeypatch.delenv(name)
    root = tmp_path / "mnt"
    (root / "d").mkdir(parents=True)
    ids = (agent.tenant_id, agent.agent_id, "s-mount")
    registry.write(Record(str(root), 1, 0, 0, "agent", None, None, *ids, pg, "2026-01-01T00:00:00", ""))
    monkeypatch.chdir(root / "d")
    return root


def by(agent: harness.Namespace, path: str) -> tuple[str, str, str]:
    """Content, principal and session of a file's newest version."""
    (row,) = agent.execute("select content, updated_by, updated_session from agent_files where path = %s", (path,))
    return row[0], row[1], row[2]


def test_restore_inside_a_mount_is_its_sessions_change(
    fusefs: Fusefs, agent: harness.Namespace, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in ("one", "two"):
        put(agent, "/d/a", content)
        put(agent, "/memories/m", content)
    monkeypatch.setenv("HANGO_FS_SESSION", "s-left-over")
    fusefs("restore", "a", "--version", "1")
    assert by(agent, "/d/a") == ("one", "owner", "s-mount")
    fusefs("restore", str(mounted / "memories" / "m"), "--version", "1")
    assert by(agent, "/memories/m") == ("one", "owner", "s-mount")
    fusefs("restore", "a", "--version", "2", "--as", "agent", "--session", "s-said")
    assert by(agent, "/d/a") == ("two", "agent", "s-said")
    assert "reserved" in fusefs.fails(7, "restore", "../memories/m", "--version", "2", "--as", "agent")


def test_restore_in_a_hosts_mount_is_a_change_of_the_folders_session(
    fusefs: Fusefs, agent: harness.Namespace, pg: str, tmp_path: Path
) -> None:
    put(agent, "/a", "one")
    put(agent, "/a", "two")
    none = (None, None, None, None, None)
    registry.write(Record(str(tmp_path), 1, 0, 0, "host", *none, pg, "2026-01-01T00:00:00", ""))
    fusefs("restore", str(tmp_path / agent.tenant / agent.agent / "s-7" / "a"), "--version", "1")
    assert by(agent, "/a") == ("one", "owner", "s-7")


def test_conflicts_inside_a_mount_are_those_of_its_agent(
    fusefs: Fusefs, agent: harness.Namespace, pg: str, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(agent, "/a", "winner")
    lost = conflict(agent, "/a", b"loser")
    other = harness.make_namespace(pg)
    elsewhere = conflict(other, "/a", b"another agent's")
    assert [one["id"] for one in fusefs("conflicts", "list", "--json").json] == [lost]
    assert fusefs("conflicts", "show", lost).stdout == b"loser"
    assert "there is no conflict" in fusefs.fails(3, "conflicts", "show", elsewhere)
    fusefs("conflicts", "accept", lost)
    assert by(agent, "/a") == ("loser", "owner", "s-mount")
    named = ("--tenant", other.tenant, "--agent", other.agent, "--dsn", pg)
    assert [one["id"] for one in fusefs("conflicts", "list", "--json", *named).json] == [elsewhere]
    monkeypatch.setenv("HANGO_FS_AGENT", other.agent)
    assert fusefs("conflicts", "list", "--json").json == [], "the directory goes before the environment"
    monkeypatch.chdir("/")
    monkeypatch.setenv("HANGO_FS_DSN", pg)
    assert [one["id"] for one in fusefs("conflicts", "list", "--json").json] == [elsewhere]
    monkeypatch.delenv("HANGO_FS_AGENT")
    assert "change to a mounted directory" in fusefs.fails(10, "conflicts", "list")


def test_a_working_directory_that_was_deleted_is_in_no_mount(
    fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert fusefs("conflicts", "list", "--json").json == []


# Export and import


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return archive((info, content))


def test_a_namespace_survives_export_and_import(fusefs: Fusefs, agent: harness.Namespace, pg: str) -> None:
    put(agent, "/d/ünï/团队.md", "text\n")
    agent.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, content_bytes, kind, mode, uid, gid, mtime_ns)"
        " values (%(t)s, %(a)s, '/bin', '', %(binary)s, 'file', 2541, 7, 8, 1700000000123456789),"
        " (%(t)s, %(a)s, '/link', '../nowhere', null, 'symlink', 511, null, null, 5),"
        " (%(t)s, %(a)s, '/fifo', '', null, 'fifo', 384, null, null, 1000000000),"
        " (%(t)s, %(a)s, '/old', 'x', null, 'file', 420, null, null, -1)",
        {"t": agent.tenant_id, "a": agent.agent_id, "binary": bytes(range(256))},
    )
    long_path = "/long/" + "/".join(["n" * 200] * 4)
    put(agent, long_path, "deep")
    tar = fusefs("export", agent.agent).stdout
    other = harness.make_namespace(pg, agent.tenant)
    done = fusefs("import", f"{agent.tenant}/{other.agent}", stdin=tar)
    assert "imported" in done.stderr
    state = (
        "select path, content, content_bytes, kind, mode, uid, gid, mtime_ns, version from agent_files"
        " where agent_id = %s and path not in ('/memories', '/skills') order by path"
    )
    first = [tuple(row) for row in agent.execute(state, (agent.agent_id,))]
    assert [tuple(row) for row in agent.execute(state, (other.agent_id,))] == first
    assert len(first) >= 10
    again = fusefs("import", other.agent, stdin=tar)
    assert "0 entries imported" in again.stderr
    assert [tuple(row) for row in agent.execute(state, (other.agent_id,))] == first


def test_a_socket_is_left_out_and_said(fusefs: Fusefs, agent: harness.Namespace) -> None:
    agent.execute(
        "insert into agent_files (tenant_id, agent_id, path, content, kind) values (%s, %s, '/s', '', 'socket')",
        (agent.tenant_id, agent.agent_id),
    )
    done = fusefs("export", agent.agent)
    assert "/s: a socket has no form in a tar archive" in done.stderr
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        assert tar.getnames() == ["memories", "skills"]


def test_import_never_replaces_unasked(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/a", "mine")
    tar = member("./a", b"theirs")
    text = fusefs.fails(4, "import", agent.agent, stdin=tar)
    assert "/a: it exists already" in text
    assert "--replace" in text
    assert agent.execute("select content from agent_files where path = '/a'") == [("mine",)]
    fusefs("import", agent.agent, "--replace", stdin=tar)
    assert agent.execute("select content, version from agent_files where path = '/a'") == [("theirs", 2)]
    assert fusefs("versions", "/a", "--agent", agent.agent, "--version", "1").stdout == b"mine"


def test_import_does_not_put_a_file_over_a_directory(fusefs: Fusefs, agent: harness.Namespace) -> None:
    put(agent, "/d/a", "x")
    assert "a dir is there" in fusefs.fails(4, "import", agent.agent, "--replace", stdin=member("d", b"x"))
    assert "/d/a: Not a directory" in fusefs.fails(5, "import", agent.agent, stdin=member("d/a/b", b"x"))


def test_hard_links_become_copies(fusefs: Fusefs, agent: harness.Namespace) -> None:
    link = tarfile.TarInfo("b")
    link.type, link.linkname = tarfile.LNKTYPE, "a"
    fusefs("import", agent.agent, stdin=archive((tarfile.TarInfo("a"), b"same"), (link, b"")))
    assert agent.execute("select path, content from agent_files where kind = 'file' order by path") == [
        ("/a", "same"),
        ("/b", "same"),
    ]


@pytest.mark.parametrize(
    ("tar", "code", "text"),
    [
        (member("/etc/passwd", b"x"), 9, "an absolute name"),
        (member("a/../../b", b"x"), 9, ".. in a name"),
        (member("link", kind=tarfile.LNKTYPE, link="../x"), 9, ".. in a name"),
        (member("tty", kind=tarfile.CHRTYPE), 9, "it is a device"),
        (member("disk", kind=tarfile.BLKTYPE), 9, "it is a device"),
        (member("big", b"x" * 2_000_000), 8, "the limit is 1048576"),
        (member("n" * 256, b"x"), 9, "the limit is 255"),
        (member("a/" * 65 + "b", b"x"), 9, "the limit is 64"),
        (member(".fusefs", b"x"), 7, "belongs to the file system"),
        (member("bad\udcff", b"x"), 9, "not valid UTF-8"),
        (b"", 2, "cannot be read"),
        (b"no archive at all", 2, "cannot be read"),
        (member("cut", b"x" * 5000)[:3000], 2, "cannot be read"),
    ],
)
def test_import_refuses_what_does_not_fit(
    bare_fusefs: Fusefs, module_pg: str, tar: bytes, code: int, text: str
) -> None:
    agent = harness.make_namespace(module_pg)
    before = agent.execute("select count(*) from agent_files")
    error = bare_fusefs.fails(code, "import", f"{agent.tenant}/{agent.agent}", "--dsn", module_pg, stdin=tar)
    assert text in error
    assert agent.execute("select count(*) from agent_files") == before


def test_import_obeys_the_quota(fusefs: Fusefs, agent: harness.Namespace) -> None:
    fusefs("agent", "quota", agent.agent, "--quota", "10")
    fusefs("import", agent.agent, stdin=member("a", b"12345678"))
    assert "the quota is 10" in fusefs.fails(8, "import", agent.agent, stdin=member("b", b"123"))
    fusefs("import", agent.agent, "--replace", stdin=member("a", b"1234567890"))


def test_import_keeps_every_sessions_files(fusefs: Fusefs, agent: harness.Namespace) -> None:
    tar = archive(
        (tarfile.TarInfo("large_tool_results/s-1/call"), b"1"),
        (tarfile.TarInfo("conversation_history/s-2.md"), b"2"),
        (tarfile.TarInfo("memories/m"), b"3"),
    )
    fusefs("import", agent.agent, stdin=tar)
    with tarfile.open(fileobj=io.BytesIO(fusefs("export", agent.agent).stdout)) as exported:
        names = exported.getnames()
    assert {"large_tool_results/s-1/call", "conversation_history/s-2.md", "memories/m"} <= set(names)


def test_an_agent_of_several_tenants_must_be_named_with_its_tenant(
    fusefs: Fusefs, pg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness.make_namespace(pg, agent="same")
    harness.make_namespace(pg, agent="same")
    text = fusefs.fails(2, "export", "same")
    assert "2 tenants have an agent same" in text
    assert "--tenant" in text
    assert fusefs("export", f"{one.tenant}/same").code == 0
    assert fusefs("export", one.agent_id).code == 0
    assert "there is no agent nope" in fusefs.fails(3, "export", "nope")
