"""How many tokens a text is, by estimate (HF-19).

Decided here and only here: the heuristic, four bytes of UTF-8 a token.

Threading: pure functions.
"""

from __future__ import annotations

BYTES_PER_TOKEN = 4


def estimate(text: str) -> int:
    """Tokens of a text, rounded up. Lone surrogates count as what would stand for them."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)
