"""Versions for tools that know nothing of versions, between two sessions with a daemon each."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.mount.posix_support import RENAME_EXCHANGE, errno_of, in_child, opened, refused, renameat2
from tests.mount.sides import STALE, Duo, HostFolder, Side, View, eventually, finish

_numbers = itertools.count(1)
# The daemon logs each refusal; they are what these tests are about.
EXPECTED_LOG = r"stale|conflict|refused"


@pytest.fixture(scope="module", params=["two-daemons", "one-host"])
def mounts(request: pytest.FixtureRequest, module_mount: harness.MountFactory) -> tuple[View, ...]:
    """Two sessions of one agent: in a daemon each, or both in the daemon of a host."""
    names = ("s-one", "s-two")
    if request.param == "two-daemons":
        pair = tuple(module_mount(session=name) for name in names)
        for mount in pair:
            mount.expect_log(EXPECTED_LOG)
        return pair
    host = module_mount(layout="host")
    host.expect_log(EXPECTED_LOG)
    agent = host.path / module_mount.namespace.tenant / module_mount.namespace.agent
    folders = tuple(HostFolder(agent / f"{name}-hosted", f"{name}-hosted") for name in names)
    for folder in folders:
        folder.path.mkdir()
    return folders


@pytest.fixture
def duo(mounts: tuple[View, ...], module_namespace: harness.Namespace, request: pytest.FixtureRequest) -> Iterator[Duo]:
    found = Duo(mounts, module_namespace, f"{request.node.originalname.removeprefix('test_')}-{next(_numbers)}")
    yield found
    found.close()


@contextlib.contextmanager
def third(duo: Duo, mount: harness.Mount) -> Iterator[Side]:
    """Another session's view of the same directory; its daemon ends with the block."""
    mount.expect_log(EXPECTED_LOG)
    side = Side(mount, duo.a.root.name)
    with contextlib.closing(side):
        yield side
    mount.umount()


# The first check: open with O_TRUNC, truncate, rename over


def test_builtin_redirection_over_a_stale_read(duo: Duo) -> None:
    duo.stale("f")
    # echo is a builtin that ignores errors of write and close: only the open can tell.
    result = duo.a.refused("echo mine > f")
    assert "f: Stale file handle" in result.err
    assert duo.files.content("f") == b"two\n"
    assert len(duo.a.errors("f")) == 1, "the kernel asks twice; it is one refusal"
    assert "read it again" in duo.a.errors("f")[0]
    assert duo.b.errors("f") == []
    assert duo.files.conflicts("f") == [], "nothing was written, nothing is lost"
    duo.a.refused("printf again > f")
    # What the text says to do helps.
    duo.a.ok("cat f > /dev/null; echo mine > f")
    assert duo.files.content("f") == b"mine\n"


def test_stale_open_for_writing_in_python(duo: Duo) -> None:
    duo.stale("f")
    with refused(errno.ESTALE):
        (duo.a / "f").write_text("mine")
    with refused(errno.ESTALE):
        os.truncate(duo.a / "f", 0)
    with opened(duo.a / "f", os.O_RDWR) as fd:
        assert os.pread(fd, 10, 0) == b"two\n"
        os.ftruncate(fd, 2)
    assert duo.files.content("f") == b"tw"


def test_stale_copy_over(duo: Duo) -> None:
    duo.stale("f")
    duo.a.ok("echo other > other")
    for command in ("cp other f", "cat other > f", "tee f < other", "dd if=other of=f status=none", "sort -o f other"):
        duo.a.refused(command)
        assert duo.files.content("f") == b"two\n", command
    duo.a.ok("echo more >> f")
    assert duo.files.content("f") == b"two\nmore\n"


def test_stale_rename_over(duo: Duo) -> None:
    duo.stale("f")
    duo.a.ok("echo mine > temporary")
    duo.a.refused("mv -f temporary f")
    assert duo.files.content("f") == b"two\n"
    assert (duo.a / "temporary").read_text() == "mine\n"
    assert len(duo.a.errors("f")) == 1
    duo.a.ok("cat f > /dev/null; mv -f temporary f")
    assert duo.files.content("f") == b"mine\n"
    assert duo.files.content("temporary") is None


