"""What must hold after many sessions wrote at once: the logs of the workers against what Postgres has.

Decided here and only here: what counts as a lost write, a silent overwrite, a doubled append, a conflict without
cause, a read of what never was. Pure functions over a `Run`; nothing here knows how a mount decides.

A version is known by its content, never by the number that the mount said: contents name their makers (`worker.py`).
A session has seen a version when a read of it returned exactly those bytes before the change in question, or when it
wrote that version as a whole, or appended to one that it had seen.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.harness import Namespace
from tests.mount.model.worker import LINE, MAX_LINES, NONE, UNKNOWN

Record = dict[str, Any]
Key = tuple[str, ...]
"""The tokens of a content, line by line."""

Step = tuple[str, int]
"""Lineage and version."""

CLOCK_NS = 1_000
"""Postgres tells the time of the same clock in microseconds."""

LATE_NS = 15_000_000_000
"""How much later a change may come whose call did not say what became of it."""

FORGOTTEN_NS = 2_000_000_000
"""How long before a crash of the server a directory may have been made that it forgets."""

STALE_NAME_NS = 1_000_000_000
"""How long a name that others took away may be known to a kernel: it is told by a thread, which may wait."""

RELEASE_NS = 2_000_000_000
"""How much later than close(2) the last close may make a file whose bytes were refused, as an empty one."""

EXCERPT = 12
_LINE = re.compile(rf"([A-Za-z0-9]{{2}}\d{{7}}[a-jA-J]) ({NONE}|[A-Za-z0-9]{{2}}\d{{7}}[a-jA-J]) \.+\n")
_DEFINITE = frozenset({"ok", "ESTALE", "ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENOTEMPTY"})
_CONTENT_OPS = frozenset({"create", "write", "append", "rename"})


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the history, with the content that the version had as far as it is known."""

    lineage: str
    version: int
    seq: int
    at: int
    op: str
    kind: str
    path: str
    old_path: str | None
    size: int
    session: str
    old_state: str
    old_size: int
    old_content: str | None

    @property
    def step(self) -> Step:
        return self.lineage, self.version

    @property
    def changes_content(self) -> bool:
        """A plain rename repeats the version and changes nothing."""
        return self.op in _CONTENT_OPS and not (self.op == "rename" and self.old_state == "none")

    def __str__(self) -> str:
        moved = f" (was {self.old_path})" if self.old_path else ""
        return (
            f"{self.at} row {self.seq} {self.session} {self.op} {self.path}{moved} "
            f"{self.lineage[:8]} version {self.version}, {self.size} bytes, superseded: {self.old_state}"
        )


