"""The table of POSIX cases, from every module that registers some."""

from __future__ import annotations

from tests.mount import posix_attrs, posix_data, posix_names, posix_namespace, posix_special
from tests.mount.posix_support import CASES, Case

MODULES = (posix_attrs, posix_data, posix_names, posix_namespace, posix_special)
ALL: list[Case] = sorted(CASES, key=lambda one: one.name)

assert len({one.name for one in ALL}) == len(ALL), "two cases have the same name"
