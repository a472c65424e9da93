"""The quota: charged by Postgres in the statement of the change, so that no door and no second mount gets past it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.store import check
from tests import harness
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually

EXPECTED_LOG = r"refused|OverQuota"


def set_quota(namespace: harness.Namespace, quota: int) -> None:
    namespace.execute("select fusefs_set_quotas_v1(%s, %s, %s, null)", (namespace.tenant_id, namespace.agent_id, quota))


def used(namespace: harness.Namespace) -> tuple[int, int]:
    """What the namespace is charged with, and what its files have."""
    ((charged, held),) = namespace.execute(
        "select used_bytes, (select coalesce(sum(size_bytes), 0)::bigint from agent_files where agent_id = n.agent_id)"
        " from agent_namespaces n where agent_id = %s",
        (namespace.agent_id,),
    )
    return charged, held


def write(path: Path, content: bytes, flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        os.write(fd, content)
    except BaseException:
        errno_of(lambda: os.close(fd))
        raise
    os.close(fd)


def test_every_change_is_charged(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    root = mount(session="s1").path
    write(root / "before", b"12345")
    set_quota(namespace, 1000)
    assert used(namespace) == (5, 5)
    write(root / "new", b"x" * 100)
    write(root / "new", b"y" * 50, os.O_TRUNC)
    write(root / "new", b"z" * 7, os.O_APPEND)
    write(root / "claimed", b"c" * 20, os.O_EXCL)
    os.symlink("a target", root / "link")
    write(root / "other", b"o" * 30)
    os.rename(root / "other", root / "new")
    os.rename(root / "new", root / "moved")
    os.truncate(root / "moved", 10)
    os.unlink(root / "before")
    namespace.execute("update agent_files set content = content || 'more' where path = '/claimed'")
    assert used(namespace) == (10 + 24 + 8, 10 + 24 + 8)
    namespace.execute("delete from agent_files where path = '/link'")
    assert used(namespace) == (34, 34)


def test_two_mounts_together_stay_within_it(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """Neither knows of the other's open file; Postgres refuses the second commit, and the old content stays."""
    one, two = mount(session="s1"), mount(session="s2")
    write(two.path / "two", b"old")
    set_quota(namespace, 100)
    for each in (one, two):
        each.expect_log(EXPECTED_LOG)
        os.statvfs(each.path)
    first = os.open(one.path / "one", os.O_WRONLY | os.O_CREAT)
    second = os.open(two.path / "two", os.O_WRONLY | os.O_TRUNC)
    os.write(first, b"x" * 80)
    os.write(second, b"y" * 80)
    os.close(first)
    assert errno_of(lambda: os.close(second)) == errno.EDQUOT
    assert (two.path / "two").read_bytes() == b"old"
    assert used(namespace) == (83, 83)
    assert "quota" in (two.path / ".fusefs" / "errors").read_text()


def test_write_is_refused_early_and_a_raised_quota_is_seen(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    set_quota(namespace, 10)
    mounted = mount(session="s1")
    mounted.expect_log(EXPECTED_LOG)
    root = mounted.path
    with pytest.raises(OSError) as refused:
        write(root / "f", b"x" * 11)
    assert refused.value.errno == errno.EDQUOT
    assert os.statvfs(root).f_blocks * os.statvfs(root).f_frsize <= 4096
    set_quota(namespace, 100_000)
    eventually(lambda: errno_of(lambda: write(root / "f", b"x" * 11)) == 0, "the new quota is seen")
    assert used(namespace) == (11, 11)


def test_a_symlink_and_a_restore_are_charged_too(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    mounted = mount(session="s1")
    mounted.expect_log(EXPECTED_LOG)
    set_quota(namespace, 10)
    assert errno_of(lambda: os.symlink("x" * 11, mounted.path / "link")) == errno.EDQUOT
    assert used(namespace) == (0, 0)


async def test_check_finds_a_wrong_charge(namespace: harness.Namespace) -> None:
    from fusefs.db.pool import open_database

    set_quota(namespace, 10)
    namespace.execute("update agent_namespaces set used_bytes = 7")
    async with open_database(namespace.dsn, origin="check", role=None) as db:
        found = await check.check(db, namespace.tenant_id, namespace.agent_id)
    assert [(one.rule, one.path) for one in found] == [("usage", "/")]
    namespace.execute("update agent_namespaces set used_bytes = 0")
