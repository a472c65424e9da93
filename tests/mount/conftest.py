"""Fixtures of the mount tests: one mount for what does not interfere, pairs of mounts for what does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import harness


@pytest.fixture(scope="module")
def shared_mount(module_mount: harness.MountFactory) -> harness.Mount:
    """One mount for a whole module; root also lets other users in, for the cases on access bits."""
    return module_mount(*(("--allow-other",) if os.geteuid() == 0 else ()), session="shared")


@pytest.fixture(scope="module")
def posix_mount(shared_mount: harness.Mount) -> Path:
    return shared_mount.path
