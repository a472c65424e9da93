"""The host's and the administrator's layout: whose folders there are, and what may be done in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests import harness
from tests.mount.posix_support import refused
from tests.mount.sides import eventually

RESULTS = "large_tool_results"
RESERVED = {"memories", "skills"}


@pytest.fixture(scope="module")
def host(module_mount: harness.MountFactory) -> harness.Mount:
    return module_mount(layout="host")


@pytest.fixture(scope="module")
def agent_folder(host: harness.Mount, module_namespace: harness.Namespace) -> Path:
    return host.path / module_namespace.tenant / module_namespace.agent


def test_host_lists_tenants_and_agents(host: harness.Mount, module_namespace: harness.Namespace) -> None:
    sibling = harness.make_namespace(module_namespace.dsn, tenant=module_namespace.tenant)
    stranger = harness.make_namespace(module_namespace.dsn)
    assert sorted(os.listdir(host.path)) == sorted([module_namespace.tenant, stranger.tenant])
    assert sorted(os.listdir(host.path / sibling.tenant)) == sorted([module_namespace.agent, sibling.agent])
    with refused(errno.ENOENT):
        os.listdir(host.path / stranger.tenant / sibling.agent)


def test_session_folder_exists_when_it_was_made(agent_folder: Path, module_namespace: harness.Namespace) -> None:
    with refused(errno.ENOENT):
        os.stat(agent_folder / "s-new")
    (agent_folder / "s-new").mkdir()
    assert "s-new" in os.listdir(agent_folder)
    with refused(errno.EEXIST):
        (agent_folder / "s-new").mkdir()
    # Another program opened this one.
    module_namespace.execute(
        "INSERT INTO agent_sessions (tenant_id, agent_id, session, principal) VALUES (%s, %s, 's-row', 'agent')",
        (module_namespace.tenant_id, module_namespace.agent_id),
    )
    assert set(os.listdir(agent_folder / "s-row")) >= RESERVED


@pytest.mark.parametrize("name", [".hidden", "-dash", "history.md", "x" * 65, "a b", "é", "a:b"])
def test_session_folder_needs_a_session_id(agent_folder: Path, name: str) -> None:
    with refused(errno.EINVAL):
        os.mkdir(agent_folder / name)
    with refused(errno.ENOENT):
        os.stat(agent_folder / name)


def test_only_sessions_can_be_made_in_a_host(host: harness.Mount, agent_folder: Path) -> None:
    for path in (host.path / "t", agent_folder.parent / "a"):
        with refused(errno.EACCES):
            os.mkdir(path)
        with refused(errno.EACCES):
            path.write_text("x")
    with refused(errno.EACCES):
        (agent_folder / "file").write_text("x")
    with refused(errno.EACCES, errno.EPERM):
        os.rename(agent_folder, agent_folder.parent / "renamed")
    with refused(errno.EACCES, errno.EPERM, errno.ENOTEMPTY):
        os.rmdir(agent_folder)


def test_sessions_of_a_host_share_files_but_not_machine_paths(agent_folder: Path) -> None:
    one, two = agent_folder / "s-one", agent_folder / "s-two"
    for folder in (one, two):
        folder.mkdir()
        (folder / RESULTS / folder.name).mkdir(parents=True)
        (folder / RESULTS / folder.name / "call").write_text(f"for {folder.name}")
    (one / "shared").write_text("both\n")
    assert (two / "shared").read_text() == "both\n"
    for folder, other in ((one, two), (two, one)):
        assert os.listdir(folder / RESULTS) == [folder.name]
        with refused(errno.ENOENT):
            os.stat(folder / RESULTS / other.name)
    # Two views of one file are two inodes to the kernel, whose caches are apart.
    assert (one / "shared").stat().st_ino != (two / "shared").stat().st_ino
    with (one / "draft").open("w") as file:
        file.write("not closed")
        file.flush()
        assert not (two / "draft").exists()
    eventually(lambda: (two / "draft").read_text() == "not closed", "the file once it is closed")
    with refused(errno.EXDEV):
        os.rename(one / "shared", two / "moved")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can remount with nosymfollow")
def test_host_does_not_follow_symlinks(agent_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    folder = agent_folder / "s-links"
    folder.mkdir()
    (folder / "link").symlink_to(secret)
    assert os.readlink(folder / "link") == str(secret)
    with refused(errno.ELOOP):
        (folder / "link").read_text()
    with refused(errno.ELOOP):
        (folder / "link").write_text("overwritten")
    assert secret.read_text() == "the host's own"


def test_administrator_sees_every_session_and_changes_nothing(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    for session in ("s-one", "s-two"):
        namespace.execute(
            "INSERT INTO agent_files (tenant_id, agent_id, path, content) VALUES (%s, %s, %s, %s)",
            (namespace.tenant_id, namespace.agent_id, f"/{RESULTS}/{session}/call", f"for {session}"),
        )
    admin = mount(layout="all")
    folder = admin.path / namespace.tenant / namespace.agent
    assert sorted(os.listdir(folder / RESULTS)) == ["s-one", "s-two"]
    assert (folder / RESULTS / "s-two" / "call").read_text() == "for s-two"
    with refused(errno.EROFS):
        (folder / "f").write_text("x")
    with refused(errno.EROFS):
        os.unlink(folder / RESULTS / "s-two" / "call")


def test_administrator_writes_when_asked_to(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    admin = mount("--rw", layout="all")
    folder = admin.path / namespace.tenant / namespace.agent
    (folder / "memories" / "lesson.md").write_text("learned\n")
    assert (folder / "memories" / "lesson.md").read_text() == "learned\n"
    rows = namespace.execute(
        "SELECT content, updated_by FROM agent_files WHERE agent_id = %s AND path = '/memories/lesson.md'",
        (namespace.agent_id,),
    )
    assert rows == [("learned\n", "admin")]
