"""Fixtures of the loop's tests: a model that follows a script, and what telemetry recorded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fusefs import telemetry
from fusefs.harness import loop, stack
from tests.collector import recorded_spans
from tests.loop.modelserver import ModelServer, Turn
from tests.loop.support import KEY

Script = Callable[..., ModelServer]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """`scripted(turn, …)` starts a model with that script, at the address that the environment names."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as running:

        def start(*turns: Turn) -> ModelServer:
            server = running.enter_context(ModelServer(turns).serving())
            monkeypatch.setenv("ANTHROPIC_BASE_URL", server.address)
            return server

        yield start


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as exporter:
        yield exporter


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The log of this test, as JSON lines."""
    stream = io.StringIO()
    saved = structlog.get_config()
    telemetry.setup_logging(stream=stream)
    for module in (loop, stack):
        monkeypatch.setattr(module, "_log", telemetry.get_logger())
    yield stream
    structlog.configure(**saved)
