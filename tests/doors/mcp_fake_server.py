"""A stdio server for the proxy's tests: it does what each request asks, and knows nothing of MCP but the lines.

`{"id", "method": "tools/call", "params": {"arguments": {"text": …, "times": …}}}` is answered with that text; other
methods do what their names say.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def say(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


def answer(request_id: object, result: object) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}).encode() + b"\n")


def handle(message: dict[str, Any]) -> None:
    params = message.get("params") or {}
    match message.get("method"):
        case "tools/call" | "custom":
            arguments = params.get("arguments") or {}
            text = arguments.get("text", "x") * arguments.get("times", 1)
            answer(message["id"], {"content": [{"type": "text", "text": text}], **arguments.get("more", {})})
        case "overlong":
            for _ in range(params["chunks"]):
                say(b"z" * 1024 * 1024)
            say(b"\n")
        case "exit":
            say(params.get("last", "").encode())
            os._exit(params["code"])
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave a child":
            if os.fork() == 0:
                signal.alarm(5)  # longer than the proxy waits for it
                signal.pause()
            os._exit(0)
        case "close stdout":
            os.close(1)
        case "stubborn":
            for number in params["ignore"]:
                signal.signal(number, signal.SIG_IGN)
            answer(message.get("id"), os.getpid())
            while params.get("for ever"):
                signal.pause()
        case "environment":
            answer(message["id"], sorted(name for name in os.environ if name.startswith(("HANGO_", "PG"))))
        case "stderr":
            os.write(2, b"said aside\n")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(77))
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        for one in message if isinstance(message, list) else [message]:
            if isinstance(one, dict):
                handle(one)
    say(b"bye\n")


main()
