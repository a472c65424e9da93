"""What is measured of a mount as a whole: its connections, and what it holds in memory.

Decided here and only here: which figures those are, with the names and units of their metrics. A module of its own,
since a mount that exports nothing need not load it.

Threading: `register_mount` on the trio thread; the rest runs in the exporter's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation


@dataclass(frozen=True, slots=True)
class MountState:
    """How a mount is at one moment. None: not known yet.

    Attributes:
        live: announcements of other writers arrive; reconnects: how often the connection for them was made again.
        lag_s: how long the last round trip on that connection took; silent_s: how long ago its answer came.
        pool_size: open connections to Postgres, of which pool_idle are free; pool_waiting: tasks without one.
        trips, pool_reconnects: round trips and connections made again, since the start.
        nodes: files and directories in memory; inodes: those that the kernel knows.
    """

    live: bool
    reconnects: int
    lag_s: float | None
    silent_s: float | None
    pool_size: int
    pool_idle: int
    pool_waiting: int
    trips: int
    pool_reconnects: int
    sessions: int
    namespaces: int
    nodes: int
    inodes: int
    handles: int
    content_cache_bytes: int


_mounts: list[Callable[[], MountState]] = []

_GAUGES: tuple[tuple[str, Callable[[MountState], float | None], str, str], ...] = (
    ("listener.live", lambda state: int(state.live), "", "Whether announcements of other writers arrive"),
    ("listener.lag", lambda state: state.lag_s, "s", "Last round trip on the connection for announcements"),
    ("listener.silence", lambda state: state.silent_s, "s", "Since its last answer"),
    ("pool.size", lambda state: state.pool_size, "{connection}", "Open connections to Postgres"),
    ("pool.idle", lambda state: state.pool_idle, "{connection}", "Open connections that are free"),
    ("pool.waiting", lambda state: state.pool_waiting, "{task}", "Requests that wait for a connection"),
    ("sessions", lambda state: state.sessions, "{session}", "Open sessions"),
    ("namespaces", lambda state: state.namespaces, "{namespace}", "Agents whose files are open"),
    ("nodes", lambda state: state.nodes, "{node}", "Files and directories in memory"),
    ("inodes", lambda state: state.inodes, "{inode}", "Inodes that the kernel knows"),
    ("handles", lambda state: state.handles, "{handle}", "Open files and directories"),
    ("content_cache", lambda state: state.content_cache_bytes, "By", "Contents in memory"),
)
_TOTALS: tuple[tuple[str, Callable[[MountState], float | None], str, str], ...] = (
    ("listener.reconnects", lambda state: state.reconnects, "{reconnect}", "Connections for announcements made again"),
    ("pool.reconnects", lambda state: state.pool_reconnects, "{reconnect}", "Connections of the pool made again"),
    ("pool.trips", lambda state: state.trips, "{trip}", "Round trips to Postgres"),
)


def register_mount(source: Callable[[], MountState]) -> Callable[[], None]:
    """Have a mount observed; returns the function that ends it. `source` is called in the exporter's thread and must
    not block. A process has one mount: of several the last one counts."""
    _mounts.append(source)
    return lambda: _mounts.remove(source)


def observe_mounts(provider: MeterProvider) -> None:
    """Export what `register_mount` was given; nothing while there is no mount."""
    from opentelemetry.metrics import Observation

    meter = provider.get_meter("fusefs")

    def observe(read: Callable[[MountState], float | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def callback(_options: CallbackOptions) -> Iterable[Observation]:
            for source in _mounts[-1:]:
                value = read(source())
                if value is not None:
                    yield Observation(value)

        return callback

    for name, read, unit, description in _GAUGES:
        meter.create_observable_gauge(f"hango.fs.{name}", [observe(read)], unit, description)
    for name, read, unit, description in _TOTALS:
        meter.create_observable_counter(f"hango.fs.{name}", [observe(read)], unit, description)