def test_sed_in_place_on_a_stale_read(duo: Duo, tmp_path: Path) -> None:
    # The read and the rename of `sed -i` are one command; here another session comes between them.
    duo.given("f")
    pause = tmp_path / "pause"
    os.mkfifo(pause)
    process = duo.a.start(f"sed -i -e 's/one/mine/' -e 'w /dev/null' -e \"1e cat {pause}\" f")
    with pause.open("w"):
        # sed has opened the file and read its line when it runs the command.
        duo.b.ok("echo two > f")
    result = finish(process)
    assert result.code != 0 and STALE in result.err
    assert duo.files.content("f") == b"two\n"
    # Its temporary file was its own to clean up.
    assert (duo.b / "f").read_text() == "two\n"


def test_require_read_refuses_what_was_never_read(duo: Duo, module_mount: harness.MountFactory) -> None:
    duo.b.ok("echo one > f")
    with third(duo, module_mount("--require-read", session="s-strict")) as side:
        side.refused("echo mine > f")
        side.ok("cat f > /dev/null; echo mine > f; echo new > own; echo newer > own")
        assert duo.files.content("f") == b"mine\n"


def test_version_check_open_compares_with_the_open_only(duo: Duo, module_mount: harness.MountFactory) -> None:
    duo.b.ok("echo one > f")
    with third(duo, module_mount("--version-check", "open", session="s-loose")) as side:
        side.ok("cat f > /dev/null")
        duo.b.ok("echo two > f")
        side.ok("echo mine > f")
        assert duo.files.content("f") == b"mine\n"
        duo.b.ok("cat f > /dev/null; echo three > f")
        side.ok("echo moved > temporary; mv temporary f")
        assert duo.files.content("f") == b"moved\n"
        fd = os.open(side / "f", os.O_WRONLY | os.O_TRUNC)
        os.write(fd, b"late")
        duo.b.ok("cat f > /dev/null; echo four > f")
        with refused(errno.ESTALE):
            os.close(fd)
        assert duo.files.content("f") == b"four\n"


def test_restarted_daemon_must_read_what_others_changed(duo: Duo, module_mount: harness.MountFactory) -> None:
    duo.b.ok("echo one > f; echo own > untouched")
    with third(duo, module_mount(session="s-again")) as side:
        side.ok("cat f untouched > /dev/null")
        duo.b.ok("echo two > f")
    with third(duo, module_mount(session="s-again")) as side:
        side.refused("echo mine > f")
        side.ok("cat f > /dev/null; echo mine > f")
        assert duo.files.content("f") == b"mine\n"


def test_restarted_daemon_knows_what_was_only_appended_to(duo: Duo, module_mount: harness.MountFactory) -> None:
    """The newest version is the session's own, but it had not seen what it appended to."""
    duo.b.ok("echo one > f; echo one > g")
    with third(duo, module_mount(session="s-third")) as side:
        side.ok("cat f g > /dev/null")
        duo.b.ok("echo two > f; echo two > g")
        side.ok("echo mine >> f; cat g > /dev/null; echo all > g; echo more >> g; echo own > h; echo more >> h")
    with third(duo, module_mount(session="s-third")) as side:
        side.refused("echo mine > f")
        side.ok("cat f > /dev/null; echo mine > f")
        side.ok("echo mine > g; echo mine > h")


# What is not a conflict


def test_file_never_read_may_be_replaced(duo: Duo) -> None:
    duo.b.ok("echo one > f; echo two > f")
    eventually((duo.a / "f").exists, "the file in session a")
    duo.a.ok("stat f > /dev/null; ls -l > /dev/null; test -s f; echo mine > f")
    assert duo.files.content("f") == b"mine\n"
    # Writing is seeing: a's own version is what a builds on now.
    duo.b.ok("cat f > /dev/null; echo theirs > f")
    duo.a.refused("echo mine > f")


def test_file_never_read_may_be_replaced_while_its_announcement_is_under_way(duo: Duo) -> None:
    duo.b.ok("for i in $(seq 20); do echo one > f$i; done")
    eventually((duo.a / "f20").exists, "the files in session a")
    for i in range(1, 21):
        duo.a.ok(f"echo mine > t{i}")
        (duo.b / f"f{i}").write_text("two\n")
        os.rename(duo.a / f"t{i}", duo.a / f"f{i}")
        assert duo.files.content(f"f{i}") == b"mine\n"
        assert b"two\n" in duo.files.superseded(f"f{i}")


