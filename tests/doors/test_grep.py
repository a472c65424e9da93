"""`fusefs grep`: the search in Postgres from the command line. What it finds is `tests/services/test_search.py`'s."""

from __future__ import annotations

import pytest

from tests import harness
from tests.doors.command import Fusefs
from tests.doors.test_cli_admin import put


@pytest.fixture
def filled(agent: harness.Namespace) -> harness.Namespace:
    put(agent, "/src/a.py", "one\nneedle (x)\n")
    put(agent, "/src/b.md", "needle\x1b[31m\n" + "x" * 600 + "needle\n")
    put(agent, "/large_tool_results/s-1/call", "needle of a session\n")
    return agent


def test_lines_with_path_and_number(fusefs: Fusefs, filled: harness.Namespace) -> None:
    found = fusefs("grep", "needle( |$)", "/src", "--agent", filled.agent).text.splitlines()
    assert found[0] == "/src/a.py:2:needle (x)"
    assert found[1].startswith("/src/b.md:2:…xxx") and found[1].endswith("needle")
    assert len(found) == 2
    assert "\x1b" not in fusefs("grep", "needle", "/src", "--agent", filled.agent).text


def test_options(fusefs: Fusefs, filled: harness.Namespace) -> None:
    only = fusefs("grep", "-F", "(x)", "--include", "*.py", "--agent", filled.agent, "--json").json
    assert [(one["path"], one["line"]) for one in only["matches"]] == [("/src/a.py", 2)]
    assert only["truncated"] is False
    cut = fusefs("grep", "needle", "--limit", "1", "--agent", filled.agent)
    assert len(cut.text.splitlines()) == 1
    assert "only the first 1 lines" in cut.stderr


def test_an_owner_sees_every_session_and_an_agent_its_own(fusefs: Fusefs, filled: harness.Namespace) -> None:
    words = ("grep", "of a session", "--agent", filled.agent)
    assert fusefs(*words).text.startswith("/large_tool_results/s-1/call:1:")
    assert fusefs(*words, "--as", "agent", "--session", "s-1").text != ""
    assert fusefs(*words, "--as", "agent", "--session", "s-2", check=False).code == 1


def test_nothing_found_and_what_cannot_be_asked(fusefs: Fusefs, filled: harness.Namespace) -> None:
    nothing = fusefs("grep", "nowhere", "--agent", filled.agent, check=False)
    assert (nothing.code, nothing.stdout, nothing.stderr) == (1, b"", "")
    assert "regular expression" in fusefs.fails(9, "grep", "(", "--agent", filled.agent)
    assert "/nope: No such file" in fusefs.fails(3, "grep", "x", "/nope", "--agent", filled.agent)
