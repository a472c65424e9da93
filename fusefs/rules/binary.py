"""What counts as binary output (DE-05).

Decided here and only here: the three signs: NUL, what is not UTF-8, and a known format's first bytes. What is said in
its place is in `rules.text`.

Threading: pure functions.
"""

from __future__ import annotations

from fusefs.rules.preview import Digest

_MAGIC = (
    b"\x89PNG",
    b"\xff\xd8\xff",  # JPEG
    b"GIF87a",
    b"GIF89a",
    b"%PDF-",
    b"PK\x03\x04",
    b"PK\x05\x06",  # an empty zip
    b"\x1f\x8b",  # gzip
    b"BZh",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",  # zstd
    b"7z\xbc\xaf",
    b"\x7fELF",
    b"\xca\xfe\xba\xbe",  # Java, Mach-O
    b"\xcf\xfa\xed\xfe",  # Mach-O
    b"\0asm",
    b"SQLite format 3\0",
    b"OggS",
    b"fLaC",
    b"ID3\x03",
    b"ID3\x04",
)


def is_binary(digest: Digest, start: bytes) -> bool:
    """Whether an output is binary.

    Args:
        start: its first bytes, 16 or more where there are so many.
    """
    return not digest.is_text or start.startswith(_MAGIC)
