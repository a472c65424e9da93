"""What this process counted since it started, as plain numbers.

Decided here and only here: which counts are kept whether or not metrics are exported. `/.fusefs/status`
shows them, tests compare them, and the exported metrics read them, so that all three agree.

Threading: written on the trio thread. A reader in another thread (a metrics exporter) sees each number
whole, and perhaps a moment old.
"""

from __future__ import annotations

from collections import defaultdict


class Counters:
    """The counts. Increment the attributes directly: a method call costs more than the addition.

    Attributes:
        outcomes: finished operations by (operation, error type); '' where it succeeded.
        requests: FUSE requests by handler.
        cache_hits, cache_misses: by cache (`content`, `directory`, …).
        bytes_written: bytes of content that reached Postgres.
        conflicts: lost races, whose bytes were kept.
        rescued: writes that Postgres did not take, kept on the local disk.
        result_offloads: tools' results that were too long, by error type; '' where they were stored.
        hooks: runs of hooks by outcome (`ran`, `failed`, …), and events that were dropped.
        log_errors: log lines that could not be written (a full disk must not fail a file operation).
    """

    __slots__ = (
        "bytes_written",
        "cache_hits",
        "cache_misses",
        "conflicts",
        "hooks",
        "log_errors",
        "outcomes",
        "requests",
        "rescued",
        "result_offloads",
    )

    def __init__(self) -> None:
        self.outcomes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.requests: defaultdict[str, int] = defaultdict(int)
        self.cache_hits: defaultdict[str, int] = defaultdict(int)
        self.cache_misses: defaultdict[str, int] = defaultdict(int)
        self.bytes_written = 0
        self.conflicts = 0
        self.rescued = 0
        self.result_offloads: defaultdict[str, int] = defaultdict(int)
        self.hooks: defaultdict[str, int] = defaultdict(int)
        self.log_errors = 0

    def snapshot(self) -> dict[str, object]:
        """A copy in plain JSON values."""
        operations: defaultdict[str, int] = defaultdict(int)
        errors: dict[str, dict[str, int]] = {}
        # list() of a dict's items is one step under the interpreter's lock; a loop would not be.
        for (op, error_type), count in list(self.outcomes.items()):
            operations[op] += count
            if error_type:
                errors.setdefault(op, {})[error_type] = count
        return {
            "operations": dict(operations),
            "errors": errors,
            "requests": dict(self.requests),
            "cache_hits": dict(self.cache_hits),
            "cache_misses": dict(self.cache_misses),
            "bytes_written": self.bytes_written,
            "conflicts": self.conflicts,
            "rescued": self.rescued,
            "hooks": dict(self.hooks),
            "log_errors": self.log_errors,
        }


counters = Counters()
"""The counts of this process."""
