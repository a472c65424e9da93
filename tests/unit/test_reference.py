"""The reference pages say what the code says: options, variables, errors, the control directory."""

from __future__ import annotations

import errno
import re

import pytest

from fusefs.cli.pages import VARIABLES, render_configuration, render_errors
from fusefs.cli.toolpage import HISTORY, TOOLS, render_tools
from fusefs.rules.errors import FsError, all_errors
from fusefs.services import descriptions
from fusefs.services.descriptions import Description
from tests.harness import ROOT

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize(
    ("name", "rendered"),
    [("configuration.md", render_configuration()), ("errors.md", render_errors()), ("tools.md", render_tools())],
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


def test_the_page_has_every_tool_that_is_served() -> None:
    described = [value for value in vars(descriptions).values() if isinstance(value, Description)]
    assert {id(each) for each in described} == {id(each) for each in (*TOOLS.values(), *HISTORY.values())}


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
