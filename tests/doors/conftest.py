"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import harness
from tests.doors.command import Fusefs


@pytest.fixture
def bare_fusefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fusefs:
    """The command line without a database, its folders in the test's own directory."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HANGO_FS_RUNTIME_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    # A command that falls back to the embedded Postgres must fail, not start one for the whole machine.
    monkeypatch.setenv("HANGO_FS_DATA_DIR", os.devnull)
    return Fusefs(monkeypatch)


@pytest.fixture
def fusefs(bare_fusefs: Fusefs, pg: str, monkeypatch: pytest.MonkeyPatch) -> Fusefs:
    """The command line on the test's database."""
    monkeypatch.setenv("HANGO_FS_DSN", pg)
    return bare_fusefs


@pytest.fixture
def agent(fusefs: Fusefs, namespace: harness.Namespace, monkeypatch: pytest.MonkeyPatch) -> harness.Namespace:
    """The test's agent, named by the environment as a user would."""
    monkeypatch.setenv("HANGO_FS_TENANT", namespace.tenant)
    monkeypatch.setenv("HANGO_FS_AGENT", namespace.agent)
    return namespace
