"""The unit files: systemd accepts them, their exposure stays below 4.0, and nothing hides the mount from the host."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.harness import FUSEFS, ROOT

UNITS = sorted((ROOT / "systemd").glob("*.service"))
MAX_EXPOSURE = 3.9

# What makes systemd set up a mount namespace, whose mounts the host does not see: systemd.exec(5), and
# exec_needs_mount_namespace() in its source. PrivateUsers: a user namespace may not mount on the host at all.
NAMESPACED = frozenset(
    (
        "BindPaths", "BindReadOnlyPaths", "DynamicUser", "ExecPaths", "ExtensionDirectories", "ExtensionImages",
        "InaccessiblePaths", "IPCNamespacePath", "LogNamespace", "MountAPIVFS", "MountFlags", "MountImages",
        "NoExecPaths", "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateNetwork", "PrivatePIDs", "PrivateTmp",
        "PrivateUsers", "ProcSubset", "ProtectControlGroups", "ProtectHome", "ProtectKernelLogs",
        "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem", "ReadOnlyPaths",
        "ReadWritePaths", "RootDirectory", "RootImage", "TemporaryFileSystem",
    )
)  # fmt: skip


def settings(unit: Path) -> list[tuple[str, str]]:
    """The settings of a unit file in order."""
    lines = [line for line in unit.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#["]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@pytest.fixture
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit as an instance that finds this checkout's command: `verify` asks for an executable."""
    source: Path = request.param
    copy = tmp_path / source.name.replace("@.", "@test.")
    copy.write_text(source.read_text(encoding="utf-8").replace("/usr/local/bin/fusefs", str(FUSEFS)), encoding="utf-8")
    return copy


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def test_there_is_one_for_each_way_to_mount() -> None:
    assert [unit.name for unit in UNITS] == ["fusefs-host@.service", "fusefs-mount@.service"]


@pytest.mark.parametrize("instance", UNITS, ids=lambda unit: unit.stem, indirect=True)
def test_systemd_accepts_it(instance: Path) -> None:
    done = analyze("verify", "--man=no", instance)
    # Other units of the machine may have faults of their own.
    assert done.returncode == 0, done.stderr
    assert instance.name not in done.stderr


@pytest.mark.parametrize("instance", UNITS, ids=lambda unit: unit.stem, indirect=True)
def test_exposure_is_low(instance: Path) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={MAX_EXPOSURE * 10:.0f}", instance)
    assert done.returncode == 0, done.stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_nothing_makes_a_mount_namespace(unit: Path) -> None:
    assert not NAMESPACED & {name for name, _ in settings(unit)}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_dead_mount_is_cleared_whatever_happened(unit: Path) -> None:
    found = dict(settings(unit))
    assert found["Type"] == "notify"
    assert found["Restart"] == "on-failure"
    assert found["ExecStart"].endswith("--foreground -- ${FUSEFS_MOUNTPOINT}")
    assert found["ExecStopPost"] == "/usr/local/bin/fusefs umount --force -- ${FUSEFS_MOUNTPOINT}"


def test_the_two_differ_in_their_command_only() -> None:
    host, mount = ([pair for pair in settings(unit) if pair[0] not in ("Description", "ExecStart")] for unit in UNITS)
    assert host == mount
