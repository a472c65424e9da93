"""What `scripts/case-tool` runs: a tool of the session whose mount DIR is in, without using the mount.

The case scripts start it for each call. What takes most of a second, importing trio, psycopg and the tools, is done
once, in a server that the first call starts and that ends when nobody asked for 5 seconds. Each call has a session's
tools of its own: between two of them nothing counts as seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile

IDLE_S = 5.0


def socket_path(directory: str) -> str:
    """The server's socket: one for each mount and environment, in a folder of ours."""
    folder = os.path.join(tempfile.gettempdir(), f"fusefs-case-tool-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():
        sys.exit(f"{folder} is not ours")
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(("HANGO_", "XDG_", "PG")))
    key = repr((os.stat(directory).st_dev, settings, os.stat(__file__).st_mtime_ns))
    return os.path.join(folder, hashlib.sha256(key.encode()).hexdigest()[:16])


def ask(path: str, request: bytes) -> dict[str, object] | None:
    """A server's answer; None where there is none, or it ended before it took the request."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        except (FileNotFoundError, ConnectionError):
            return None
    found: dict[str, object] | None = json.loads(answer) if answer else None
    return found


def start(path: str, directory: str) -> None:
    """Start a server and return when it listens."""
    command = [sys.executable, "-P", __file__, "--serve", path, directory]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # who reads ours would wait for the server to end
        cwd="/",  # ours may be in the mount, which could not be unmounted
        start_new_session=True,
    )
    assert server.stdout is not None
    server.stdout.readline()


def main() -> None:
    directory, tool = os.path.realpath(sys.argv[1]), sys.argv[2]
    request = json.dumps([directory, tool, sys.stdin.read()]).encode()
    path = socket_path(directory)
    answer = ask(path, request)
    if answer is None:
        start(path, directory)
        answer = ask(path, request)
    if answer is None:
        sys.exit("the server of scripts/case-tool does not answer")
    sys.stdout.buffer.write(f"{answer['text']}\n".encode(errors="replace"))
    sys.exit(1 if answer["is_error"] else 0)


def serve(path: str, directory: str) -> None:
    """Answer until nobody asks."""
    import fcntl

    import trio

    from fusefs.cli import registry
    from fusefs.db.pool import Database, open_database
    from fusefs.rules.config import Limits
    from fusefs.rules.scope import Principal, Scope
    from fusefs.services.backend import Backend
    from fusefs.services.tooling import ToolCall, ToolResult
    from fusefs.services.toolset import Toolset

    limits = Limits(max_file_bytes=int(os.environ.get("HANGO_FS_MAX_FILE_BYTES", Limits().max_file_bytes)))

    def record_of(directory: str) -> tuple[registry.Record, str]:
        found = registry.containing(directory)
        if found is None or found[0].session is None:
            raise LookupError(f"{directory} is in no mount of one session")
        return found

    def translated(tool: str, text: str, inside: str) -> object:
        """The cases' arguments as the tool's: paths below `inside`, and grep's `glob` is called include."""
        arguments = json.loads(text)
        if "path" in arguments or tool in ("ls", "glob", "grep"):
            arguments["path"] = os.path.join(inside, arguments.get("path", ""))
        if "glob" in arguments:
            arguments["include"] = arguments.pop("glob")
        return arguments

    async def call(db: Database, directory: str, tool: str, text: str) -> ToolResult:
        record, inside = record_of(directory)
        scope = Scope(str(record.tenant_id), str(record.agent_id), str(record.session), Principal.AGENT)
        tools = Toolset(Backend(db, scope, limits))
        return await tools.call(ToolCall("case", tool, translated(tool, text, inside)))

    async def run() -> None:
        asked_at = trio.current_time()
        dsn = os.environ.get("HANGO_FS_DSN", record_of(directory)[0].dsn)
        sock = trio.socket.socket(socket.AF_UNIX)
        async with open_database(dsn, origin="case-tool", size=2) as db, trio.open_nursery() as nursery:

            async def answer(stream: trio.SocketStream) -> None:
                nonlocal asked_at
                where, tool, text = json.loads(b"".join([chunk async for chunk in stream]))
                result = await call(db, where, tool, text)
                asked_at = trio.current_time()
                await stream.send_all(json.dumps({"text": result.for_llm, "is_error": result.is_error}).encode())
                await stream.aclose()

            await sock.bind(path)
            sock.listen(16)
            nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(sock)])
            print("ready", flush=True)
            while trio.current_time() < asked_at + IDLE_S:  # noqa: ASYNC110  (to the second, nobody is to be told)
                await trio.sleep_until(asked_at + IDLE_S)
            os.unlink(path)
            nursery.cancel_scope.cancel()

    with open(f"{path}.lock", "w") as lock:
        # Who holds it without answering is starting or ending. A socket that is left is of one that was killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            os.unlink(path)
        trio.run(run)
        os.unlink(lock.name)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        main()