def test_one_session_never_conflicts_with_itself(duo: Duo) -> None:
    duo.a.ok("echo one > f; exec 3< f; cat f; echo two > f; cat <&3; (echo three > f); echo four > f")
    with opened(duo.a / "f", os.O_RDWR) as one, opened(duo.a / "f", os.O_RDWR) as two:
        os.pwrite(one, b"1", 0)
        os.pwrite(two, b"2", 1)
        in_child(lambda: (duo.a / "f").write_text("from a child"))
        os.pwrite(one, b"F", 0)
    assert duo.files.content("f") == b"From a child"
    assert duo.files.conflicts("f") == [] and duo.a.errors("f") == []


def test_remove_is_always_allowed(duo: Duo) -> None:
    duo.stale("f", newer="theirs\n")
    duo.a.ok("rm f")
    assert duo.files.content("f") is None
    assert duo.files.history("f")[-1][0] == "delete"
    assert duo.files.superseded("f")[-1] == b"theirs\n"
    eventually(lambda: not (duo.b / "f").exists(), "the removal in session b")


def test_equal_content_makes_no_new_version(duo: Duo) -> None:
    duo.a.ok("seq 1000 > f; cp f copy")
    identity = duo.files.identity("f")
    duo.a.ok("cat copy > f; cp copy f; touch f; chmod 600 f; sed -n p f > /dev/null; true >> f")
    assert duo.files.identity("f") == identity
    (duo.a / "f").write_bytes((duo.a / "copy").read_bytes())
    assert duo.files.identity("f") == identity
    duo.a.ok("echo more >> f")
    assert duo.files.identity("f") == (identity[0], identity[1] + 1)


def test_same_bytes_from_both_sessions(duo: Duo) -> None:
    duo.b.ok("echo one > f; cat f > /dev/null")
    eventually(lambda: os.stat(duo.a / "f").st_size == 4, "the file in session a")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"agreed\n")
    duo.b.ok("echo agreed > f")
    # Nothing is lost either way, so success and refusal are both honest; the content is the point.
    assert errno_of(lambda: os.close(fd)) in (0, errno.ESTALE)
    assert duo.files.content("f") == b"agreed\n"


# The second check: write


def test_write_after_the_base_was_superseded(duo: Duo) -> None:
    duo.given("f")
    with pytest.raises(OSError, match=STALE):
        with opened(duo.a / "f", os.O_WRONLY) as fd:
            duo.b.ok("echo longer than one > f")
            eventually(lambda: os.stat(duo.a / "f").st_size == 16, "the new size in session a")
            with refused(errno.ESTALE):
                os.pwrite(fd, b"mine", 0)
            os.write(fd, b"again")
    assert duo.files.content("f") == b"longer than one\n"
    assert len(duo.a.errors("f")) == 1


def test_refused_handle_written_again(duo: Duo) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_RDWR | os.O_TRUNC)
    os.write(fd, b"kept\0bytes\xff ")
    duo.b.ok("cat f > /dev/null; echo two > f")
    for _ in range(2):
        with refused(errno.ESTALE):
            os.fsync(fd)
    for _ in range(2):
        with refused(errno.ESTALE):
            os.write(fd, b"more")
    with refused(errno.ESTALE):
        os.ftruncate(fd, 0)
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") == b"two\n"
    assert duo.files.conflicts("f") == [b"kept\0bytes\xff "]
    told = duo.a.errors("f")
    assert len(told) == 1, "\n".join(told)
    assert b"kept\0bytes\xff " in duo.a.conflict_files()
    # The file itself is as usable as before.
    duo.a.ok("cat f > /dev/null; echo three > f")
    assert duo.files.content("f") == b"three\n"


# The third check: flush

# Closed on purpose: an error that the destructor of a file object meets is lost by Python itself.
PYTHON_COPY = "python3 -c \"import sys; f = open('f', 'w'); f.write(sys.stdin.read()); f.close()\""


def test_close_after_another_session_was_faster(duo: Duo) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"mine\n")
    duo.b.ok("echo theirs > f")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") == b"theirs\n"
    assert duo.files.conflicts("f") == [b"mine\n"]
    assert b"mine\n" in duo.a.conflict_files()
    (line,) = duo.a.errors("f")
    assert "conflicts" in line, "the line says where the bytes are"
    assert duo.b.errors("f") == []
    eventually(lambda: (duo.a / "f").read_text() == "theirs\n", "session a reads the winner's text")


