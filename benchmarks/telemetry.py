#!/usr/bin/env python3
"""What telemetry costs an operation, and the start of a mount: switched off, and with each exporter.

    benchmarks/telemetry.py [--rounds N] [--files N]

First the wrapper alone, as every operation has it, in microseconds: the best of N rounds (20 if nothing else is said).
Then whole files in a mount on an embedded Postgres in a temporary directory: create, write and close, in microseconds
for each of some hundred files, with mounts that differ in their exporters, in turn. The collector of the mounts is on
the loopback and drops what it gets. At last the time until a mount is ready. Medians; the machine's noise is larger
than the differences between whole files. Run it with the interpreter that has fusefs and its extras:
.venv/bin/python benchmarks/telemetry.py
"""

from __future__ import annotations

import argparse
import http.server
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FUSEFS = Path(sys.executable).with_name("fusefs")
ROUNDS_OF_MOUNTS = 7


class Drop(http.server.BaseHTTPRequestHandler):
    """Takes what is sent and forgets it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[dict[str, str]]:
    """A collector; gives the environment that sends to it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


def wrapper_us(rounds: int) -> float:
    """One operation without anything in it."""
    from fusefs import telemetry
    from fusefs.rules.scope import Principal, Scope

    scope = Scope(str(uuid.uuid4()), str(uuid.uuid4()), "s", Principal.AGENT)

    def wrapped() -> None:
        with telemetry.operation("read", scope, "/a") as op:
            op.bytes(3)

    return min(timeit.repeat(wrapped, number=2000, repeat=rounds)) / 2000 * 1e6


def wrappers(rounds: int, collector: dict[str, str]) -> None:
    from fusefs.rules.address import Address
    from fusefs.telemetry.exporters import exporting

    print(f"the wrapper, off:                   {wrapper_us(rounds):6.2f} us")
    with exporting(Address("127.0.0.1", 0)):
        print(f"the wrapper, --metrics:             {wrapper_us(rounds):6.2f} us")
    os.environ.update(collector)
    with exporting(None):
        print(f"the wrapper, OTLP spans and metrics: {wrapper_us(rounds):5.2f} us")
    for name in collector:
        del os.environ[name]


def run(*command: str | Path, env: dict[str, str]) -> float:
    """Seconds that a command takes; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def mounts(files: int, collector: dict[str, str]) -> None:
    from fusefs.db import embedded

    kinds: list[tuple[str, tuple[str, ...], dict[str, str]]] = [
        ("off", (), {}),
        ("--metrics", ("--metrics", ":0"), {}),
        ("OTLP", (), collector),
    ]
    per_file: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    ready: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    with tempfile.TemporaryDirectory(prefix="fusefs-telemetry-") as folder:
        top = Path(folder)
        top.chmod(0o755)
        env = {**os.environ, "HANGO_FS_RUNTIME_DIR": str(top / "run"), "XDG_STATE_HOME": str(top / "state")}
        (top / "run").mkdir(mode=0o700)
        mountpoint = top / "mount"
        mountpoint.mkdir()
        dsn = embedded.ensure_running(top / "data")
        try:
            for words in (("init",), ("tenant", "add", "b"), ("agent", "add", "b", "--tenant", "b")):
                run(FUSEFS, *words, "--dsn", dsn, env=env)
            command = (FUSEFS, "mount", mountpoint, "--dsn", dsn, "--tenant", "b", "--agent", "b")
            for _ in range(ROUNDS_OF_MOUNTS):
                for name, options, more in kinds:
                    ready[name].append(run(*command, *options, env=env | more))
                    try:
                        per_file[name].append(write_files(mountpoint, files))
                    finally:
                        run(FUSEFS, "umount", mountpoint, env=env)
        finally:
            embedded.stop(top / "data")
    for name, times in per_file.items():
        print(
            f"a mount, {name + ':':12} {statistics.median(times) * 1e6:6.0f} us a file "
            f"(best {min(times) * 1e6:.0f}), ready after {statistics.median(ready[name]) * 1000:.0f} ms"
        )


def write_files(mountpoint: Path, files: int) -> float:
    """Seconds for each of some new files of 1 KB; they are removed afterwards."""
    folder = mountpoint / uuid.uuid4().hex
    folder.mkdir()
    start = time.perf_counter()
    for number in range(files):
        (folder / str(number)).write_bytes(b"x" * 1024)
    took = time.perf_counter() - start
    subprocess.run(["rm", "-r", folder], check=True)
    return took / files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--files", type=int, default=400)
    args = parser.parse_args()
    with collecting() as collector:
        wrappers(args.rounds, collector)
        mounts(args.files, collector)


if __name__ == "__main__":
    main()
