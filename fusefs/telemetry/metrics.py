"""Spans and metrics through OpenTelemetry, when somebody asked for them.

Decided here and only here: the names of metrics (HF-18) and whether this process makes spans and
measures at all. The composition root calls `configure` once, with providers of the SDK; until then no
OpenTelemetry code runs, and none is imported (that saves 0.1 s at the start of a daemon).

| metric | kind | attributes |
|---|---|---|
| `hango.fs.operations` | counter | `op`, `error.type` where it failed |
| `hango.fs.duration` | histogram, seconds | `op`, `error.type` where it failed |
| `hango.fs.bytes_written` | counter, bytes | |
| `hango.fs.conflicts` | counter | |
| `hango.fs.cache.hits`, `hango.fs.cache.misses` | counter | `cache` |
| `hango.fs.requests` | counter | `handler` |
| `hango.fs.file_count` | gauge | `hango.tenant.id` |

Threading: `configure` at start; the callbacks below run in the exporter's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fusefs.telemetry.counters import counters

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

FileCounts = Callable[[], Mapping[str, int]]
"""Gives the number of files per tenant. It is called in the exporter's thread and must not block:
it returns what is known, it does not ask Postgres."""

_file_counts: list[FileCounts] = []


class Instruments:
    """The tracer and the histogram of a configured process; either may be off."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace import StatusCode

        self._trace, self._context, self._error = trace, context, StatusCode.ERROR
        self.tracer = tracer_provider.get_tracer("fusefs") if tracer_provider is not None else None
        meter = meter_provider.get_meter("fusefs") if meter_provider is not None else None
        self._duration = meter.create_histogram("hango.fs.duration", "s", "Time of an operation") if meter else None
        if meter is not None:
            _observe_counters(meter)

    def start_span(self, op: str) -> tuple[Span, Token[Context]] | None:
        """Open `fs.{op}` and make it the current span of this task."""
        if self.tracer is None:
            return None
        span = self.tracer.start_span(f"fs.{op}")
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

    def record(self, op: str, error_type: str, seconds: float) -> None:
        if self._duration is not None:
            self._duration.record(seconds, _outcome_attributes(op, error_type))


active: Instruments | None = None
"""None: no spans, no metrics, and `operation` skips everything that serves them."""


def configure(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Make spans with this tracer provider and metrics with this meter provider; without both, neither."""
    global active  # noqa: PLW0603  (decided once, read on every operation: a module-level flag is the cheapest)
    active = Instruments(tracer_provider, meter_provider) if tracer_provider or meter_provider else None


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

    def file_counts(_options: CallbackOptions) -> Iterable[Observation]:
        totals: dict[str, int] = {}
        for source in list(_file_counts):
            for tenant_id, count in source().items():
                totals[tenant_id] = totals.get(tenant_id, 0) + count
        return [Observation(count, {"hango.tenant.id": tenant_id}) for tenant_id, count in totals.items()]

    for name, callback, unit, description in (
        ("hango.fs.operations", operations, "1", "Finished file operations"),
        ("hango.fs.bytes_written", single("bytes_written"), "By", "Bytes of content written"),
        ("hango.fs.conflicts", single("conflicts"), "1", "Lost races whose bytes were kept"),
        ("hango.fs.cache.hits", keyed("cache_hits", "cache"), "1", "Answers from a cache"),
        ("hango.fs.cache.misses", keyed("cache_misses", "cache"), "1", "Answers that a cache did not have"),
        ("hango.fs.requests", keyed("requests", "handler"), "1", "FUSE requests"),
    ):
        meter.create_observable_counter(name, [callback], unit, description)
    meter.create_observable_gauge("hango.fs.file_count", [file_counts], "1", "Files of a tenant")
