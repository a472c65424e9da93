"""Every goal of speed and size has its benchmark and its line in the docs. No benchmark runs here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "internals" / "performance.md"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / "_all.py", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    """The file that measures each row, as `scripts/bench --list` says."""
    done = bench("--list")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^(\S+) .*\(benchmarks/(\w+\.py)\)$", done.stdout, re.M))


def said_by(script: Path) -> set[str]:
    """The texts in a file that may be names of rows."""
    nodes = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_row_is_measured_by_its_file(listed: dict[str, str]) -> None:
    assert len(listed) == len(bench("--list").stdout.splitlines()) > 0
    assert [name for name, script in listed.items() if name not in said_by(BENCHMARKS / script)] == []


def test_the_page_has_every_row_and_its_goal(listed: dict[str, str]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Goals\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|[^|]+\| ([^|]+?) \|", section, re.M))
    goals = dict(re.findall(r"^(\S+) +((?:at most|at least) \S+|no goal)", bench("--list").stdout, re.M))
    assert {name: re.match(goal, rows.get(name, "")) is not None for name, goal in goals.items()} == dict.fromkeys(
        listed, True
    )
    assert rows.keys() == listed.keys()


def test_a_name_that_is_no_row_is_refused() -> None:
    done = bench("no-such-row")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such row: no-such-row" in done.stderr


def test_the_script_starts_them() -> None:
    text = (ROOT / "scripts" / "bench").read_text()
    assert text.splitlines()[-1] == 'exec python benchmarks/_all.py "$@"'