@dataclass(frozen=True, slots=True)
class Conflict:
    path: str
    session: str
    content: str


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise, with the lines of the logs and the history that show it."""

    rule: str
    text: str
    excerpt: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.rule}: {self.text}", *(f"    {line}" for line in self.excerpt)))


@dataclass
class Run:
    """Everything that is known of one run in one namespace.

    Attributes:
        files: path to (lineage, version, content) of what exists; content None: a directory.
        outages: (from, to) in ns, in which a daemon or Postgres was away.
        crashes: when Postgres ended without a checkpoint; a directory made just before may be forgotten.
        rescued: contents in the rescue directory.
    """

    records: list[Record]
    rows: list[Row]
    files: dict[str, tuple[str, int, str | None]]
    conflicts: list[Conflict]
    outages: list[tuple[int, int]] = field(default_factory=list)
    crashes: list[int] = field(default_factory=list)
    rescued: list[str] = field(default_factory=list)


def load(namespace: Namespace, top: str) -> tuple[list[Row], dict[str, tuple[str, int, str | None]], list[Conflict]]:
    """History, files and conflicts below a directory, past every cache. Paths are relative to it."""
    scope = (namespace.tenant_id, namespace.agent_id, f"{top}/", f"{top}0")
    where = "WHERE tenant_id = %s AND agent_id = %s AND path >= %s AND path < %s"
    start = len(top) + 2  # substr counts from 1, and there is a slash

    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        rows = conn.execute(
            "SELECT file_id::text, version, seq, (extract(epoch from at) * 1000000)::bigint * 1000, op, kind,"
            f" substr(path, {start}), substr(old_path, {start}), size_bytes, updated_session, old_state, old_size,"
            f" coalesce(convert_to(old_content, 'UTF8'), old_bytes) FROM agent_file_versions {where} ORDER BY seq",
            scope,
        ).fetchall()
        files = conn.execute(
            f"SELECT substr(path, {start}), id::text, version, kind,"
            f" coalesce(content_bytes, convert_to(content, 'UTF8')) FROM agent_files {where}",
            scope,
        ).fetchall()
        conflicts = conn.execute(
            f"SELECT substr(path, {start}), session, content FROM agent_file_conflicts {where} ORDER BY at", scope
        ).fetchall()
    return (
        [Row(*row[:-1], _text(row[-1])) for row in rows],
        {path: (node, version, None if kind == "dir" else _text(raw)) for path, node, version, kind, raw in files},
        [Conflict(path, session, _text(raw) or "") for path, session, raw in conflicts],
    )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("latin-1")


def check(run: Run) -> list[Violation]:
    """Every broken promise of a run."""
    return list(_Oracle(run).violations())


def key_of(text: str) -> Key | None:
    """The tokens of a content; None for what nobody wrote so."""
    found = tuple(match[1] for match in _LINE.finditer(text))
    return found if len(found) * LINE == len(text) else None


def _shown(record: Record) -> str:
    rest = {name: value for name, value in record.items() if name not in ("s", "n", "op", "p", "t0", "t1", "r", "w")}
    where = record["p"] + (f" -> {rest.pop('q')}" if "q" in rest else "")
    more = " ".join(f"{name}={value!r}" for name, value in rest.items() if value not in ("", None, []))
    return f"{record['t0']} to {record['t1']} {record['s']}#{record['n']} {record['op']} {where}: {record['r']} {more}"


class _Oracle:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.by_lineage: dict[str, list[Row]] = defaultdict(list)
        for row in run.rows:
            if row.kind == "file":
                self.by_lineage[row.lineage].append(row)
        for rows in self.by_lineage.values():
            rows.sort(key=lambda row: (row.version, row.seq))
        self.maker: dict[Step, Row] = {}
        """The row that made a version (a plain rename repeats the number and makes nothing)."""
        self.paths: dict[Step, set[str]] = defaultdict(set)
        self.content: dict[Step, str | None] = {}
        """None: coalesced."""
        self.owner = {token: record for record in run.records for token in record.get("tokens", ())}
        self.moved_from: dict[Step, Step] = {}
        self.readable: set[Step] = set()
        self._reconstruct()
        self.keys = {step: key_of(text) for step, text in self.content.items() if text is not None}
        self.known = set(self.keys.values())
        self.known |= {key_of(state) for record in run.records for state in record.get("states", ())}
        self.records_of: dict[str, list[Record]] = defaultdict(list)
        for record in sorted(run.records, key=lambda record: record["t0"]):
            self.records_of[record["s"]].append(record)
        self.conflicts_of: dict[str, list[Conflict]] = defaultdict(list)
        for conflict in run.conflicts:
            self.conflicts_of[conflict.content[:10].lower()].append(conflict)
        self.rows_of: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(run.rows, key=lambda row: row.at):
            self.rows_of[row.session].append(row)
        self.births = self._find_births()
        self._find_seen()

    # -- What was there ----------------------------------------------------------------------------

    def _reconstruct(self) -> None:
        """The content of each version, from the row that superseded it."""
        for node, version, text in self.run.files.values():
            if text is not None:
                self.content[node, version] = text
                self.readable.add((node, version))
        for rows in self.by_lineage.values():
            for row in rows:
                if row.step not in self.maker and row.changes_content:
                    self.maker[row.step] = row
                if row.op not in ("delete", "moved"):
                    self.paths[row.step].add(row.path)
        moves: list[Row] = []
        for row in sorted(self.run.rows, key=lambda row: row.seq, reverse=True):
            before = row.lineage, row.version - 1
            if row.old_state in ("text", "bytes"):
                self.content[before] = row.old_content
                self.readable.add(before)
            elif row.old_state == "prefix":
                after = self.content.get(row.step)
                self.content[before] = None if after is None else after[: row.old_size]
                if row.step in self.readable:
                    self.readable.add(before)
            elif row.old_state == "coalesced":
                self.content[before] = self._first_state(row)
            elif row.op == "moved":
                # Its content went into the file that it was renamed over, in the same transaction.
                for to in reversed(moves):
                    if (to.session, to.old_path) == (row.session, row.path):
                        self.content[before] = self.content.get(to.step)
                        self.moved_from[to.step] = before
                        break
            if row.old_path is not None:
                moves.append(row)

    def _first_state(self, row: Row) -> str | None:
        """What a writer had first stored through the handle with which it made this version: its log knows."""
        text = self.content.get(row.step)
        states = self.owner.get((text or "")[:10], {}).get("states", ())
        return next((state for state in ("", *states) if len(state) == row.old_size), None)

    def _find_births(self) -> dict[str, list[Row]]:
        """Token to the rows that brought it in. Lines that a writer kept of what it had read are not born anew."""
        found: dict[str, list[Row]] = defaultdict(list)
        for step, row in self.maker.items():
            key = self.keys.get(step)
            if row.old_path is not None or not key:
                continue
            before = self.keys.get((step[0], step[1] - 1)) if row.old_state != "none" else ()
            if row.op == "append":
                born = set(key[row.old_size // LINE :])
            else:
                born = {token for token in key if token.lower() == key[0].lower()} - set(before or ())
            for token in born:
                found[token].append(row)
        return found

    # -- What was seen -----------------------------------------------------------------------------

    def _find_seen(self) -> None:
        """Per session: when it first read each version, and when it first knew anything of a lineage."""
        steps_of: dict[Key, list[Step]] = defaultdict(list)
        for step, key in self.keys.items():
            if key is not None and step in self.maker:
                steps_of[key].append(step)
        self.read_at: dict[tuple[str, Step], int] = {}
        self.knew_at: dict[tuple[str, str], int] = {}
        for session, records in self.records_of.items():
            for record in records:
                if record.get("got") is not None:
                    self._saw(session, record, record["p"], key_of(record["got"]), steps_of)
                elif record["op"] == "sed" and record["tokens"][0] in self.births:
                    # What sed read is what it wrote, with the first line's former token.
                    row = self.births[record["tokens"][0]][0]
                    text, key = self.content.get(row.step), self.keys.get(row.step)
                    if text and key:
                        self._saw_head(session, record, (text[11:21], *key[1:]), steps_of)
        for row in self.run.rows:
            if row.kind == "file" and row.changes_content:
                self._knew(row.session, row.lineage, row.at)

    def _saw(self, session: str, record: Record, path: str, key: Key | None, steps: dict[Key, list[Step]]) -> None:
        """Whoever read the same bytes in another file, before it was renamed over this one, has seen them. But that
        it knows this file, only a read at its path shows."""
        if key is None:
            return
        fitting = [step for step in steps.get(key, ()) if self.maker[step].at <= record["t1"] + CLOCK_NS]
        for step in fitting:
            at = self.read_at.get((session, step))
            self.read_at[session, step] = record["t0"] if at is None else min(at, record["t0"])
        here = {step[0] for step in fitting if path in self.paths[step]}
        if key and len(here) == 1:
            self._knew(session, here.pop(), record["t1"])

    def _saw_head(self, session: str, record: Record, head: Key, steps: dict[Key, list[Step]]) -> None:
        """sed wrote what it read, without what comes after the first lines."""
        for key in [key for key in steps if key == head or (len(head) == MAX_LINES and key[:MAX_LINES] == head)]:
            self._saw(session, record, record["p"], key, steps)

    def _knew(self, session: str, lineage: str, at: int) -> None:
        known = self.knew_at.get((session, lineage))
        self.knew_at[session, lineage] = at if known is None else min(known, at)

    def knew(self, session: str, lineage: str, before: int) -> bool:
        return self.knew_at.get((session, lineage), before) < before

    def saw(self, session: str, step: Step, before: int) -> bool:
        while True:
            if self.content.get(step) == "" or self.read_at.get((session, step), before) < before:
                return True
            if step in self.moved_from and self.saw(session, self.moved_from[step], before):
                return True  # where it was before others renamed it over this one
            row = self.maker.get(step)
            if row is None or row.session != session:
                return False
            if step in self.moved_from:
                return not self.knew(session, self.moved_from[step][0], row.at)
            if row.op != "append":
                return True
            if not self.knew(session, step[0], row.at):
                return True
            step, before = (step[0], step[1] - 1), row.at

    # -- The rules ---------------------------------------------------------------------------------

    def violations(self) -> Iterator[Violation]:
        for record in self.run.records:
            yield from self._record(record)
        for rows in self.by_lineage.values():
            for row in rows:
                yield from self._row(row)
        yield from self._directories()
        yield from self._conflicts()
        yield from self._doubled()
        yield from self._backwards()

    def away(self, record: Record) -> bool:
        """Whether a daemon or Postgres was away during it."""
        return any(start <= record["t1"] and record["t0"] <= end for start, end in self.run.outages)

    def window(self, record: Record) -> tuple[int, int]:
        late = LATE_NS if record["r"] in UNKNOWN or self.away(record) else CLOCK_NS
        return record["t0"] - CLOCK_NS, record["t1"] + late

    def _record(self, record: Record) -> Iterator[Violation]:
        result, op = record["r"], record["op"]
        # A sed whose fstat fails, since the daemon was killed, says "not a regular file".
        if result not in _DEFINITE and result not in UNKNOWN and not (op == "sed" and self.away(record)):
            yield self._violation("unexpected answer", f"{op} {record['p']} says {result}", [record])
        if op in ("write", "exclusive", "append"):
            yield from self._write(record)
        elif op in ("tool", "sed"):
            for token in record["tokens"]:
                yield from self._token(record, token, result)
        elif op == "builtin":
            yield from self._builtin(record)
        elif op == "rename":
            yield from self._rename(record)
        elif op == "unlink":
            yield from self._unlink(record)

    def _builtin(self, record: Record) -> Iterator[Violation]:
        """bash writes in good faith or is refused at the open; what it was not told of close is in the conflicts."""
        (token,) = record["tokens"]
        result = record["r"]
        wrote = result == "ok" or "write error" in record["stderr"]
        births = self.births.get(token, [])
        kept = len(births) + len(self.conflicts_of.get(token, ()))
        unsure = result in UNKNOWN or self.away(record)
        if not int(wrote and not unsure) <= kept <= int(wrote or unsure):
            yield self._violation(
                "lost write", f"{token} is kept {kept} times, the shell said {result}", [record], births
            )

    def _write(self, record: Record) -> Iterator[Violation]:
        result = record["r"]
        for token in record["tokens"]:
            yield from self._token(record, token, "ok" if token in record["acked"] else result)
        kept = self.conflicts_of.get(record["tokens"][0], [])
        wanted = int(result == "ESTALE" and record["stage"] in ("write", "close"))
        rescued = sum(any(token in text for token in record["tokens"]) for text in self.run.rescued)
        if result in UNKNOWN:
            stored = any(self.births.get(token) for token in record["tokens"] if token not in record["acked"])
            if len(kept) + stored > 1:
                yield self._violation("kept twice", f"{record['tokens']}: stored and a conflict", [record])
            # The daemon answered: it has the bytes somewhere.
            nowhere = record["stage"] != "open" and not (kept or stored or rescued or self.away(record))
            if result == "EIO" and nowhere:
                yield self._violation("lost write", f"{record['tokens']} is nowhere after EIO", [record])
        elif len(kept) + rescued != wanted:
            yield self._violation(
                "conflict", f"{record['tokens']}: {len(kept)} conflicts instead of {wanted}", [record]
            )

    def _token(self, record: Record, token: str, result: str) -> Iterator[Violation]:
        """A write that was acknowledged is in the history once, one that was refused is not."""
        births = self.births.get(token, [])
        begin, end = self.window(record)
        most = int(result == "ok" or result in UNKNOWN or record["op"] in ("tool", "sed"))
        least = int(result == "ok" and not (record["op"] == "sed" and self._emptied(record)))
        if not least <= len(births) <= most:
            rule = "lost write" if len(births) < least else "refused but stored" if most == 0 else "stored twice"
            yield self._violation(
                rule, f"{token} was answered {result}, and is stored {len(births)} times", [record], births
            )
        for row in births:
            if row.session != record["s"] or not begin <= row.at <= end:
                yield self._violation(
                    "wrong time", f"{token} was stored by another or at another time", [record], [row]
                )
            if record["op"] == "append" and row.op not in ("append", "create") and not self._holds(record):
                yield self._violation("append", f"{token} was appended, and stored by {row.op}", [record], [row])
            text = self.content.get(row.step)
            states = record.get("states")
            if states and text is not None:
                before = self.content.get((row.lineage, row.version - 1)) or ""
                wanted = [before + state for state in states] if row.op == "append" else states
                if record.get("patch"):
                    wanted = [states[0][:LINE] + before[LINE:]]  # not what was read, which may have been torn
                    if self._holds(record):
                        wanted.append(states[0])  # the session had emptied it through that descriptor
                if text not in wanted:
                    yield self._violation("wrong content", f"{token}: stored are {key_of(text)}", [record], [row])

    def _holds(self, record: Record) -> bool:
        """Whether the session held a file open meanwhile. It may be this one, under the name that others gave it: then
        the write went into a content that was being replaced."""
        return any(
            other["t0"] < record["t0"] and record["t1"] < other["t1"]
            for other in self.records_of[record["s"]]
            if other["op"] == "write"
        )

    def _emptied(self, record: Record) -> bool:
        """sed on an empty file: nothing is written, an empty file takes its place."""
        return any(row.size == 0 and row.op in ("rename", "create") for row in self._rows_in(record))

    def _rows_in(self, record: Record) -> Iterator[Row]:
        begin, end = self.window(record)
        rows = self.rows_of[record["s"]]
        for row in rows[bisect.bisect_left(rows, begin, key=lambda row: row.at) :]:
            if row.at > end:
                return
            yield row

    def _rename(self, record: Record) -> Iterator[Violation]:
        made = [row for row in self._rows_in(record) if (row.old_path, row.path) == (record["p"], record["q"])]
        result = record["r"]
        most = int(result == "ok")
        least = int(result == "ok" and not self._same_file(record))
        unsure = result in UNKNOWN or self.away(record)
        if not least <= len(made) <= most and not unsure:
            yield self._violation("rename", f"answered {result}, and done {len(made)} times", [record], made)

    def _same_file(self, record: Record) -> bool:
        """Whether others had just made the same rename: the kernel may know both names as one file's for a moment, and
        a rename of a file to itself does nothing."""
        return any(
            (row.old_path, row.path) == (record["p"], record["q"]) and abs(row.at - record["t0"]) < STALE_NAME_NS
            for row in self.run.rows
        )

    def _unlink(self, record: Record) -> Iterator[Violation]:
        made = [r for r in self._rows_in(record) if r.op == "delete" and r.path == record["p"] and r.kind == "file"]
        result = record["r"]
        least = int(result == "ok" and not (not made and self._claimed(record)))
        unsure = result in UNKNOWN or self.away(record)
        if not least <= len(made) <= int(result == "ok") and not unsure:
            yield self._violation("unlink", f"answered {result}, and done {len(made)} times", [record], made)

    def _claimed(self, record: Record) -> bool:
        """Whether another session was making the file by O_EXCL: what it has then is a name without a version."""
        return any(
            other["p"] == record["p"] and other["op"] in ("exclusive", "tool") and other["s"] != record["s"]
            and other["t0"] <= record["t1"] and record["t0"] <= other["t1"] + LATE_NS * self.away(other)
            for other in self.run.records
        )  # fmt: skip

    def _row(self, row: Row) -> Iterator[Violation]:
        """No change overwrites what its session did not know."""
        if not any(self._explains(record, row) for record in self._around(row)):
            yield self._violation("unexplained", "nobody did this", [], [row])
        if row is not self.maker.get(row.step):
            return
        before = row.lineage, row.version - 1
        text, now = self.content.get(before), self.content.get(row.step)
        spare = row.op == "create" and row.path.rpartition("/")[2].startswith("sed")  # what sed read, which may be torn
        if now is not None and not spare and (key_of(now) is None or len(now) != row.size):
            yield self._violation("torn content", repr(now), [], [row])
        if row.op == "append":
            if text is not None and now is not None and not now.startswith(text):
                yield self._violation("append", "the content before is not the beginning", [], [row])
        elif row.old_state == "coalesced":
            earlier = self.maker.get(before)
            if earlier is not None and earlier.session != row.session:
                yield self._violation("coalesced", "another session's version is not kept", [], [earlier, row])
        elif (
            row.old_state != "none"
            and not self.saw(row.session, before, row.at)
            and self.knew(row.session, row.lineage, row.at)
            and not self._opened_elsewhere(row, before)
        ):
            yield self._overwrite(row)

    def _opened_elsewhere(self, row: Row, before: Step) -> bool:
        """Whether the writer had opened the file that others renamed over this one: what it built on is that file's
        content, which it knew, or nothing of that file."""
        source, made, key = self.moved_from.get(before), self.maker.get(before), self.keys.get(row.step)
        if source is None or made is None or not key:
            return False
        opened = any(record["t0"] < made.at for record in self._of(key[0]))
        return opened and (self.saw(row.session, source, row.at) or not self.knew(row.session, source[0], made.at))

    def _overwrite(self, row: Row) -> Violation:
        rows = [r for r in self.by_lineage[row.lineage] if row.version - 4 <= r.version <= row.version]
        paths = {r.path for r in rows}
        seen = [
            record
            for record in self.records_of[row.session]
            if record["t0"] < row.at and paths & {record["p"], record.get("q")}
        ]
        missed = self.content.get((row.lineage, row.version - 1))
        text = f"{row.session} replaced version {row.version - 1} of {row.path} unseen: {key_of(missed or '')}"
        now = self.keys.get(row.step) or ("",)
        by = [record for record in self._of(now[0]) if record not in seen[-5:]]
        return self._violation("silent overwrite", text, seen[-5:] + by, rows)

    def _around(self, row: Row) -> Iterator[Record]:
        """The session's records whose window may hold the row, the newest first."""
        records = self.records_of.get(row.session, [])
        at = bisect.bisect_right(records, row.at + CLOCK_NS, key=lambda record: record["t0"])
        for record in reversed(records[:at]):
            if record["t0"] < row.at - LATE_NS - 60_000_000_000:
                return
            begin, end = self.window(record)
            if begin <= row.at <= end + (RELEASE_NS if row.op == "create" and not row.size else 0):
                yield record

    def _explains(self, record: Record, row: Row) -> bool:
        """Whether a record may have made a row. A write follows its file to where others moved it meanwhile."""
        op = record["op"]
        if op in ("write", "append", "exclusive"):
            return row.op in ("create", "write", "append")
        if op in ("tool", "builtin"):
            return row.op in ("create", "write", "append") or (row.op == "delete" and record["p"] == row.path)
        if op == "sed":
            return True  # its spare file has a name of its own choice
        if op == "rename":
            return row.op in ("rename", "moved", "create")
        return {"truncate": "write", "unlink": "delete", "rmdir": "delete"}.get(op) == row.op

    def _directories(self) -> Iterator[Violation]:
        """mkdir and rmdir of a name take turns, and the last one decides."""
        for path in sorted({r["p"] for r in self.run.records if r["op"] == "mkdir"}):
            of = [r for r in self.run.records if r["op"] in ("mkdir", "rmdir") and r["p"] == path]
            made = sum(r["op"] == "mkdir" and r["r"] == "ok" for r in of)
            gone = sum(r["op"] == "rmdir" and r["r"] == "ok" for r in of)
            maybe_made = sum(r["op"] == "mkdir" and (r["r"] in UNKNOWN or self.away(r)) for r in of)
            maybe_gone = sum(r["op"] == "rmdir" and (r["r"] in UNKNOWN or self.away(r)) for r in of)
            # Made without waiting for the disk: a crash of the server may forget it.
            maybe_gone += sum(
                r["op"] == "mkdir" and any(0 <= crash - r["t1"] < FORGOTTEN_NS for crash in self.run.crashes)
                for r in of
            )
            there = int(path in self.run.files)
            if not made - gone - maybe_gone <= there <= made - gone + maybe_made:
                text = f"{path}: made {made}, removed {gone} times, and is {'' if there else 'not '}there"
                yield self._violation("directory", text, of[-6:])

    def _conflicts(self) -> Iterator[Violation]:
        for conflict in self.run.conflicts:
            owner = self.owner.get(conflict.content[:10])
            if owner is None:
                if conflict.content:
                    yield Violation("conflict", f"nobody wrote this: {conflict}")
            elif owner["s"] != conflict.session:
                yield self._violation("conflict", f"{conflict.session} has what is another's: {conflict}", [owner])
        for number, conflicts in self.conflicts_of.items():
            if number and len(conflicts) > 1:
                yield Violation("conflict", f"{number} is kept {len(conflicts)} times", tuple(map(str, conflicts)))

    def _doubled(self) -> Iterator[Violation]:
        """Each line is in a content once, and in one file."""
        for step, key in self.keys.items():
            for token, count in Counter(key or ()).items():
                if count > 1:
                    rows = [self.maker[step]] if step in self.maker else []
                    yield self._violation("doubled", f"{token} is there {count} times", self._of(token), rows)
        first = Counter(key_of(text)[0] for _, _, text in self.run.files.values() if text and key_of(text))  # type: ignore[index]
        for token, count in first.items():
            if count > 1:
                yield self._violation("doubled", f"{token} is in {count} files", self._of(token), self.births[token])

    def _of(self, token: str) -> list[Record]:
        return [self.owner[token]] if token in self.owner else []

    def torn(self) -> Iterator[Violation]:
        """Reads of a content that never was: read(2) is not atomic against a change by others."""
        for record in self.run.records:
            if record.get("got") is not None:
                key = key_of(record["got"])
                if key is None or key not in self.known:
                    text = f"{record['p']}: {record['got']!r}" if key is None else f"{record['p']}: {key} never was"
                    yield self._violation("torn read", text, [record])

    def _backwards(self) -> Iterator[Violation]:
        """Nobody reads an older version of a file after a newer one."""
        steps_of: dict[tuple[str, Key], list[Step]] = defaultdict(list)
        for step, found in self.keys.items():
            if found:
                for path in self.paths[step]:
                    steps_of[path, found].append(step)
        for records in self.records_of.values():
            newest: dict[str, tuple[int, Record]] = {}
            for record in records:
                key = key_of(record.get("got") or "")
                fitting = steps_of.get((record["p"], key), []) if key else []
                if len(fitting) != 1:
                    continue
                ((lineage, version),) = fitting
                before = newest.get(lineage)
                if before is not None and before[0] > version:
                    text = f"{record['p']}: version {version} after {before[0]}"
                    yield self._violation("read backwards", text, [before[1], record])
                elif before is None or before[0] < version:
                    newest[lineage] = version, record

    def _violation(self, rule: str, text: str, records: Sequence[Record], rows: Iterable[Row] = ()) -> Violation:
        lines = sorted([_shown(record) for record in records] + [str(row) for row in rows])
        return Violation(rule, text, tuple(lines[-EXCERPT:]))


def read_log(path: Path) -> list[Record]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def torn(run: Run) -> list[Violation]:
    """Reads that were cut or filled up. They break no promise, as long as nothing is overwritten for them."""
    return list(_Oracle(run).torn())


def kept(run: Run) -> dict[Row, str]:
    """The rows that made a version whose content the API of versions must be able to read, and that content."""
    oracle = _Oracle(run)
    return {row: oracle.content[step] or "" for step, row in oracle.maker.items() if step in oracle.readable}
