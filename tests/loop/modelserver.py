"""A model that says what a test wrote down: a server on the loopback that speaks the Messages API's streaming form."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

BOUND_S = 30.0
_PIECE = 61
"""Bytes of one write: no boundary of an event, and none of a character outside ASCII."""

Body = dict[str, Any]
Turn = bytes | tuple[int, bytes] | Callable[[Body], "bytes | tuple[int, bytes]"]
"""What one request is answered with: a stream, a status with a body, or what a function makes of the request."""


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n".encode()


def text(words: str) -> list[bytes]:
    """A block of text, in two deltas. The index is filled in by `reply`."""
    half = len(words) // 2
    parts = [words[:half], words[half:]]
    return [
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(event("content_block_delta", index=0, delta={"type": "text_delta", "text": part}) for part in parts),
        event("content_block_stop", index=0),
    ]


def call(name: str, arguments: object = None, *, id: str = "toolu_1", raw: str | None = None) -> list[bytes]:
    """A call of a tool, its JSON in pieces of seven characters. `raw` stands for JSON that a model got wrong."""
    body = json.dumps(arguments or {}) if raw is None else raw
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    block = {"type": "tool_use", "id": id, "name": name, "input": {}}
    return [
        event("content_block_start", index=0, content_block=block),
        *(
            event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": part})
            for part in parts
        ),
        event("content_block_stop", index=0),
    ]


def reply(*blocks: Sequence[bytes], stop_reason: str = "end_turn") -> bytes:
    """A whole stream."""
    return b"".join([*begin(*blocks), *end(stop_reason)])


def begin(*blocks: Sequence[bytes]) -> list[bytes]:
    """The events of a stream up to its last block."""
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 1}}
    numbered = [
        part.replace(b'"index": 0', b'"index": %d' % number) for number, block in enumerate(blocks) for part in block
    ]
    return [event("message_start", message=message), event("ping"), *numbered]


def end(stop_reason: str = "end_turn") -> list[bytes]:
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    return [event("message_delta", delta=delta, usage={"output_tokens": 1}), event("message_stop")]


class ModelServer:
    """Answers one request after another with `turns`, and keeps what it was asked."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.bodies: list[bytes] = []
        """The requests as they came over the wire."""
        self.headers: list[Mapping[str, str]] = []
        self._turns = list(turns)
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = BOUND_S

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, content = server.answer(self.path, body, dict(self.headers))
                self.send_response(status)
                self.send_header("content-type", "text/event-stream" if status == 200 else "application/json")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    for at in range(0, len(content), _PIECE):
                        self.wfile.write(content[at : at + _PIECE])
                except OSError:  # the client went away
                    self.close_connection = True

            def log_message(self, *_args: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    @property
    def requests(self) -> list[Body]:
        return [json.loads(body) for body in self.bodies]

    def results(self, request: int = -1) -> list[Body]:
        """The results of tools in the last message of a request."""
        content = self.requests[request]["messages"][-1]["content"]
        return [block for block in content if isinstance(block, dict) and block["type"] == "tool_result"]

    def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        assert path == "/v1/messages"
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if not self._turns:
            return 500, b'{"type": "error", "error": {"type": "script_is_over"}}'
        turn = self._turns.pop(0)
        given = turn(json.loads(body)) if callable(turn) else turn
        return given if isinstance(given, tuple) else (200, given)

    @contextmanager
    def serving(self) -> Iterator[ModelServer]:
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()
