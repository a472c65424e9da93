"""The reference pages say what the code says: options, variables, errors. Links of all pages lead somewhere."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from fusefs.cli.pages import VARIABLES, render_configuration, render_errors
from fusefs.rules.errors import FsError, all_errors
from tests.harness import ROOT

REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("name", "rendered"), [("configuration.md", render_configuration()), ("errors.md", render_errors())]
)
def test_a_made_page_is_up_to_date(name: str, rendered: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == rendered, "run scripts/make-reference"


def test_every_error_is_on_its_page() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    own = [error for error in all_errors() if error.__module__ == FsError.__module__]
    assert len(own) > 20
    for error in own:
        row = next(line for line in page.splitlines() if line.startswith(f"| {error.__name__} |"))
        assert f"| {errno.errorcode[error.errno]} (" in row
        assert f"| {error.http} | {error.exit_code} |" in row


def test_every_variable_that_the_code_reads_is_documented() -> None:
    read = set()
    for path in (ROOT / "fusefs").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"""environ(?:\.get\(|\.pop\(|\[)["'](\w+)["']""", text))
        read |= set(re.findall(r"""["'](\w+)["'] (?:not )?in os\.environ""", text))
    page = render_configuration()
    # PATH is handed on to children; the options' own variables are on the page with them.
    undocumented = {name for name in read - {"PATH"} if f"`{name}`" not in page}
    assert not undocumented
    assert set(VARIABLES) <= read, "a variable is documented that nothing reads"


def test_the_control_directory_is_described_as_it_is() -> None:
    from fusefs.core import control

    page = (REFERENCE / "control-directory.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^(\w+)/?  ", control._README, flags=re.M)) | {"README"}
    assert shown == set(re.findall(r"^\| `(\w+)", page, flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, fragment = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{target} does not exist"
        if fragment and found.suffix == ".md":
            assert fragment in anchors(found.read_text(encoding="utf-8")), f"{target} has no such heading"