def test_tool_that_checks_close_exits_non_zero(duo: Duo) -> None:
    duo.given("f")
    for command in (
        "cat > f",
        "tee f > /dev/null",
        PYTHON_COPY,
    ):
        duo.a.ok("cat f > /dev/null")
        duo.b.ok("cat f > /dev/null")
        process = duo.a.start(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write("mine\n")
        process.stdin.flush()
        # Python reads all of its input first: until then only its truncation shows.
        size = 0 if command is PYTHON_COPY else 5
        eventually(lambda size=size: os.stat(duo.a / "f").st_size == size, "the change in session a")  # type: ignore[misc]
        duo.b.ok(f"echo '{command[:3]}' > f")
        result = finish(process)
        assert result.code != 0, command
        assert STALE in result.err, command
        assert duo.files.content("f") == f"{command[:3]}\n".encode()


def test_create_that_meets_a_new_file(duo: Duo) -> None:
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"mine\n")
    duo.b.ok("echo theirs > f")
    # In two daemons b cannot know of the name. In one, a's bytes are committed first, and b replaces them.
    if errno_of(lambda: os.close(fd)) == errno.ESTALE:
        assert duo.files.conflicts("f") == [b"mine\n"]
    else:
        assert duo.files.superseded("f") == [b"mine\n"]
    assert duo.files.content("f") == b"theirs\n"


# Whether the announcement of the other session's change arrives before our close is a matter of luck:
# both orders are tested, and the outcome must not depend on it.
BOTH_ORDERS = pytest.mark.parametrize("announced", [False, True], ids=["before-announcement", "after-announcement"])


@BOTH_ORDERS
def test_write_to_a_file_that_another_session_removed(duo: Duo, announced: bool) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"mine\n")
    duo.b.ok("rm f")
    if announced:
        eventually(lambda: os.fstat(fd).st_nlink == 0, "the removal in session a")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") is None
    assert duo.files.conflicts("f") == [b"mine\n"]


@BOTH_ORDERS
def test_write_to_a_file_that_another_session_replaced(duo: Duo, announced: bool) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"mine\n")
    duo.b.ok("echo theirs > temporary; mv temporary f")
    if announced:
        eventually(lambda: os.fstat(fd).st_nlink == 0, "the replacement in session a")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") == b"theirs\n"
    assert duo.files.conflicts("f") == [b"mine\n"]


@BOTH_ORDERS
def test_write_to_a_file_that_another_session_moved(duo: Duo, announced: bool) -> None:
    # A rename is no change of content: the write follows the file.
    duo.given("f")
    duo.b.ok("mkdir d")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"mine\n")
    duo.b.ok("mv f d/g")
    if announced:
        eventually((duo.a / "d" / "g").exists, "the new name in session a")
    os.close(fd)
    assert duo.files.content("f") is None
    assert duo.files.content("d/g") == b"mine\n"


@BOTH_ORDERS
def test_create_in_a_directory_that_another_session_moved(duo: Duo, announced: bool) -> None:
    duo.a.ok("mkdir d")
    eventually((duo.b / "d").is_dir, "the directory in session b")
    fd = os.open(duo.a / "d" / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"mine\n")
    duo.b.ok("mv d e")
    if announced:
        eventually((duo.a / "e").is_dir, "the new name in session a")
    os.close(fd)
    assert duo.files.content("d/f") is None
    assert duo.files.content("e/f") == b"mine\n"
    eventually(lambda: (duo.b / "e" / "f").read_bytes() == b"mine\n", "the file in session b")


def test_delete_and_recreate_between_read_and_write(duo: Duo) -> None:
    duo.given("f")
    duo.b.ok("rm f; echo anew > f")
    duo.a.refused("echo mine > f")
    assert duo.files.content("f") == b"anew\n"
    # The same by a program that knows only the table: another lineage, at version 1 like the one that a saw.
    duo.given("g")
    namespace = duo.files.namespace
    keys = (namespace.tenant_id, namespace.agent_id, duo.files.path("g"))
    namespace.execute("DELETE FROM agent_files WHERE tenant_id = %s AND agent_id = %s AND path = %s", keys)
    namespace.execute("INSERT INTO agent_files (tenant_id, agent_id, path, content) VALUES (%s, %s, %s, 'sql')", keys)
    assert duo.files.identity("g")[1] == 1
    duo.a.refused("echo mine > g")
    assert duo.files.content("g") == b"sql"


