"""What an agent may not see and may not change, through a mount: HF-11, HF-12 and HF-16.

Each refusal is also asked for in the ways around it: listing, rename in and out, symlinks, `..`,
names that only look alike.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness
from tests.mount.posix_support import RENAME_EXCHANGE, RENAME_NOREPLACE, opened, refused, renameat2
from tests.mount.sides import eventually

EXPECTED_LOG = r"denied|Denied|refused"
SECRET = "only for session two"
ME, OTHER = "s-one", "s-two"
RESERVED = ("memories", "skills")


def put(namespace: harness.Namespace, path: str, content: str = "", kind: str = "file") -> None:
    """A row as the harness or an administrator writes it; the trigger makes the directories above."""
    namespace.execute(
        "INSERT INTO agent_files (tenant_id, agent_id, path, content, kind, mode) VALUES (%s, %s, %s, %s, %s, %s)",
        (namespace.tenant_id, namespace.agent_id, path, content, kind, 0o755 if kind == "dir" else 0o644),
    )


@pytest.fixture(scope="module")
def filled(module_namespace: harness.Namespace) -> harness.Namespace:
    """A namespace with reserved and machine-written files of two sessions, all from outside."""
    for session in (ME, OTHER):
        text = SECRET if session == OTHER else "mine"
        put(module_namespace, f"/large_tool_results/{session}/call-1", text)
        put(module_namespace, f"/large_tool_results/{session}/deep/call-2", text)
        put(module_namespace, f"/conversation_history/{session}.md", text)
    for name in RESERVED:
        put(module_namespace, f"/{name}/kept.md", f"the {name}\n")
        put(module_namespace, f"/{name}/sub/deep.md", "deep\n")
    return module_namespace


@pytest.fixture(scope="module")
def agent(module_mount: harness.MountFactory, filled: harness.Namespace) -> harness.Mount:
    mount = module_mount(session=ME)
    mount.expect_log(EXPECTED_LOG)
    return mount


@pytest.fixture
def root(agent: harness.Mount) -> Path:
    return agent.path


@pytest.fixture
def own(root: Path, request: pytest.FixtureRequest) -> Path:
    path = root / request.node.name.replace("/", "-")
    path.mkdir()
    return path


def rows(namespace: harness.Namespace, path: str) -> list[tuple[str, str]]:
    return namespace.execute(
        "SELECT path, content FROM agent_files WHERE tenant_id = %s AND agent_id = %s"
        " AND (path = %s OR starts_with(path, %s)) ORDER BY path",
        (namespace.tenant_id, namespace.agent_id, path, path + "/"),
    )


# HF-11: machine-written files belong to one session


def test_listings_show_only_the_own_session(root: Path) -> None:
    assert os.listdir(root / "large_tool_results") == [ME]
    assert os.listdir(root / "conversation_history") == [f"{ME}.md"]
    assert sorted(os.listdir(root / "large_tool_results" / ME)) == ["call-1", "deep"]
    assert (root / "large_tool_results" / ME / "call-1").read_text() == "mine"
    assert (root / "conversation_history" / f"{ME}.md").read_text() == "mine"
    found = subprocess.run(["grep", "-r", SECRET, root], capture_output=True, check=False)
    assert found.returncode == 1 and found.stdout == b""
    names = subprocess.run(["find", root], capture_output=True, check=True, text=True).stdout
    assert OTHER not in names


@pytest.mark.parametrize(
    "path",
    [
        f"large_tool_results/{OTHER}",
        f"large_tool_results/{OTHER}/call-1",
        f"large_tool_results/{OTHER}/deep/call-2",
        f"large_tool_results/{OTHER}/missing",
        f"conversation_history/{OTHER}.md",
        f"large_tool_results/{ME}/../{OTHER}/call-1",
        f"memories/../conversation_history/{OTHER}.md",
        f".fusefs/versions/large_tool_results/{OTHER}/call-1/1",
        f".fusefs/versions/conversation_history/{OTHER}.md/1",
    ],
)
def test_other_sessions_files_do_not_exist(root: Path, own: Path, path: str) -> None:
    target = root / path
    attempts: list[Callable[[], object]] = [
        lambda: os.stat(target),
        lambda: os.open(target, os.O_RDONLY),
        lambda: os.listdir(target),
        lambda: os.readlink(target),
        lambda: os.unlink(target),
        lambda: os.rename(target, own / "stolen"),
        lambda: os.chmod(target, 0o777),
        lambda: os.truncate(target, 0),
    ]
    for attempt in attempts:
        with refused(errno.ENOENT):
            attempt()
    (own / "link").symlink_to(target)
    with refused(errno.ENOENT):
        (own / "link").read_text()


def test_other_sessions_paths_cannot_be_made(root: Path, own: Path, filled: harness.Namespace) -> None:
    (own / "f").write_text("x")
    results, history = root / "large_tool_results", root / "conversation_history"
    attempts: list[Callable[[], object]] = [
        lambda: os.mkdir(results / OTHER),
        lambda: os.mkdir(results / "s-three"),
        lambda: os.open(results / OTHER / "planted", os.O_WRONLY | os.O_CREAT),
        lambda: os.open(results / OTHER / "call-1", os.O_WRONLY | os.O_TRUNC),
        lambda: os.open(history / f"{OTHER}.md", os.O_WRONLY | os.O_CREAT),
        lambda: os.symlink("x", history / f"{OTHER}.md"),
        lambda: os.mkfifo(results / OTHER / "pipe"),
        lambda: os.rename(own / "f", results / OTHER / "call-1"),
        lambda: os.rename(own / "f", history / f"{OTHER}.md"),
        lambda: renameat2(own / "f", history / f"{OTHER}.md", RENAME_EXCHANGE),
        lambda: renameat2(own / "f", history / f"{OTHER}.md", RENAME_NOREPLACE),
    ]
    for attempt in attempts:
        # Not EEXIST either: that would tell that the name is taken.
        with refused(errno.ENOENT, errno.EACCES):
            attempt()
    assert rows(filled, f"/conversation_history/{OTHER}.md") == [(f"/conversation_history/{OTHER}.md", SECRET)]
    assert len(rows(filled, f"/large_tool_results/{OTHER}")) == 4
    assert (own / "f").read_text() == "x"


def test_the_shared_parents_cannot_be_moved_or_removed(root: Path, own: Path) -> None:
    (own / "d").mkdir()
    for name in ("large_tool_results", "conversation_history"):
        with refused(errno.EACCES):
            os.rename(root / name, own / "taken")
        with refused(errno.EACCES):
            renameat2(root / name, own / "d", RENAME_EXCHANGE)
        with refused(errno.EACCES, errno.ENOTEMPTY):
            os.rename(own / "d", root / name)
        with refused(errno.EACCES, errno.ENOTEMPTY):
            os.rmdir(root / name)
        # As every path there, it would belong to the session of that name: another one.
        with refused(errno.ENOENT, errno.EACCES):
            os.open(root / name / "loose-file", os.O_WRONLY | os.O_CREAT)
        with refused(errno.EACCES):
            os.chmod(root / name, 0o700)
    assert os.listdir(own) == ["d"]


def test_own_results_are_created_once(root: Path, own: Path, filled: harness.Namespace, agent: harness.Mount) -> None:
    results = root / "large_tool_results" / ME
    path = results / "call-9"
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"first part ")
        os.write(fd, b"second part")
    subprocess.run(
        ["bash", "-ec", "{ echo a; echo b; } > call-10; mkdir -p sub; echo c > sub/call-11"], cwd=results, check=True
    )
    assert path.read_text() == "first part second part"
    assert (results / "call-10").read_text() == "a\nb\n"
    (own / "f").write_text("x")
    attempts: list[Callable[[], object]] = [
        lambda: os.open(path, os.O_WRONLY),
        lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        lambda: os.open(path, os.O_WRONLY | os.O_APPEND),
        lambda: os.open(path, os.O_RDWR),
        lambda: os.truncate(path, 0),
        lambda: os.unlink(path),
        lambda: os.rename(path, own / "out"),
        lambda: os.rename(path, results / "renamed"),
        lambda: os.rename(own / "f", path),
        lambda: os.rename(own / "f", results / "moved-in"),
        lambda: renameat2(own / "f", path, RENAME_EXCHANGE),
        lambda: os.chmod(path, 0o777),
        lambda: os.rename(results, own / "all"),
        lambda: os.rmdir(results / "sub"),
    ]
    for number, attempt in enumerate(attempts):
        with refused(errno.EACCES, errno.ENOTEMPTY):
            attempt()
        assert path.read_text() == "first part second part", number
    stored = dict(rows(filled, f"/large_tool_results/{ME}"))
    assert stored[f"/large_tool_results/{ME}/call-9"] == "first part second part"
    assert stored[f"/large_tool_results/{ME}/sub/call-11"] == "c\n"
    assert f"/large_tool_results/{ME}/call-9" in (root / ".fusefs" / "errors").read_text()


def test_own_results_can_be_copied_out(root: Path, own: Path) -> None:
    subprocess.run(["cp", "-r", root / "large_tool_results" / ME / "deep", own / "copy"], check=True)
    assert (own / "copy" / "call-2").read_text() == "mine"


def test_own_history_is_read_only(root: Path, own: Path) -> None:
    history = root / "conversation_history"
    path = history / f"{ME}.md"
    (own / "f").write_text("x")
    attempts: list[Callable[[], object]] = [
        lambda: os.open(path, os.O_WRONLY | os.O_APPEND),
        lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        lambda: os.truncate(path, 0),
        lambda: os.unlink(path),
        lambda: os.rename(path, own / "out"),
        lambda: os.rename(own / "f", path),
        lambda: os.chmod(path, 0o600),
    ]
    for attempt in attempts:
        with refused(errno.EACCES):
            attempt()
    assert path.read_text() == "mine"


def test_first_result_makes_its_own_folder(mount: harness.MountFactory) -> None:
    fresh = mount(session="s-fresh")
    script = "mkdir -p large_tool_results/s-fresh && echo big > large_tool_results/s-fresh/call"
    subprocess.run(["bash", "-ec", script], cwd=fresh.path, check=True)
    assert (fresh.path / "large_tool_results" / "s-fresh" / "call").read_text() == "big\n"


def test_results_of_a_session_show_up_while_it_runs(root: Path, filled: harness.Namespace) -> None:
    put(filled, f"/large_tool_results/{ME}/late", "late")
    put(filled, f"/large_tool_results/{OTHER}/late", "late")
    eventually(lambda: (root / "large_tool_results" / ME / "late").read_text() == "late", "the new result")
    assert not (root / "large_tool_results" / OTHER / "late").exists()


# HF-12: reserved prefixes


@pytest.mark.parametrize("prefix", RESERVED)
def test_reserved_files_are_read_only_for_an_agent(
    root: Path, own: Path, filled: harness.Namespace, agent: harness.Mount, prefix: str
) -> None:
    reserved = root / prefix
    before = rows(filled, f"/{prefix}")
    assert (reserved / "kept.md").read_text() == f"the {prefix}\n"
    assert sorted(os.listdir(reserved)) == ["kept.md", "sub"]
    (own / "f").write_text("x")
    (own / "d").mkdir()
    attempts: list[Callable[[], object]] = [
        lambda: os.open(reserved / "new.md", os.O_WRONLY | os.O_CREAT),
        lambda: os.open(reserved / "new.md", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        lambda: os.open(reserved / "sub" / "new.md", os.O_WRONLY | os.O_CREAT),
        lambda: os.open(reserved / "kept.md", os.O_WRONLY),
        lambda: os.open(reserved / "kept.md", os.O_RDWR),
        lambda: os.open(reserved / "kept.md", os.O_WRONLY | os.O_APPEND),
        lambda: os.open(reserved / "kept.md", os.O_WRONLY | os.O_TRUNC),
        lambda: os.truncate(reserved / "kept.md", 0),
        lambda: os.unlink(reserved / "kept.md"),
        lambda: os.mkdir(reserved / "dir"),
        lambda: os.symlink("x", reserved / "link"),
        lambda: os.mkfifo(reserved / "pipe"),
        lambda: os.rmdir(reserved / "sub"),
        lambda: os.chmod(reserved / "kept.md", 0o777),
        lambda: os.chmod(reserved, 0o777),
        lambda: os.utime(reserved / "kept.md", (1, 1)),
        lambda: os.rename(own / "f", reserved / "in.md"),
        lambda: os.rename(own / "f", reserved / "kept.md"),
        lambda: os.rename(own / "d", reserved / "in"),
        lambda: os.rename(reserved / "kept.md", own / "out.md"),
        lambda: os.rename(reserved / "sub", own / "out"),
        lambda: os.rename(reserved / "kept.md", reserved / "other.md"),
        lambda: renameat2(own / "f", reserved / "kept.md", RENAME_EXCHANGE),
        lambda: renameat2(own / "d", reserved / "sub", RENAME_EXCHANGE),
        lambda: renameat2(own / "f", reserved / "in.md", RENAME_NOREPLACE),
        lambda: os.rename(reserved, own / "taken"),
        lambda: renameat2(own / "d", reserved, RENAME_EXCHANGE),
        lambda: os.rename(own / "d", reserved),
        lambda: os.rmdir(reserved),
        lambda: (own / ".." / prefix / "dots.md").write_text("x"),
    ]
    for number, attempt in enumerate(attempts):
        try:
            with refused(errno.EACCES, errno.ENOTEMPTY):
                attempt()
        except AssertionError as exc:
            raise AssertionError(f"attempt {number}: {exc}") from None
    assert rows(filled, f"/{prefix}") == before
    assert sorted(os.listdir(own)) == ["d", "f"]


def test_refusal_says_why(root: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", "echo x > memories/why.md"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "memories/why.md: Permission denied" in done.stderr
    (line,) = [line for line in (root / ".fusefs" / "errors").read_text().splitlines() if "/memories/why.md" in line]
    assert "reserved" in line and "admin" in line


def test_reserved_files_can_be_copied_and_linked_to(root: Path, own: Path) -> None:
    subprocess.run(["cp", "-a", root / "skills", own / "copy"], check=True)
    (own / "copy" / "kept.md").write_text("my own copy\n")
    assert (root / "skills" / "kept.md").read_text() == "the skills\n"


@pytest.mark.parametrize("prefix", RESERVED)
def test_symlink_to_a_reserved_place_carries_the_rule_of_its_target(root: Path, own: Path, prefix: str) -> None:
    (own / "dir").symlink_to(f"../{prefix}")
    (own / "absolute").symlink_to(root / prefix)
    (own / "file").symlink_to(f"../{prefix}/kept.md")
    (own / "dangling").symlink_to(f"../{prefix}/new.md")
    assert (own / "file").read_text() == f"the {prefix}\n"
    for path in ("dir/new.md", "absolute/new.md", "file", "dangling"):
        with refused(errno.EACCES):
            (own / path).write_text("through a link")
    with refused(errno.EACCES):
        os.unlink(own / "dir" / "kept.md")
    # The link itself is the agent's.
    os.unlink(own / "dir")
    assert (root / prefix / "kept.md").read_text() == f"the {prefix}\n"


@pytest.mark.parametrize(
    "name",
    [
        "Memories",
        "MEMORIES",
        "memories ",
        " memories",
        "memories.",
        "memories2",
        "memorie",
        "m\u0435mories",  # Cyrillic
        "memories\u200b",
        "\uff4demories",  # full width
        "memor\u0131es",
        "skills\u0301",
        "sKills",
        "large_tool_results2",
        "Conversation_history",
    ],
)
def test_name_that_only_looks_alike_is_another_name(root: Path, filled: harness.Namespace, name: str) -> None:
    (root / name).mkdir()
    (root / name / "f").write_text("allowed")
    assert rows(filled, f"/{name}/f") == [(f"/{name}/f", "allowed")]
    os.unlink(root / name / "f")
    os.rmdir(root / name)


def test_reserved_name_below_the_top_is_an_ordinary_name(root: Path, own: Path) -> None:
    for name in ("memories", "skills", "large_tool_results", "conversation_history", ".fusefs"):
        (own / name).mkdir()
        (own / name / "f").write_text("allowed")
        assert (own / name / "f").read_text() == "allowed"


def test_reserved_directory_that_is_missing_cannot_be_made(mount: harness.MountFactory) -> None:
    namespace = mount.namespace
    fresh = mount(session="s-fresh")
    fresh.expect_log(EXPECTED_LOG)
    # A mount makes them where they are missing: take them away under it.
    namespace.execute(
        "DELETE FROM agent_files WHERE tenant_id = %s AND agent_id = %s", (namespace.tenant_id, namespace.agent_id)
    )
    eventually(lambda: os.listdir(fresh.path) == [], "the removal in the mount")
    (fresh.path / "d").mkdir()
    for name in RESERVED:
        with refused(errno.EACCES):
            os.mkdir(fresh.path / name)
        with refused(errno.EACCES):
            os.rename(fresh.path / "d", fresh.path / name)
        with refused(errno.EACCES):
            os.symlink("d", fresh.path / name)
        with refused(errno.EACCES):
            os.open(fresh.path / name, os.O_WRONLY | os.O_CREAT)
    assert os.listdir(fresh.path) == ["d"]


def test_administrator_writes_what_the_agent_reads(module_mount: harness.MountFactory, root: Path) -> None:
    admin = module_mount("--rw", session="s-admin", principal="admin")
    (admin.path / "memories" / "lesson.md").write_text("learned\n")
    eventually(lambda: (root / "memories" / "lesson.md").read_text() == "learned\n", "the lesson in the agent's mount")
    with refused(errno.EACCES):
        (root / "memories" / "lesson.md").write_text("mine now")
    (admin.path / "memories" / "lesson.md").unlink()
    eventually(lambda: not (root / "memories" / "lesson.md").exists(), "the removal in the agent's mount")
    admin.umount()


# HF-16: tenants and agents


def test_agents_and_tenants_do_not_meet(mount: harness.MountFactory) -> None:
    first = mount.namespace
    sibling = harness.make_namespace(first.dsn, tenant=first.tenant)
    stranger = harness.make_namespace(first.dsn)
    mounts = [mount(session="s", namespace=namespace) for namespace in (first, sibling, stranger)]
    for i, one in enumerate(mounts):
        (one.path / "same").write_text(f"agent {i}")
        (one.path / f"only-{i}").mkdir()
        (one.path / f"only-{i}" / "f").write_text(f"secret {i}")
    for i, one in enumerate(mounts):
        assert (one.path / "same").read_text() == f"agent {i}"
        assert sorted(set(os.listdir(one.path)) - set(RESERVED)) == [f"only-{i}", "same"]
        for other in {0, 1, 2} - {i}:
            for path in (f"only-{other}", f"only-{other}/f", f".fusefs/versions/only-{other}/f/1"):
                with refused(errno.ENOENT):
                    os.stat(one.path / path)
        found = subprocess.run(["grep", "-rl", "secret", one.path], capture_output=True, check=True, text=True)
        assert found.stdout == f"{one.path}/only-{i}/f\n"
    assert (mounts[0].path / "same").stat().st_ino != 0
    mounts[0].path.joinpath("same").unlink()
    assert (mounts[1].path / "same").read_text() == "agent 1"


def test_agent_of_another_tenant_is_unknown(mount: harness.MountFactory) -> None:
    stranger = harness.make_namespace(mount.namespace.dsn)
    mixed = harness.Namespace(
        mount.namespace.dsn, mount.namespace.tenant_id, stranger.agent_id, mount.namespace.tenant, stranger.agent_id
    )
    with pytest.raises(AssertionError, match="ended with 3"):
        mount(session="s", namespace=mixed)


def test_name_that_is_not_utf8_is_explained(mount: harness.MountFactory) -> None:
    mounted = mount(session=ME)
    mounted.expect_log("refused")
    with refused(errno.EILSEQ):
        os.mkdir(os.path.join(os.fsencode(mounted.path), b"caf\xe9"))
    assert "not valid UTF-8" in (mounted.path / ".fusefs" / "errors").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_a_mount_in_good_order(
    mount: harness.MountFactory, namespace: harness.Namespace, number: signal.Signals
) -> None:
    mounted = mount(session=ME)
    fd = os.open(mounted.path / "f", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"unflushed")
    mounted.process.send_signal(number)
    mounted.wait()
    with contextlib.suppress(OSError):
        os.close(fd)
    assert not harness.mounts_under(mounted.path)
    assert namespace.execute("select content from agent_files where path = '/f'") == [("unflushed",)]
