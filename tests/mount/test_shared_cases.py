"""The case scripts that come with the project's requirements, one test per script, on a real mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import harness

CASES_DIR = harness.ROOT.parent / "shared" / "cases"
ONE_MOUNT = range(1, 60)
TWO_MOUNTS = range(81, 90)
COMMANDS = range(61, 64)
TOOL_LAYER = range(65, 74)
CASE_TIMEOUT_S = 60
LAG_S = 1
"""Within which the other mount must show a change."""


def _numbers(wanted: range) -> list[str]:
    found = sorted(path.stem.removeprefix("case-") for path in CASES_DIR.glob("case-*.sh"))
    return [number for number in found if int(number) in wanted]


def _run(number: str, *dirs: Path, **variables: str) -> str:
    done = subprocess.run(
        [CASES_DIR / "run-all.sh", *dirs, number],
        env={**os.environ, "RWC_TIMEOUT": str(CASE_TIMEOUT_S), "RWC_LAG": str(LAG_S), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CASE_TIMEOUT_S + 30,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cases_mount(module_mount: harness.MountFactory) -> harness.Mount:
    return module_mount(session="cases")


@pytest.fixture(scope="module")
def second_mount(module_mount: harness.MountFactory) -> harness.Mount:
    """As on another host or in another container (L27): a daemon, a place and an owner of the files of its own."""
    return module_mount("--uid", "1234", "--gid", "1234", session="cases-two")


def test_the_case_scripts_are_there() -> None:
    if os.environ.get("FUSEFS_ALLOW_NO_CASES") == "1" and not CASES_DIR.is_dir():
        pytest.skip(f"{CASES_DIR} is missing and FUSEFS_ALLOW_NO_CASES=1 allows it")
    assert CASES_DIR.is_dir(), f"{CASES_DIR} is missing; set FUSEFS_ALLOW_NO_CASES=1 to run the suite without it"
    assert len(_numbers(ONE_MOUNT)) >= 30
    assert len(_numbers(TWO_MOUNTS)) >= 5


@pytest.mark.parametrize("number", _numbers(ONE_MOUNT))
def test_case(cases_mount: harness.Mount, number: str) -> None:
    assert " PASS " in _run(number, cases_mount.path)


@pytest.mark.parametrize("number", _numbers(COMMANDS))
def test_case_of_commands(cases_mount: harness.Mount, suite_dir: Path, number: str) -> None:
    environment = harness.command_environment(suite_dir)
    assert " PASS " in _run(number, cases_mount.path, RWC_RUN=str(harness.ROOT / "scripts" / "case-run"), **environment)


@pytest.mark.parametrize("number", _numbers(TOOL_LAYER))
def test_case_of_the_tool_layer(cases_mount: harness.Mount, module_pg: str, suite_dir: Path, number: str) -> None:
    environment = harness.command_environment(suite_dir, module_pg)
    tool = str(harness.ROOT / "scripts" / "case-tool")
    assert " PASS " in _run(number, cases_mount.path, RWC_TOOL=tool, **environment)


@pytest.mark.parametrize("number", _numbers(TWO_MOUNTS))
def test_case_of_two_mounts(cases_mount: harness.Mount, second_mount: harness.Mount, number: str) -> None:
    for mount in (cases_mount, second_mount):
        mount.expect_log(r"stale|conflict|refused")
    assert " PASS " in _run(number, cases_mount.path, second_mount.path)