def test_update_by_a_program_that_knows_only_the_table(duo: Duo) -> None:
    duo.given("f")
    namespace = duo.files.namespace
    namespace.execute(
        "UPDATE agent_files SET content = 'by sql' WHERE tenant_id = %s AND agent_id = %s AND path = %s",
        (namespace.tenant_id, namespace.agent_id, duo.files.path("f")),
    )
    duo.a.refused("echo mine > f")
    eventually(lambda: (duo.a / "f").read_text() == "by sql", "session a reads the new text")
    duo.a.ok("echo mine > f")
    assert duo.files.content("f") == b"mine\n"
    assert b"by sql" in duo.files.superseded("f")


# Flush before the first write, descriptors that are shared


def test_flush_before_the_first_write(duo: Duo) -> None:
    duo.a.ok("echo before > f")
    duo.a.ok("{ echo a; echo b; } > f; { echo a; echo b; } > g; (echo c; /bin/echo d) > h")
    assert duo.files.content("f") == duo.files.content("g") == b"a\nb\n"
    assert duo.files.content("h") == b"c\nd\n"
    for name in ("f", "g", "h"):
        assert all(size > 0 for _, _, size in duo.files.history(name)), f"{name} was stored empty in between"
        eventually(lambda name=name: (duo.b / name).stat().st_size == 4 or name == "f", "the size in session b")
    assert duo.files.conflicts("f") == []


def test_duplicate_closed_before_the_write(duo: Duo) -> None:
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    twin = os.dup(fd)
    os.close(fd)
    os.write(twin, b"late")
    os.close(twin)
    assert duo.files.content("f") == b"late"


def test_empty_files_are_stored(duo: Duo) -> None:
    # An empty create or truncate that is closed only once is committed at release, soon after close.
    duo.a.ok("echo text > f; : > f; : > g; touch h")
    for name in ("f", "g", "h"):
        eventually(lambda name=name: duo.files.content(name) == b"", f"{name} is stored empty")
        eventually(lambda name=name: (duo.b / name).read_bytes() == b"", f"session b sees {name}")
    assert duo.files.superseded("f") == [b"text\n"]


def test_what_an_open_without_writing_makes_or_empties_is_stored(duo: Duo) -> None:
    """flock(1) makes its file by O_RDONLY | O_CREAT; O_RDONLY | O_TRUNC empties one."""
    duo.a.ok("echo text > f; flock g true")
    for name, flags in (("f", os.O_TRUNC), ("h", os.O_CREAT | os.O_TRUNC), ("i", os.O_CREAT | os.O_EXCL)):
        os.close(os.open(duo.a / name, os.O_RDONLY | flags))
    for name in ("f", "g", "h", "i"):
        eventually(lambda name=name: duo.files.content(name) == b"", f"{name} is stored empty")
        eventually(lambda name=name: (duo.b / name).read_bytes() == b"", f"session b sees {name}")
        assert duo.files.identity(name)[1] == (2 if name == "f" else 1)
    assert duo.files.superseded("f") == [b"text\n"]


def test_two_sessions_make_a_lock_file_at_once(duo: Duo) -> None:
    """Who wanted only that it is there takes the one that others made first: nothing of its own is lost."""
    mine = os.open(duo.a / "lock", os.O_RDONLY | os.O_CREAT)
    theirs = os.open(duo.b / "lock", os.O_RDONLY | os.O_CREAT)
    os.close(mine)
    eventually(lambda: duo.files.content("lock") == b"", "it is stored")
    os.close(theirs)
    duo.a.ok("echo text > lock")
    eventually(lambda: (duo.b / "lock").read_text() == "text\n", "session b has the same file")
    assert [entry[0] for entry in duo.files.history("lock")] == ["create", "write"]
    assert not duo.files.conflicts("lock")
    assert not duo.b.errors("lock")


# Appends


def test_append_from_eight_processes_in_four_sessions(duo: Duo, module_mount: harness.MountFactory) -> None:
    with contextlib.ExitStack() as stack:
        more = [stack.enter_context(third(duo, module_mount(session=f"s-more{i}"))) for i in range(2)]
        _append_from_everywhere(duo, [*duo.sides, *more])


