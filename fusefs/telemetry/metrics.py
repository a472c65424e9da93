"""Spans and metrics through OpenTelemetry, when somebody asked for them.

Decided here and only here: the names, units and buckets of metrics (HF-18), and whether this process makes spans and
measures at all. `configure` is called once, with providers of the SDK (see `exporters`); until then no OpenTelemetry
code runs, and none is imported (that saves 0.1 s at the start of a daemon). What each metric means to an operator is in
docs/howto/observability.md. No attribute is a path or anything that an agent wrote.

Threading: `configure` at start; the callbacks below run in the exporter's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fusefs.telemetry.counters import counters

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

FileCounts = Callable[[], Mapping[str, int]]
"""Gives the number of files per tenant. It is called in the exporter's thread and must not block:
it returns what is known, it does not ask Postgres."""

_file_counts: list[FileCounts] = []

_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""An operation is a trip to Postgres, half a millisecond at best; a write is given up after 5 s."""

_BUCKETS_TOKENS = (100, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 100_000, 250_000, 1_000_000)
"""20,000 is the default limit of a result."""

_ANNOUNCEMENT = "announcement"
"""Counted with the requests, and none of the kernel's."""


class Instruments:
    """The tracer and the histogram of a configured process; either may be off."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace import StatusCode

        self._trace, self._context, self._error = trace, context, StatusCode.ERROR
        self.tracer = tracer_provider.get_tracer("fusefs") if tracer_provider is not None else None
        meter = meter_provider.get_meter("fusefs") if meter_provider is not None else None
        self.measuring = meter is not None
        self._duration: Histogram | None = None
        self._tokens: Histogram | None = None
        if meter is not None:
            self._duration = meter.create_histogram(
                "hango.fs.duration", "s", "Time of an operation", explicit_bucket_boundaries_advisory=_BUCKETS_S
            )
            self._tokens = meter.create_histogram(
                "hango.tool.result_tokens",
                "{token}",
                "Estimated tokens of a tool's result, before it was stored",
                explicit_bucket_boundaries_advisory=_BUCKETS_TOKENS,
            )
            _observe_counters(meter)

    def start_span(self, name: str) -> tuple[Span, Token[Context]] | None:
        """Open a span and make it the current one of this task."""
        if self.tracer is None:
            return None
        span = self.tracer.start_span(name)
        return span, self._context.attach(self._trace.set_span_in_context(span))

    def end_span(self, opened: tuple[Span, Token[Context]], attributes: Mapping[str, str | int], failed: bool) -> None:
        """Close the span. Attributes carry the error's type only: a message could quote what it must not."""
        span, token = opened
        for key, value in attributes.items():
            span.set_attribute(key, value)
        if failed:
            span.set_status(self._error)
        self._context.detach(token)
        span.end()

    def add_event(self, name: str, attributes: Mapping[str, str | int]) -> None:
        """Note something on the current span of this task; nowhere where it has none."""
        self._trace.get_current_span().add_event(name, attributes)

    def record(self, op: str, error_type: str, seconds: float) -> None:
        if self._duration is not None:
            self._duration.record(seconds, _outcome_attributes(op, error_type))

    def record_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.record(count)


active: Instruments | None = None
"""None: no spans, no metrics, and `operation` skips everything that serves them."""


def configure(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make spans with this tracer provider and metrics with this meter provider; without both, neither."""
    global active  # noqa: PLW0603  (decided once, read on every operation: a module-level flag is the cheapest)
    active = Instruments(tracer_provider, meter_provider) if tracer_provider or meter_provider else None


def is_measuring() -> bool:
    """Whether metrics go anywhere: what is measured for them alone need not be otherwise."""
    return active is not None and active.measuring


def register_file_count(source: FileCounts) -> Callable[[], None]:
    """Add a source of `hango.fs.file_count`; returns the function that removes it again.

    Counts of one tenant from several sources are added up.
    """
    _file_counts.append(source)
    return lambda: _file_counts.remove(source)


def _outcome_attributes(op: str, error_type: str) -> dict[str, str]:
    return {"op": op, "error.type": error_type} if error_type else {"op": op}


def _observe_counters(meter: Meter) -> None:
    """Export the process's own counters: one truth, and nothing to do on the hot path."""
    from opentelemetry.metrics import Observation

    def single(attribute: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: [Observation(getattr(counters, attribute))]

    def keyed(attribute: str, label: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _options: [
            Observation(count, {label: key}) for key, count in list(getattr(counters, attribute).items())
        ]

    def operations(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, _outcome_attributes(*key)) for key, count in list(counters.outcomes.items())]

    def result_offloads(_options: CallbackOptions) -> Iterable[Observation]:
        counts = list(counters.result_offloads.items())
        return [Observation(count, {"error.type": error_type} if error_type else {}) for error_type, count in counts]

    def file_counts(_options: CallbackOptions) -> Iterable[Observation]:
        totals: dict[str, int] = {}
        for source in list(_file_counts):
            for tenant_id, count in source().items():
                totals[tenant_id] = totals.get(tenant_id, 0) + count
        return [Observation(count, {"hango.tenant.id": tenant_id}) for tenant_id, count in totals.items()]

    def requests(_options: CallbackOptions) -> Iterable[Observation]:
        counts = list(counters.requests.items())
        return [Observation(count, {"handler": name}) for name, count in counts if name != _ANNOUNCEMENT]

    def announcements(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(counters.requests.get(_ANNOUNCEMENT, 0))]

    for name, callback, unit, description in (
        ("operations", operations, "{operation}", "Finished file operations"),
        ("bytes_written", single("bytes_written"), "By", "Bytes of content written"),
        ("conflicts", single("conflicts"), "{conflict}", "Lost races whose bytes were kept"),
        ("rescued", single("rescued"), "{write}", "Writes kept on the local disk"),
        ("log_errors", single("log_errors"), "{line}", "Log lines that could not be written"),
        ("cache.hits", keyed("cache_hits", "cache"), "{answer}", "Answers from a cache"),
        ("cache.misses", keyed("cache_misses", "cache"), "{answer}", "Answers that a cache did not have"),
        ("requests", requests, "{request}", "FUSE requests"),
        ("announcements", announcements, "{announcement}", "Announcements of other writers"),
    ):
        meter.create_observable_counter(f"hango.fs.{name}", [callback], unit, description)
    meter.create_observable_counter(
        "hango.tool.result_offloads", [result_offloads], "{result}", "Results that were too long for the context"
    )
    meter.create_observable_gauge("hango.fs.file_count", [file_counts], "{file}", "Files and directories of a tenant")
