"""Every POSIX case, on a plain directory first (that proves the case), then on a mount."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.posix_cases import ALL
from tests.mount.posix_support import Case


def _params() -> list[object]:
    found: list[object] = []
    for one in ALL:
        if not one.mount_only:
            found.append(pytest.param("plain", one, id=f"plain-{one.name}"))
    found.extend(pytest.param("mount", one, id=f"mount-{one.name}") for one in ALL)
    return found


@pytest.fixture(scope="module")
def plain_base() -> Iterator[Path]:
    # Not tmp_path: that is closed to other users, and the access cases act as one.
    base = Path(tempfile.mkdtemp(prefix="fusefs-plain-"))
    base.chmod(0o755)
    yield base
    shutil.rmtree(base)


@pytest.mark.parametrize(("where", "one"), _params())
def test_posix(where: str, one: Case, request: pytest.FixtureRequest) -> None:
    if one.root_only and os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    base: Path = request.getfixturevalue("plain_base" if where == "plain" else "posix_mount")
    root = base / one.name
    root.mkdir()
    one.body(root)
    shutil.rmtree(root)
    assert not root.exists()