def _append_from_everywhere(duo: Duo, sides: list[Side]) -> None:
    for side in sides:
        eventually(side.root.is_dir, "the directory in every session")
    script = 'for i in $(seq 25); do echo "writer {w} line $i" >> log || exit 1; done'
    processes = [side.start(script.format(w=2 * n + k)) for n, side in enumerate(sides) for k in range(2)]
    for process in processes:
        result = finish(process)
        assert result.code == 0, result.err
    data = duo.files.content("log")
    assert data is not None
    lines = data.decode().splitlines()
    expected = {f"writer {w} line {i}" for w in range(8) for i in range(1, 26)}
    assert expected - set(lines) == set(), "lost"
    assert sorted(lines) == sorted(expected)
    for w in range(8):
        mine = [line for line in lines if line.startswith(f"writer {w} ")]
        assert mine == [f"writer {w} line {i}" for i in range(1, 26)], "one writer's lines keep their order"
    for side in sides:
        eventually(lambda side=side: (side / "log").read_bytes() == data, "every session reads the same log")
    assert duo.files.conflicts("log") == []


def test_append_needs_no_fresh_read(duo: Duo) -> None:
    duo.stale("f")
    duo.a.ok("echo appended >> f")
    assert duo.files.content("f") == b"two\nappended\n"
    with opened(duo.a / "f", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"a1\n")
        duo.b.ok("echo b1 >> f")
        os.write(fd, b"a2\n")
    data = duo.files.content("f")
    assert data is not None
    assert sorted(data.splitlines()) == [b"a1", b"a2", b"appended", b"b1", b"two"]
    eventually(lambda: (duo.a / "f").read_bytes() == data, "session a reads all of it")
    eventually(lambda: (duo.b / "f").read_bytes() == data, "session b reads all of it")


def test_append_creates_in_both_sessions_at_once(duo: Duo) -> None:
    for i in range(5):
        processes = [side.start(f"echo {n} >> log{i}") for n, side in enumerate(duo.sides)]
        results = [finish(process) for process in processes]
        assert [result.code for result in results] == [0, 0], results
        data = duo.files.content(f"log{i}")
        assert data is not None and sorted(data.split()) == [b"0", b"1"]


@BOTH_ORDERS
def test_append_to_a_removed_file_is_a_conflict(duo: Duo, announced: bool) -> None:
    duo.given("f")
    fd = os.open(duo.a / "f", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"appended")
    duo.b.ok("rm f")
    if announced:
        eventually(lambda: os.fstat(fd).st_nlink == 0, "the removal in session a")
    with refused(errno.ESTALE):
        os.close(fd)
    assert duo.files.content("f") is None
    assert duo.files.conflicts("f") == [b"appended"]


# Races with one winner


def test_rename_over_race_tells_exactly_one_loser(duo: Duo) -> None:
    for i in range(5):
        name = f"f{i}"
        duo.given(name)
        duo.b.ok(f"cat {name} > /dev/null")
        for n, side in enumerate(duo.sides):
            side.ok(f"echo from {n} > temporary{n}")
        results = [finish(p) for p in [side.start(f"mv -f temporary{n} {name}") for n, side in enumerate(duo.sides)]]
        losers = [n for n, result in enumerate(results) if result.code]
        assert len(losers) == 1, f"{len(losers)} losers in round {i}: {results}"
        assert STALE in results[losers[0]].err
        assert duo.files.content(name) == f"from {1 - losers[0]}\n".encode()
        told = duo.sides[losers[0]].errors(name)
        assert len(told) == 1, "\n".join(told)


def test_lock_file_has_one_winner(duo: Duo) -> None:
    # `set -o noclobber` opens with O_CREAT|O_EXCL.
    for i in range(10):
        script = f"set -o noclobber; : > lock{i}"
        results = [finish(p) for p in [side.start(script) for side in duo.sides]]
        assert sorted(result.code == 0 for result in results) == [False, True], f"round {i}: {results}"
        assert all("cannot overwrite" in result.err for result in results if result.code)


@pytest.mark.parametrize("lock", ["mkdir lock 2> /dev/null", "( set -o noclobber; : > lock ) 2> /dev/null"])
def test_lock_holder_reads_what_the_last_one_wrote(duo: Duo, lock: str, request: pytest.FixtureRequest) -> None:
    duo.a.ok("rm -rf lock counter; echo 0 > counter")
    script = (
        f"for i in $(seq 10); do until {lock}; do read -t 0.01 <> <(:) || true; done;"
        " n=$(cat counter) || exit 1; echo $((n + 1)) > counter || exit 2; rm -r lock || exit 3; done"
    )
    results = [finish(p) for p in [side.start(script) for side in duo.sides]]
    assert [result.code for result in results] == [0, 0], results
    assert duo.files.content("counter") == b"20\n"


