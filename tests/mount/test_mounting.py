"""How a mount is made and unmade, below what the daemon does with it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusefs.core.filesystem import InodeTable
from fusefs.fuse import mounting
from fusefs.fuse.device import Device
from fusefs.fuse.operations import Operations
from fusefs.fuse.serving import KernelMount
from fusefs.rules.errors import MountFailed
from tests import harness
from tests.mount.posix_support import errno_of

Mount = Callable[..., int]
WAYS = [
    pytest.param(
        mounting._mount_as_root,
        id="mount",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) is root's"),
    ),
    pytest.param(
        mounting._mount_by_helper,
        id="fusermount3",
        marks=pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="/dev/fuse is not open to this user"),
    ),
]


def entry(mountpoint: Path) -> list[str]:
    """The fields of a mount in mountinfo: options, and after the dash type, source and the file system's options."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    (found,) = [fields for fields in lines if fields[4] == str(mountpoint)]
    return [found[5], *found[found.index("-") + 1 :]]


@pytest.mark.parametrize("mount", WAYS)
async def test_a_mount_answers_and_is_unmounted(tmp_path: Path, mount: Mount) -> None:
    device = Device(mount(str(tmp_path), {"default_permissions"}, read_only=True))
    operations = Operations(device, InodeTable(), None, xattr=False)
    try:
        options, kind, source, of_the_kind = entry(tmp_path)
        assert (kind, source) == ("fuse.fusefs", "fusefs")
        assert {"ro", "nosuid", "nodev"} <= {*options.split(",")}
        assert "default_permissions" in of_the_kind.split(",")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device.serve, operations.answer)
            with pytest.raises(OSError, match="Stale"):  # the kernel asked, and there is no root
                await trio.to_thread.run_sync(os.stat, tmp_path)
            device.stop()
    finally:
        device.close()
        mounting.unmount(str(tmp_path))
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("mount", WAYS)
def test_what_cannot_be_mounted(tmp_path: Path, mount: Mount) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(MountFailed):
        mount(str(tmp_path / "missing"), set(), read_only=False)
    with pytest.raises(MountFailed):
        mount(str(tmp_path), {"no_such_option"}, read_only=False)
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) is root's")
def test_a_mount_that_cannot_forbid_symlinks_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 5.10: nothing may be left in its place, least of all a mount that nobody answers."""

    def refuse(*_args: object, **_options: object) -> None:
        raise MountFailed("an old kernel")

    monkeypatch.setattr(mounting, "forbid_symlinks", refuse)
    mounted: Any = SimpleNamespace(settings=SimpleNamespace(read_only=False, xattr=False), table=InodeTable())
    descriptors = os.listdir("/proc/self/fd")
    root: Any = None
    with pytest.raises(MountFailed):
        KernelMount(str(tmp_path), mounted, root, allow_other=False, nosymfollow=True)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("size", [4095, 4096, 70_000])
def test_targets_of_symlinks_that_others_made(
    mount: harness.MountFactory, namespace: harness.Namespace, size: int
) -> None:
    """The kernel takes no answer of 4096 bytes or more."""
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, kind, content) values (%s, %s, '/link', 'symlink', %s)",
        (namespace.tenant_id, namespace.agent_id, "x" * size),
    )
    link = mount().path / "link"
    assert errno_of(lambda: os.readlink(link)) == (0 if size == 4095 else errno.ENAMETOOLONG)
    assert link.is_symlink(), "the mount goes on"
