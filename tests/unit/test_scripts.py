"""The scripts: what they say when something is missing, and that they know when nothing is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness import ROOT

NOBODY = 65534


def bash(script: str, *, as_user: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    """Run bash in the checkout; `as_user`: never as root."""
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_user and os.geteuid() == 0 else {}
    return subprocess.run(
        ["bash", "-c", script],
        cwd="/" if identity else ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        **identity,
    )


def test_an_ordinary_user_is_told_which_packages_are_missing(suite_dir: Path) -> None:
    copy = suite_dir / "_bootstrap"  # the checkout may lie where only root gets
    copy.write_text((ROOT / "scripts" / "_bootstrap").read_text())
    done = bash(f". {copy}; _install_debian_packages git no-such-tool other-tool; echo unreached", as_user=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "fusefs needs the Debian packages no-such-tool other-tool: "
        "run `sudo apt-get install no-such-tool other-tool` first.\n"
    )


@pytest.mark.parametrize(
    ("package", "there"), [("git", True), ("ripgrep", True), ("python3-venv", True), ("no-such-tool", False)]
)
def test_packages_are_recognised_by_what_they_bring(package: str, there: bool) -> None:
    done = bash(f". scripts/_bootstrap; _missing {package}")
    assert done.stdout == ("" if there else f"{package} ")


def test_an_interpreter_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash(". scripts/_bootstrap; _python", PYTHON=f"{old} python3")
    assert done.stdout == "python3\n"


def test_a_failed_installation_leaves_no_stamp(tmp_path: Path) -> None:
    """Otherwise the next run would take a half-made environment for a whole one."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/_bootstrap", "setup.cfg"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "pyproject.toml").write_text("not TOML [")
    pip = tmp_path / ".venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text('#!/bin/sh\ncase "$*" in *install*) echo broken >&2; exit 1;; esac\n')
    pip.chmod(0o755)
    done = bash(f". {tmp_path}/scripts/_bootstrap; bootstrap test; echo unreached")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-2:] == [
        "broken",
        f"the virtual environment {tmp_path}/.venv could not be prepared",
    ]
    assert list((tmp_path / ".venv").glob(".installed*")) == []


@pytest.mark.parametrize("name", ["scripts/lint", "scripts/test", "scripts/try-failover", ".ci/run"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert bash(f"bash -n {name}").returncode == 0


def test_the_benchmark_of_coherence_says_what_it_does() -> None:
    done = bash("scripts/bench-coherence --help")
    assert done.returncode == 0, done.stderr
    assert "--consistency" in done.stdout
