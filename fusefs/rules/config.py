"""The limits and the settings of a daemon, as frozen values.

Decided here and only here: what can be set, its default and its bounds. Reading the environment and
the TOML file is the command line's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from fusefs.rules.errors import BadConfig

MIB = 1024 * 1024

RESULT_TOKEN_LIMIT = 20_000
"""A tool's result with more tokens, by estimate, is stored (HF-10): HANGO_TOOL_RESULT_TOKEN_LIMIT."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one path and one file may be (HF-03, HF-17). Lengths are in bytes of UTF-8."""

    max_file_bytes: int = MIB
    max_path_depth: int = 64
    max_path_bytes: int = 1024
    max_name_bytes: int = 255

    def __post_init__(self) -> None:
        if not 1 <= self.max_file_bytes <= 1024 * MIB:
            raise BadConfig("HANGO_FS_MAX_FILE_BYTES must be between 1 and 1073741824")
        if not 1 <= self.max_path_depth <= 512:
            raise BadConfig("HANGO_FS_MAX_PATH_DEPTH must be between 1 and 512")


class Consistency(Enum):
    """How a mount learns of other writers: by announcement, or by asking at each lookup and open."""

    NOTIFY = "notify"
    STRICT = "strict"


class VersionCheck(Enum):
    """`seen`: compare with what the session last saw; `open`: only with the version at open."""

    SEEN = "seen"
    OPEN = "open"


class Durability(Enum):
    """What a change waits for: `full`, that the server has it on disk; `relaxed`, that the server has it. A crash of
    the server then loses what was committed in its last moments, except what was synced since."""

    FULL = "full"
    RELAXED = "relaxed"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a mount behaves. Times are in seconds, sizes in bytes."""

    limits: Limits = field(default_factory=Limits)
    consistency: Consistency = Consistency.NOTIFY
    version_check: VersionCheck = VersionCheck.SEEN
    durability: Durability = Durability.FULL
    require_read: bool = False
    xattr: bool = False
    read_only: bool = False
    uid: int = 0
    gid: int = 0
    write_timeout_s: float = 5.0
    kernel_timeout_s: float = 3600.0
    content_cache_bytes: int = 64 * MIB
    max_nodes: int = 150_000
    rescue_dir: str | None = None