# Lineages


def test_sed_in_place_is_a_new_version(duo: Duo) -> None:
    duo.a.ok("echo one > f")
    node_id, version = duo.files.identity("f")
    for i in range(1, 4):
        duo.a.ok(f"sed -i 's/$/ {i}/' f")
        assert duo.files.identity("f") == (node_id, version + i)
    assert duo.files.content("f") == b"one 1 2 3\n"
    assert duo.files.superseded("f") == [b"one\n", b"one 1\n", b"one 1 2\n"]
    assert os.listdir(duo.a.root) == ["f"]


@pytest.mark.parametrize("backupcopy", ["auto", "yes", "no"])
def test_vim_saves_a_new_version(duo: Duo, backupcopy: str) -> None:
    name = f"f-{backupcopy}"
    duo.a.ok(f"echo one > {name}")
    node_id, version = duo.files.identity(name)
    edit = f"vim -Nes -u NONE -i NONE --cmd 'set directory=. backupcopy={backupcopy}' -c '%s/$/ more/' -c wq {name}"
    for i in range(1, 3):
        duo.a.ok(edit)
        found_id, found_version = duo.files.identity(name)
        assert found_id == node_id
        assert found_version > version
        version = found_version
        assert duo.files.content(name) == b"one" + b" more" * i + b"\n"
    assert duo.files.superseded(name)[0] == b"one\n"
    duo.b.ok(f"cat {name} > /dev/null; echo theirs > {name}")
    duo.a.refused(f"echo mine > {name}")


def test_rename_keeps_the_lineage(duo: Duo) -> None:
    duo.a.ok("echo one > f; mkdir d")
    identity = duo.files.identity("f")
    duo.a.ok("mv f g; mv g d/h; mv d e")
    assert duo.files.identity("e/h") == identity


def test_exchange_keeps_ids_with_their_content(duo: Duo) -> None:
    duo.a.ok("echo one > f; echo two > g")
    before = duo.files.identity("f"), duo.files.identity("g")
    renameat2(duo.a / "f", duo.a / "g", RENAME_EXCHANGE)
    assert (duo.files.identity("g"), duo.files.identity("f")) == before
    eventually(lambda: (duo.b / "f").read_text() == "two\n", "the exchange in session b")


def test_create_after_unlink_continues_the_lineage(duo: Duo) -> None:
    duo.a.ok("echo one > f")
    node_id, version = duo.files.identity("f")
    duo.a.ok("rm f; echo two > f")
    found_id, found_version = duo.files.identity("f")
    assert found_id == node_id
    assert found_version > version
    assert duo.files.superseded("f") == [b"one\n"]


def test_create_after_unlink_of_a_stale_file(duo: Duo) -> None:
    duo.stale("f", newer="theirs\n")
    result = duo.a.run("rm f; echo mine > f")
    assert result.code != 0 and STALE in result.err
    assert b"theirs\n" in duo.files.superseded("f")


def test_git_checkout_over_another_sessions_change(duo: Duo) -> None:
    environment = "export HOME=$PWD/home GIT_CONFIG_NOSYSTEM=1; mkdir -p home; git config --global safe.directory '*'; "
    setup = (
        "git config --global user.name t; git config --global user.email t@example.invalid; git init -q -b main repo;"
        "cd repo; echo main > f; git add f; git commit -qm main; git checkout -qb work; echo work > f;"
        "git commit -qam work; git checkout -q main"
    )
    duo.a.ok(environment + setup)
    assert duo.files.content("repo/f") == b"main\n"
    duo.b.ok("cat repo/f; echo theirs > repo/f")
    eventually(lambda: (duo.a / "repo/f").stat().st_size == 7, "the change in session a")
    # git compares the time and size, sees the change, and leaves the file alone.
    result = duo.a.run(environment + "cd repo; git checkout work")
    assert result.code == 1 and "would be overwritten" in result.err
    assert duo.files.content("repo/f") == b"theirs\n"
    # --force unlinks and creates: the create is checked against what the session had seen.
    duo.b.ok("echo theirs again > repo/f")
    result = duo.a.run(environment + "cd repo; git checkout -f work")
    assert result.code != 0 and STALE in result.err
    assert b"theirs again\n" in duo.files.superseded("repo/f")


# Replaced and mapped files


