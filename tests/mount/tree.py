"""What two directory trees are compared by, and a corpus of real files to fill one with."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sysconfig
from pathlib import Path

# Packages of the standard library: text of many sizes, several levels, about 200 files.
PACKAGES = ("asyncio", "json", "email", "logging", "html", "http", "urllib", "xml", "importlib", "ctypes")


def make_corpus(target: Path) -> None:
    """Fill `target` with real source files, and with what sources alone do not have."""
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        shutil.copytree(library / package, target / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (target / "empty").write_bytes(b"")
    (target / "binary").write_bytes(bytes(range(256)) * 900)
    (target / "tool").write_text("#!/bin/sh\nexit 0\n")
    (target / "tool").chmod(0o755)
    (target / "read-only").write_text("kept\n")
    (target / "read-only").chmod(0o444)
    (target / "empty-directory").mkdir(mode=0o750)
    (target / "link").symlink_to("json/__init__.py")
    (target / "dangling").symlink_to("nowhere")
    (target / "name with blanks é 漢字").write_text("odd\n")
    os.mkfifo(target / "pipe")
    for i, path in enumerate(sorted(target.rglob("*"))):
        if not path.is_symlink():
            os.utime(path, ns=(0, 1_600_000_000_000_000_001 + i * 1_000_000_007))


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Every node below `root`: type and mode, owner, size and mtime (files and links), digest or target."""
    found: dict[str, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        value: object = None
        size = mtime_ns = 0
        if stat.S_ISREG(status.st_mode):
            value = hashlib.sha256(path.read_bytes()).hexdigest()
            size, mtime_ns = status.st_size, status.st_mtime_ns
        elif stat.S_ISLNK(status.st_mode):
            value = os.readlink(path)
        elif stat.S_ISDIR(status.st_mode):
            mtime_ns = status.st_mtime_ns
        found[str(path.relative_to(root))] = (
            oct(status.st_mode),
            status.st_uid,
            status.st_gid,
            size,
            mtime_ns,
            value,
        )
    return found


def contents(root: Path) -> dict[str, bytes]:
    """The bytes of every regular file below `root`."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
