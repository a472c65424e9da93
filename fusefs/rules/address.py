"""An address that a port is opened at, from its text.

Decided here and only here: what is an address, and that one without a host is the loopback. A module of its own, since
a mount without such a port need not load it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from fusefs.rules.errors import BadConfig


@dataclass(frozen=True, slots=True)
class Address:
    """Where a port is opened. Port 0 lets the kernel choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """HOST:PORT, [IPV6]:PORT, :PORT or PORT; without a host the loopback, so that only this machine gets in.

        Raises BadConfig.
        """
        found = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([^\s\[\]:/]+))?:)?([0-9]{1,5})", text, re.ASCII)
        if found is None or int(found[3]) > 65535:
            raise BadConfig(f"{text!r} is not an address", hint="Write HOST:PORT, or :PORT for the loopback.")
        return cls(found[1] or found[2] or "127.0.0.1", int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
