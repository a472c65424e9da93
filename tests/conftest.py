"""The fixtures that all tests share; what they do is in `harness.py`.

Per test: `pg` (the DSN of a fresh migrated database) → `namespace` (a tenant and an agent in it) →
`mount` (a factory of real mounts). The same with the prefix `module_`, for tests that do not disturb
each other: `module_pg` → `module_namespace` → `module_mount`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from tests import harness

# A deadline per example measures the machine's load. With CI set, every run tries the same examples.
hypothesis.settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """No setting of the caller reaches a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("HANGO_", "OTEL_", "PG")):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def suite_dir() -> Iterator[Path]:
    """A folder for sockets, data and mount points; stale ones of killed runs are removed first."""
    path = harness.make_suite_dir()
    harness.sweep_stale(path.parent)
    yield path
    left = harness.remove_suite_dir(path)
    assert not left, f"mounts were left behind: {left}"


@pytest.fixture(scope="session")
def pg_server(suite_dir: Path) -> Iterator[harness.PostgresServer]:
    """A real Postgres for this run alone."""
    server = harness.PostgresServer(suite_dir)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def pg_template(pg_server: harness.PostgresServer) -> str:
    """The name of a migrated database to clone."""
    from fusefs.db import migrate

    dsn = pg_server.create_database("fusefs_template")
    migrate.up(dsn)
    return "fusefs_template"


@contextmanager
def _cloned(server: harness.PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:16]}"
    dsn = server.create_database(name, template)
    try:
        yield dsn
        harness.audit(dsn)
    finally:
        server.drop_database(name)


@contextmanager
def _mounts(suite_dir: Path, namespace: harness.Namespace) -> Iterator[harness.MountFactory]:
    factory = harness.MountFactory(suite_dir, namespace)
    try:
        yield factory
    finally:
        factory.finish()


@pytest.fixture
def pg(pg_server: harness.PostgresServer, pg_template: str) -> Iterator[str]:
    """The DSN of a fresh migrated database; audited and dropped after the test."""
    with _cloned(pg_server, pg_template) as dsn:
        yield dsn


@pytest.fixture
def namespace(pg: str) -> harness.Namespace:
    return harness.make_namespace(pg)


@pytest.fixture
def mount(suite_dir: Path, namespace: harness.Namespace) -> Iterator[harness.MountFactory]:
    """`mount(session="s1")` starts a real daemon on the test's namespace and returns when it serves."""
    with _mounts(suite_dir, namespace) as factory:
        yield factory


@pytest.fixture(scope="module")
def module_pg(pg_server: harness.PostgresServer, pg_template: str) -> Iterator[str]:
    with _cloned(pg_server, pg_template) as dsn:
        yield dsn


@pytest.fixture(scope="module")
def module_namespace(module_pg: str) -> harness.Namespace:
    return harness.make_namespace(module_pg)


@pytest.fixture(scope="module")
def module_mount(suite_dir: Path, module_namespace: harness.Namespace) -> Iterator[harness.MountFactory]:
    with _mounts(suite_dir, module_namespace) as factory:
        yield factory
