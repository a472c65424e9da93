"""Exporters: what switches one on, what is refused, and what their own troubles look like in the log."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fusefs import telemetry
from fusefs.rules.address import Address
from fusefs.rules.errors import BadConfig, MountFailed
from fusefs.telemetry import exporters, metrics
from fusefs.telemetry.exporters import exporting
from fusefs.telemetry.mounts import MountState, register_mount
from tests.collector import Scrape

NOWHERE = "http://127.0.0.1:1"
PORT = Address("127.0.0.1", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the exporters log in this test."""
    stream = io.StringIO()
    saved = structlog.get_config()
    telemetry.setup_logging(stream=stream)
    monkeypatch.setattr(exporters, "_log", telemetry.get_logger())
    yield stream
    structlog.configure(**saved)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a collector that is not there."""
    monkeypatch.setattr(exporters, "_END_S", 0.1)


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        (":9464", Address("127.0.0.1", 9464), "127.0.0.1:9464"),
        ("9464", Address("127.0.0.1", 9464), "127.0.0.1:9464"),
        ("0.0.0.0:0", Address("0.0.0.0", 0), "0.0.0.0:0"),
        ("metrics.internal:65535", Address("metrics.internal", 65535), "metrics.internal:65535"),
        ("[::1]:9464", Address("::1", 9464), "[::1]:9464"),
    ],
)
def test_an_address(text: str, address: Address, shown: str) -> None:
    assert Address.parse(text) == address
    assert str(address) == shown


@pytest.mark.parametrize(
    "text",
    ["", ":", "x", "x:", "x:y", ":65536", ":-1", "::1:9464", "[::1]", "[x]:1", "a b:1", "http://x:1", ":१", ":1\n"],
)
def test_no_address(text: str) -> None:
    with pytest.raises(BadConfig, match="is not an address") as caught:
        Address.parse(text)
    assert "HOST:PORT" in caught.value.given_hint


@pytest.mark.parametrize(
    ("environment", "spans", "numbers"),
    [
        ({}, False, False),
        (
            {"OTEL_SERVICE_NAME": "x", "OTEL_RESOURCE_ATTRIBUTES": "a=b", "OTEL_EXPORTER_OTLP_HEADERS": "a=b"},
            False,
            False,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE}, True, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_SDK_DISABLED": "true"}, False, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_TRACES_EXPORTER": "none"}, False, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_METRICS_EXPORTER": "none"}, True, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NOWHERE}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": NOWHERE}, False, True),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True, False),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, False, True),
    ],
)
@pytest.mark.usefixtures("_quick", "log")
def test_what_the_environment_switches_on(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], spans: bool, numbers: bool
) -> None:
    set_all(monkeypatch, environment)
    with exporting(None) as opened:
        assert opened is None
        active = metrics.active
        assert (active is not None) == (spans or numbers)
        assert (active is not None and active.tracer is not None) == spans
        assert telemetry.is_measuring() == numbers
    assert metrics.active is None


@pytest.mark.parametrize(
    ("environment", "address", "complaint", "hint"),
    [
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, None, "no exporter 'prometheus'", "--metrics"),
        ({"OTEL_TRACES_EXPORTER": "console"}, None, "no exporter 'console'", "`otlp` or `none`"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None, "not 'grpc'", "4318"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"},
            PORT,
            "not 'http/json'",
            "http/protobuf",
        ),
        ({"OTEL_SDK_DISABLED": "TRUE"}, PORT, "OTEL_SDK_DISABLED do not go together", "Leave one"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "-1"}, PORT, "OTEL_* is not valid", ""),
    ],
)
def test_what_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], address: Address | None, complaint: str, hint: str
) -> None:
    set_all(monkeypatch, environment)
    with pytest.raises(BadConfig) as caught, exporting(address):
        pass
    assert complaint in str(caught.value)
    assert hint in caught.value.given_hint
    assert metrics.active is None


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(MountFailed, match=r"cannot be served at 192\.0\.2\.1:0"), exporting(Address("192.0.2.1", 0)):
        pass
    assert metrics.active is None


def test_the_endpoint_is_there_for_as_long_as_the_block() -> None:
    with pytest.raises(RuntimeError, match="inside"), exporting(PORT) as opened:
        assert opened is not None
        assert opened.port != 0
        assert Scrape(str(opened)).value("hango_fs_conflicts_total") == telemetry.counters.conflicts
        raise RuntimeError("inside")
    assert metrics.active is None
    with socket.create_server((opened.host, opened.port)), pytest.raises(MountFailed, match="in use"):
        with exporting(opened):
            pass


def test_a_mount_is_observed_while_it_is_there() -> None:
    state = MountState(True, 1, None, 0.5, 3, 2, 4, 9, 5, 6, 7, 8, 10, 11, 12)
    with exporting(PORT) as opened:
        assert "hango_fs_listener_live" not in Scrape(str(opened)).names
        forget = register_mount(lambda: state)
        seen = Scrape(str(opened))
        forget()
        assert "hango_fs_listener_live" not in Scrape(str(opened)).names
    assert "hango_fs_listener_lag_seconds" not in seen.names
    expected = {
        "listener_live": 1,
        "listener_silence_seconds": 0.5,
        "listener_reconnects_total": 1,
        "pool_size": 3,
        "pool_idle": 2,
        "pool_waiting": 4,
        "pool_trips_total": 9,
        "pool_reconnects_total": 5,
        "sessions": 6,
        "namespaces": 7,
        "nodes": 8,
        "inodes": 10,
        "handles": 11,
        "content_cache_bytes": 12,
    }
    assert {name: seen.value(f"hango_fs_{name}") for name in expected} == expected


@pytest.mark.usefixtures("_quick")
def test_the_sdk_complains_in_our_log_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("opentelemetry.test")
    with exporting(PORT):
        for number in range(3):
            logger.warning("cannot reach %s", f"http://me:hunter2@collector/{number}")
        logger.info("nothing to see")
        try:
            raise OSError("contents")
        except OSError:
            logger.exception("while exporting")
        monkeypatch.setattr(exporters, "_REPEAT_S", 0.0)
        logger.warning("cannot reach %s", "it still")
    with exporting(PORT):
        pass
    logger.warning("left behind")
    assert capfd.readouterr().err == ""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["event"], line["level"], line["says"], line["error"]) for line in lines] == [
        ("telemetry.trouble", "warning", "cannot reach http://me:***@collector/0", None),
        ("telemetry.trouble", "warning", "while exporting", "OSError"),
        ("telemetry.trouble", "warning", "cannot reach it still", None),
        ("telemetry.trouble", "warning", "left behind", None),
    ]


def test_two_scrapes_at_once_take_turns() -> None:
    """The exporter's own collector gives one of the two nothing, and the other everything twice."""
    meeting = threading.Barrier(2)
    met: list[bool] = []

    class Meeting(Collector):
        def collect(self) -> Iterator[Metric]:
            try:
                meeting.wait(0.3)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)
            yield from ()

    inner = CollectorRegistry()
    inner.register(Meeting())
    turns = exporters._one_at_a_time(inner)
    threads = [threading.Thread(target=turns.collect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]


def test_spans_alone_measure_nothing() -> None:
    telemetry.configure(tracer_provider=TracerProvider())
    assert not telemetry.is_measuring()
    telemetry.configure()
