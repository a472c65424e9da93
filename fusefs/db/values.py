"""Values on the wire: parameters as text (bytes in binary), results in binary.

Decided here and only here: which Python types go in and which column types come out. Anything else is
an error at once; queries cast. Written out by hand since this is the mount's hot path: psycopg's
cursors took 138 us for what takes 50 us this way (one select over a Unix socket).
Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from fusefs.rules.errors import FsError

Param = None | str | int | float | bool | bytes | bytearray | memoryview | Sequence[str] | Sequence[int | None]
Wire = bytes | bytearray | memoryview | None
Decoder = Callable[[bytes], Any]


def _text(value: str) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise FsError("a value for the database is not valid Unicode text") from None
    # libpq takes text up to its first NUL: without this check the rest would be cut off in silence.
    if b"\0" in raw:
        raise FsError("a text value for the database holds a NUL")
    return raw


def _number(value: int | float) -> bytes:
    return repr(value).encode()


def _truth(value: bool) -> bytes:
    return b"t" if value else b"f"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    raise FsError(f"an array for the database holds a {type(value).__name__}")


def _array(value: Sequence[object]) -> bytes:
    return _text("{" + ",".join([_element(item) for item in value]) + "}")


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: _text,
    int: _number,
    float: _number,
    bool: _truth,
    list: _array,
    tuple: _array,
}
_BINARY = (bytes, bytearray, memoryview)


def encode(params: Sequence[Param]) -> tuple[list[Wire], list[int]]:
    """Values and formats (0 text, 1 binary) for libpq. Raises FsError for a type that is not a `Param`."""
    values: list[Wire] = [None] * len(params)
    formats = [0] * len(params)
    for at, param in enumerate(params):
        if param is None:
            continue
        encoder = _ENCODERS.get(type(param))
        if encoder is not None:
            values[at] = encoder(param)
        elif isinstance(param, _BINARY):
            values[at] = param
            formats[at] = 1
        else:
            raise FsError(f"a {type(param).__name__} cannot be a value for the database")
    return values, formats


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


def _bool(raw: bytes) -> bool:
    return raw != b"\0"


def _same(raw: bytes) -> bytes:
    return raw


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _jsonb(raw: bytes) -> str:
    return raw[1:].decode()  # the first byte is the version of the form, 1


def _float4(raw: bytes) -> float:
    return float(struct.unpack("!f", raw)[0])


def _float8(raw: bytes) -> float:
    return float(struct.unpack("!d", raw)[0])


def _void(raw: bytes) -> None:
    return None


def _array_of(element: Decoder) -> Decoder:
    def decode(raw: bytes) -> list[Any]:
        dimensions, _, _ = struct.unpack_from("!iiI", raw)
        if dimensions == 0:
            return []
        if dimensions != 1:
            raise FsError("the database answered with an array of more than one dimension")
        (length,) = struct.unpack_from("!i", raw, 12)
        found: list[Any] = []
        at = 20
        for _ in range(length):
            (size,) = struct.unpack_from("!i", raw, at)
            at += 4
            if size < 0:
                found.append(None)
            else:
                found.append(element(raw[at : at + size]))
                at += size
        return found

    return decode


DECODERS: dict[int, Decoder] = {
    16: _bool,
    17: _same,  # bytea
    19: bytes.decode,  # name
    20: _int,
    21: _int,
    23: _int,
    25: bytes.decode,  # text
    26: lambda raw: int.from_bytes(raw, "big"),  # oid
    114: bytes.decode,  # json
    700: _float4,
    701: _float8,
    1005: _array_of(_int),  # int2[]
    1007: _array_of(_int),  # int4[]
    1009: _array_of(bytes.decode),  # text[]
    1015: _array_of(bytes.decode),  # varchar[]
    1016: _array_of(_int),  # int8[]
    1042: bytes.decode,  # bpchar
    1043: bytes.decode,  # varchar
    2278: _void,
    2950: _uuid,
    2951: _array_of(_uuid),
    3802: _jsonb,
}
"""By the OID of the column's type, which is fixed for built-in types (pg_type.dat)."""


def decoder(oid: int, column: str) -> Decoder:
    """How to read a column. Raises FsError for a type that no query should return."""
    found = DECODERS.get(oid)
    if found is None:
        raise FsError(f"column {column} has a type that is not read here (OID {oid}); the query must cast it")
    return found
