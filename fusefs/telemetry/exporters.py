"""Where metrics and spans go: Prometheus asks for them, OTLP sends them.

Decided here and only here: what switches an exporter on (the address of the command line, the standard variables
OTEL_*), which library does it, and how long its end may take. Until something is switched on nothing of the SDK is
imported.

Threading: `exporting` is entered and left by the main thread, before the first request and after the last. The endpoint
for Prometheus has one thread, and one for each scrape; OTLP has one for spans and one for metrics. All of them end with
the process, whatever they wait for.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fusefs import __version__
from fusefs.rules.address import Address
from fusefs.rules.errors import BadConfig, MountFailed
from fusefs.telemetry import metrics
from fusefs.telemetry.logs import get_logger
from fusefs.telemetry.mounts import observe_mounts

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

_END_S = 2.0
"""How long the last spans and metrics may take: a collector that does not answer must not keep a daemon."""
_REPEAT_S = 60.0
"""A complaint of the SDK is logged once in this time: a collector that is away is met every few seconds."""

_log = get_logger()


@contextmanager
def exporting(prometheus: Address | None) -> Iterator[Address | None]:
    """Export what the arguments and the environment ask for, until the block ends.

    Args:
        prometheus: where the endpoint is opened; None: there is none.

    Gives the address that was opened, with its port. Raises BadConfig for a variable that cannot be followed or a
    library that is missing, MountFailed when the port cannot be opened.
    """
    send_spans, send_metrics = _otlp_signals()
    if prometheus is None and not (send_spans or send_metrics):
        yield None
        return
    if _is_disabled():
        raise BadConfig("--metrics and OTEL_SDK_DISABLED do not go together", hint="Leave one of them out.")
    ends: list[Callable[[], object]] = []
    _take_complaints()
    with ExitStack() as stack:
        stack.callback(_end, ends)
        stack.callback(metrics.configure)
        readers: list[MetricReader] = []
        opened = _open_endpoint(prometheus, readers, ends) if prometheus is not None else None
        try:
            if send_metrics:
                readers.append(_otlp_reader())
            tracer_provider = _otlp_tracer_provider(ends) if send_spans else None
        except ValueError as exc:
            raise BadConfig(f"a variable OTEL_* is not valid: {exc}") from exc
        meter_provider = _meter_provider(readers, ends) if readers else None
        metrics.configure(tracer_provider=tracer_provider, meter_provider=meter_provider)
        yield opened


# -- What is asked for ---------------------------------------------------------------------------------


def _is_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _otlp_signals() -> tuple[bool, bool]:
    """Whether spans and metrics are sent: where an endpoint or the exporter `otlp` is named. A bare
    OTEL_SERVICE_NAME, as many environments have it, asks for nothing."""
    if _is_disabled():
        return False, False
    everywhere = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    spans = _is_sent(
        os.environ.get("OTEL_TRACES_EXPORTER", ""),
        everywhere or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""),
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ""),
    )
    numbers = _is_sent(
        os.environ.get("OTEL_METRICS_EXPORTER", ""),
        everywhere or os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", ""),
        os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", ""),
    )
    return spans, numbers


def _is_sent(exporter: str, endpoint: str, protocol: str) -> bool:
    """Whether one kind goes by OTLP. Raises BadConfig for what is asked for and not to be had."""
    exporter = exporter.strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise BadConfig(
            f"there is no exporter {exporter!r}", hint="It is `otlp` or `none`; for Prometheus pass --metrics."
        )
    if exporter == "none" or not (exporter or endpoint.strip()):
        return False
    protocol = (protocol or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")).strip().lower()
    if protocol not in ("", "http/protobuf"):
        raise BadConfig(
            f"OTLP goes by http/protobuf here, not {protocol!r}",
            hint="Set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf; a collector's port for it is mostly 4318.",
        )
    return True


@contextmanager
def _from_extra(extra: str, asked: str) -> Iterator[None]:
    """Around imports: an error that says what to install instead of one that says what is missing."""
    try:
        yield
    except ImportError as exc:
        raise BadConfig(
            f"{asked} needs a library that is not installed ({exc.name or exc})",
            hint=f"Run `pip install 'fusefs[{extra}]'`.",
        ) from exc


def _resource() -> Resource:
    """Who exports. What the environment says (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) wins."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": "fusefs", "service.version": __version__, "service.instance.id": uuid.uuid4().hex}
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _meter_provider(readers: list[MetricReader], ends: list[Callable[[], object]]) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(readers, _resource(), shutdown_on_exit=False)
    ends.append(lambda: provider.shutdown(timeout_millis=_END_S * 1000))
    observe_mounts(provider)
    return provider


# -- Prometheus ----------------------------------------------------------------------------------------


def _open_endpoint(address: Address, readers: list[MetricReader], ends: list[Callable[[], object]]) -> Address:
    with _from_extra("metrics", "--metrics"):
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    own = CollectorRegistry()
    shown = CollectorRegistry()
    shown.register(_one_at_a_time(own))
    ProcessCollector(registry=shown)
    try:
        server, thread = start_http_server(address.port, address.host, shown)
    except OSError as exc:
        raise MountFailed(
            f"metrics cannot be served at {address} ({exc.strerror or exc})",
            hint=f"Choose another --metrics; `ss -ltnp 'sport = :{address.port}'` shows who has the port.",
        ) from exc

    def close() -> None:
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which else looks twice a second
        server.shutdown()
        thread.join()
        server.server_close()

    ends.append(close)
    readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=own))
    return Address(address.host, server.server_port)


def _one_at_a_time(registry: Collector) -> Collector:
    """The same metrics, for one scrape at a time: two at once would get each other's from the exporter."""
    from prometheus_client.registry import Collector

    lock = threading.Lock()

    class OneAtATime(Collector):
        def collect(self) -> list[Metric]:
            with lock:
                return list(registry.collect())

    return OneAtATime()


# -- OTLP ----------------------------------------------------------------------------------------------


def _otlp_reader() -> MetricReader:
    with _from_extra("otlp", "OTLP, which OTEL_* asks for,"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        exporter = OTLPMetricExporter()  # it imports what carries it
    return PeriodicExportingMetricReader(exporter)


def _otlp_tracer_provider(ends: list[Callable[[], object]]) -> TracerProvider:
    with _from_extra("otlp", "OTLP, which OTEL_* asks for,"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    ends.append(provider.shutdown)
    return provider


# -- The end, and trouble on the way -------------------------------------------------------------------


def _end(ends: list[Callable[[], object]]) -> None:
    """End all exporters at once, and leave those behind that take too long: their threads end with the process."""
    deadline = time.monotonic() + _END_S
    threads = [threading.Thread(target=_end_one, args=(end,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _log.warning("telemetry.given_up", after_s=_END_S)


def _end_one(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:  # noqa: BLE001  (the SDK raises bare exceptions; nothing depends on it any more)
        _log.warning("telemetry.not_ended", error=type(error).__name__)


def _take_complaints() -> None:
    """Make lines of our log of what the SDK has to say, which would else be bare text on stderr. For good: a thread
    that was left behind complains after the end as well."""
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _Complaints) for handler in logger.handlers):
        logger.addHandler(_Complaints(logging.WARNING))
        logger.propagate = False


class _Complaints(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._said_at: dict[tuple[str, object], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        kind, now = (record.name, record.msg), time.monotonic()
        if now - self._said_at.get(kind, -math.inf) < _REPEAT_S:
            return
        self._said_at[kind] = now
        error = record.exc_info[0] if record.exc_info else None
        _log.warning("telemetry.trouble", says=record.getMessage(), error=error and error.__name__)
