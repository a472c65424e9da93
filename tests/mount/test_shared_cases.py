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


def test_l31_a_root_may_be_named_in_any_way(
    cases_mount: harness.Mount, module_pg: str, suite_dir: Path, tmp_path: Path
) -> None:
    """Through a symlink, with a slash at the end, relative: what is in it is read, and nothing else (L31)."""
    (cases_mount.path / "root" / "sub").mkdir(parents=True)
    (cases_mount.path / "root" / "sub" / "f").write_text("inside\n")
    (cases_mount.path / "outside").write_text("secret\n")
    (cases_mount.path / "root" / "out").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to(cases_mount.path / "root")

    def call(root: str, arguments: str) -> subprocess.CompletedProcess[str]:
        command = [harness.ROOT / "scripts" / "case-tool", root, "read_file"]
        env = harness.command_environment(suite_dir, module_pg)
        return subprocess.run(
            command, input=arguments, env=env, cwd=cases_mount.path, capture_output=True, text=True, check=False
        )

    for root in (str(tmp_path / "link"), f"{tmp_path}/link/", f"{cases_mount.path}/root/", "root", "./root/."):
        done = call(root, '{"path": "sub/f"}')
        assert (done.returncode, "\tinside\n" in done.stdout) == (0, True), root
    for arguments in ('{"path": "../outside"}', '{"path": "out"}', '{"path": "sub/../../outside"}'):
        done = call("root", arguments)
        assert done.returncode == 1
        assert "secret" not in done.stdout
        assert "root:" not in done.stdout


@pytest.mark.parametrize("number", _numbers(TWO_MOUNTS))
def test_case_of_two_mounts(cases_mount: harness.Mount, second_mount: harness.Mount, number: str) -> None:
    for mount in (cases_mount, second_mount):
        mount.expect_log(r"stale|conflict|refused")
    assert " PASS " in _run(number, cases_mount.path, second_mount.path)
