"""The offload from a shell: the filter, with nothing but the mounted directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from fusefs.rules.errors import NotFound
from fusefs.services import mounted_results
from fusefs.services.offload import Offload, unobserved
from tests import harness

BIG = "".join(f"line {number} of the result\n" for number in range(1, 5001))


@pytest.fixture(scope="module")
def root(module_mount: harness.MountFactory) -> Path:
    """A mounted namespace as session `s-mount` sees it."""
    return module_mount(session="s-mount").path


# Through the mounted directory


def test_a_mount_tells_its_session_and_its_limit(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True, exist_ok=True)
    found = mounted_results.find(str(root / "deep" / "er"))
    assert (found.root, found.session, found.max_file_bytes) == (str(root), "s-mount", harness.MAX_FILE_BYTES)


def test_a_directory_in_no_mount_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is in no mounted namespace"):
        mounted_results.find(str(tmp_path))


@pytest.mark.parametrize("call", [mounted_results.in_place, trio.to_thread.run_sync], ids=["in place", "in a thread"])
@pytest.mark.parametrize("tool_call_id", ["", "same", "../../memories/evil", "x" * 5000])
def test_case_l13_through_the_mount(root: Path, tool_call_id: str, call: mounted_results.Caller) -> None:
    store = mounted_results.find(str(root), call)
    offload = Offload(store, observe=unobserved)
    paths = set()
    for number in range(3):
        text = f"{number}{BIG}"
        done = trio.run(offload.text, tool_call_id, "fetch", text)
        assert done.path is not None, done.text[:300]
        file = Path(f"{root}{done.path}")
        assert file.read_text() == text
        assert file.parent == root / "large_tool_results" / "s-mount"
        assert f"F={file};" in done.text
        paths.add(done.path)
    assert len(paths) == 3


def test_case_l17_through_the_mount(root: Path) -> None:
    data = b"\xff\xfeh\0i\0" * 20_000
    done = trio.run(
        Offload(mounted_results.find(str(root)), observe=unobserved).text,
        "nul",
        "fetch",
        data.decode(errors="surrogateescape"),
    )
    assert Path(f"{root}{done.path}").read_bytes() == data