def test_handle_on_a_replaced_file_keeps_its_version(duo: Duo) -> None:
    duo.given("f", "old text\n")
    with opened(duo.a / "f", os.O_RDONLY) as fd:
        duo.b.ok("echo new > temporary; mv temporary f")
        eventually(lambda: (duo.a / "f").read_text() == "new\n", "the new text in session a")
        assert os.pread(fd, 100, 0) == b"old text\n"
        assert os.fstat(fd).st_size == 9
    assert duo.files.content("f") == b"new\n"


def test_stores_through_mmap_after_close(duo: Duo) -> None:
    duo.a.ok("head -c 8192 /dev/zero | tr '\\0' x > f")

    def work() -> None:
        fd = os.open(duo.a / "f", os.O_RDWR)
        view = mmap.mmap(fd, 8192)
        os.close(fd)
        view[0:5] = b"first"
        view[5000:5006] = b"second"
        view.close()

    in_child(work)

    def stored() -> bool:
        data = duo.files.content("f")
        return data is not None and data[:5] == b"first" and data[5000:5006] == b"second" and len(data) == 8192

    eventually(stored, "the stores are in Postgres")
    eventually(lambda: (duo.b / "f").read_bytes()[5000:5006] == b"second", "the stores in session b")


def test_stores_through_mmap_that_lose_the_race(duo: Duo) -> None:
    duo.a.ok("head -c 4096 /dev/zero | tr '\\0' x > f")
    eventually(lambda: (duo.b / "f").read_bytes() == b"x" * 4096, "the file in session b")
    fd = os.open(duo.a / "f", os.O_RDWR)
    view = mmap.mmap(fd, 4096)
    os.close(fd)
    view[0:4] = b"mine"
    duo.b.ok("echo theirs > f")
    view.close()
    eventually(lambda: len(duo.files.conflicts("f")) == 1, "the refusal at release is kept as a conflict")
    assert duo.files.conflicts("f")[0] == b"mine" + b"x" * 4092
    assert duo.files.content("f") == b"theirs\n"
    eventually(lambda: len(duo.a.errors("f")) == 1, "a line in errors")


# What the control directory shows


def test_old_versions_are_readable(duo: Duo) -> None:
    duo.a.ok("echo one > f; echo two > f; echo three >> f; printf 'bin\\0\\377' > f; rm f; echo again > f")
    assert duo.a.version("f", 1) == b"one\n"
    assert duo.a.version("f", 2) == b"two\n"
    assert duo.a.version("f", 3) == b"two\nthree\n"
    assert duo.a.version("f", 4) == b"bin\0\xff"
    versions = duo.a.control / "versions" / duo.a.root.name / "f"
    assert {"1", "2", "3", "4"} <= set(os.listdir(versions))
    assert duo.b.version("f", 2) == b"two\n"
    with refused(errno.EACCES, errno.EROFS, errno.EPERM):
        (versions / "1").write_text("rewritten history")
    with refused(errno.ENOENT):
        duo.a.version("f", 99)
    with refused(errno.ENOENT):
        duo.a.version("missing", 1)


def test_old_version_can_be_restored_with_cp(duo: Duo) -> None:
    duo.a.ok("echo one > f; echo two > f")
    old = duo.a.control / "versions" / duo.a.root.name / "f" / "1"
    duo.a.ok(f"cp {old} f")
    assert duo.files.content("f") == b"one\n"
    assert duo.files.identity("f")[1] == 3


def test_control_directory_is_hidden_and_complete(duo: Duo) -> None:
    top: Path = duo.a.mount.path
    assert ".fusefs" not in os.listdir(top)
    assert {"errors", "conflicts", "versions", "status", "README"} <= set(os.listdir(top / ".fusefs"))
    assert (top / ".fusefs" / "README").read_text().strip()
    assert subprocess.run(["find", top, "-name", ".fusefs"], capture_output=True, check=True).stdout == b""
    for refused_call in (
        lambda: os.mkdir(top / ".fusefs"),
        lambda: os.rename(top / ".fusefs", top / "mine"),
        lambda: os.rmdir(top / ".fusefs"),
        lambda: (top / ".fusefs" / "new").write_text("x"),
        lambda: os.unlink(top / ".fusefs" / "errors"),
        lambda: os.rename(duo.a.root, top / ".fusefs" / "moved"),
    ):
        with refused(errno.EACCES, errno.EEXIST, errno.EPERM, errno.EROFS, errno.EXDEV, errno.EBUSY):
            refused_call()
