"""What the pages point to exists: modules, tests, and links; and the table of requirements proves what it says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.harness import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DELIVERED = [
    *(f"HF-{number:02}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20, 21, 22)),
    *(f"BY-{number:02}" for number in range(1, 11)),
    *(f"DE-{number:02}" for number in (1, 2, 3, 4, 5, 6, 7, 13)),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def missing_tests(text: str) -> list[str]:
    """The tests that a text names as `tests/…/file.py::function` and that do not exist."""
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    return [
        f"{file}::{function}"
        for file, function in found
        if not (ROOT / file).is_file() or (function and function not in functions_of(ROOT / file))
    ]


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as they are made on most forges."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, fragment = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{target} does not exist"
        if fragment and found.suffix == ".md":
            assert fragment in anchors(found.read_text(encoding="utf-8")), f"{target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    assert not missing_tests(page.read_text(encoding="utf-8"))


def test_a_test_that_does_not_exist_is_found() -> None:
    own = "tests/unit/test_docs.py"
    text = f"`{own}::test_named_tests_exist` `{own}::test_nothing` `tests/unit/none.py`"
    assert missing_tests(text) == [f"{own}::test_nothing", "tests/unit/none.py::"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_modules_exist(page: Path) -> None:
    """`core/io.py` is below fusefs/, a bare `io.py` is in one of the layers."""
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|sql))`", page.read_text(encoding="utf-8")):
        places = [
            ROOT / name,
            ROOT / "fusefs" / name,
            *(ROOT / "fusefs").glob(f"**/{name}" if "/" not in name else name),
        ]
        assert any(place.is_file() for place in places), f"{name} does not exist"


def test_every_module_of_the_core_is_described() -> None:
    page = (DOCS / "internals" / "layers.md").read_text(encoding="utf-8")
    modules = {path.name for path in (ROOT / "fusefs" / "core").glob("*.py")} - {"__init__.py"}
    assert modules == set(re.findall(r"^\| `(\w+\.py)` \|", page, flags=re.M))


def test_every_page_is_reached_from_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)\s#]+)", (DOCS / "index.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(DOCS)) for page in PAGES} - {"index.md"}
    assert {page for page in pages if not page.startswith("learning/")} <= linked


def test_each_delivered_requirement_has_a_place_and_a_proof() -> None:
    page = (DOCS / "requirements.md").read_text(encoding="utf-8")
    rows = {
        row[0]: row
        for row in (line.strip("| ").split(" | ") for line in page.splitlines() if line[:3] in ("| H", "| B", "| D"))
    }
    assert list(rows) == DELIVERED
    for requirement, row in rows.items():
        assert len(row) == 4, requirement
        assert re.search(r"`[\w/]+\.(?:py|sql)`", row[2]), f"{requirement} has no place"
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row[3]), f"{requirement} has no test"


def test_each_row_of_the_defence_table_has_a_fallback_and_its_test() -> None:
    """A row without a fallback is one where the parameter alone is enough; its test is then of that."""
    page = (DOCS / "internals" / "defence.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    table = [row for row in rows if row[0] != "meeting"]
    assert len(table) >= 30
    for meeting, _, parameter, fallback, test in table:
        assert fallback or parameter, meeting
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", test), meeting
