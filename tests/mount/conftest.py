"""Fixtures of the mount tests: one mount for what does not interfere, pairs of mounts for what does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.mount.outage import LOGGED, TIMEOUT
from tests.relay import Line


@pytest.fixture(scope="module")
def shared_mount(module_mount: harness.MountFactory) -> harness.Mount:
    """One mount for a whole module; root also lets other users in, for the cases on access bits."""
    return module_mount(*(("--allow-other",) if os.geteuid() == 0 else ()), session="shared")


@pytest.fixture(scope="module")
def posix_mount(shared_mount: harness.Mount) -> Path:
    return shared_mount.path


@pytest.fixture
def line(pg: str) -> Iterator[Line]:
    """A way to the test's database that can be cut."""
    with Line(pg) as line:
        yield line


@pytest.fixture
def rescue_dir(tmp_path: Path) -> Path:
    return tmp_path / "rescue"


@pytest.fixture
def mounted(mount: harness.MountFactory, line: Line, rescue_dir: Path) -> harness.Mount:
    """A mount behind the line, with a short write timeout."""
    found = mount(*TIMEOUT, "--rescue-dir", str(rescue_dir), session="s1", dsn=line.dsn)
    found.expect_log(LOGGED)
    return found
