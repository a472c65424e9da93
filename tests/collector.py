"""What stands at the other end of the exporters: a scrape of the endpoint, and a collector that takes OTLP."""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from fusefs import telemetry

BOUND_S = 30.0


@contextmanager
def recorded_spans() -> Iterator[InMemorySpanExporter]:
    """The spans that the block makes in this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.configure(tracer_provider=provider)
    yield exporter
    telemetry.configure()
    provider.shutdown()


class Scrape:
    """One answer of an endpoint for Prometheus."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=BOUND_S) as answer:
            self.text: str = answer.read().decode()
        self.samples = [
            (sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        ]
        self.names = {name for name, _, _ in self.samples}

    def value(self, name: str, /, **labels: str) -> float:
        """The one sample with these labels, those that are empty left out; 0 where there is none yet."""
        found = [
            value
            for its_name, its_labels, value in self.samples
            if its_name == name and {key: text for key, text in its_labels.items() if text} == labels
        ]
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name by one label."""
        return {labels[label]: value for its_name, labels, value in self.samples if its_name == name}


class Collector:
    """Takes OTLP over HTTP on the loopback and keeps what came."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.headers: list[dict[str, str]] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def last_metrics(self) -> dict[str, Metric]:
        """What came last, by name."""
        return {
            metric.name: metric
            for resource in self.metrics[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.headers.append(headers)
        if path == "/v1/traces":
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            return 404
        return 200


def attributes(pairs: object) -> dict[str, str | int]:
    """OTLP's list of attributes as a dictionary."""
    found: dict[str, str | int] = {}
    for pair in pairs:  # type: ignore[attr-defined]
        assert isinstance(pair, KeyValue)
        kind = pair.value.WhichOneof("value")
        assert kind is not None
        found[pair.key] = getattr(pair.value, kind)
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector in a thread of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
