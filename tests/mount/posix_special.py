"""POSIX cases on nodes that are neither file nor directory nor symlink: FIFOs, sockets, devices."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from tests.mount.posix_support import Child, case, opened, refused


@case()
def case_fifo_carries_bytes_between_processes(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)
    with refused(errno.EEXIST):
        os.mkfifo(root / "pipe")

    def writer() -> None:
        with opened(root / "pipe", os.O_WRONLY) as fd:
            for i in range(100):
                os.write(fd, b"%d\n" % i)

    child = Child(writer)
    got = (root / "pipe").read_bytes()
    child.wait()
    assert got == b"".join(b"%d\n" % i for i in range(100))
    with refused(errno.ENXIO):
        os.open(root / "pipe", os.O_WRONLY | os.O_NONBLOCK)


@case()
def case_fifo_is_renamed_and_removed(root: Path) -> None:
    os.mkfifo(root / "a", 0o640)
    os.rename(root / "a", root / "b")
    status = (root / "b").stat()
    assert stat.S_ISFIFO(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o640
    assert status.st_size == 0
    os.unlink(root / "b")
    assert os.listdir(root) == []


@case()
def case_socket_accepts_a_connection(root: Path) -> None:
    # sun_path holds 108 bytes, less than some roots are long: bind by a relative name in a child.
    def server() -> None:
        os.chdir(root)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("s")
            listener.listen(1)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("s")
                accepted, _ = listener.accept()
                with accepted:
                    client.sendall(b"hello")
                    assert accepted.recv(10) == b"hello"
            with socket.socket(socket.AF_UNIX) as second, refused(errno.EADDRINUSE):
                second.bind("s")

    Child(server).wait()
    assert stat.S_ISSOCK((root / "s").stat().st_mode)
    with refused(errno.ENXIO):
        os.open(root / "s", os.O_RDONLY)
    os.unlink(root / "s")
    assert os.listdir(root) == []


@case()
def case_mknod_makes_a_regular_file(root: Path) -> None:
    os.mknod(root / "f", 0o640 | stat.S_IFREG)
    status = (root / "f").stat()
    assert stat.S_ISREG(status.st_mode) and status.st_size == 0
    (root / "f").write_bytes(b"x")
    assert (root / "f").read_bytes() == b"x"


@case(mount_only=True)
def case_device_nodes_are_refused(root: Path) -> None:
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        with refused(errno.EPERM, errno.EOPNOTSUPP):
            os.mknod(root / "device", 0o600 | kind, os.makedev(1, 3))
    assert os.listdir(root) == []
