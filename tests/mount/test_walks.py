"""Walks over many directories, which load some ahead. That what changes meanwhile wins is in `test_out_of_order`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import harness

DIRECTORIES = 100


def tree(path: Path) -> dict[str, list[str]]:
    """What find sees: names by directory."""
    found: dict[str, list[str]] = {}
    lines = subprocess.run(["find", ".", "-mindepth", "1"], cwd=path, capture_output=True, text=True, check=True).stdout
    for each in lines.splitlines():
        parent, _, name = each.rpartition("/")
        found.setdefault(parent, []).append(name)
    return {parent: sorted(names) for parent, names in found.items()}


def insert(namespace: harness.Namespace, rows: str) -> None:
    """Rows of a query for (path, kind), below `/tree`."""
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, kind, content)"
        f" select %s, %s, r.path, r.kind, '' from ({rows}) r (path, kind) order by length(r.path)",
        (namespace.tenant_id, namespace.agent_id),
    )


def test_a_walk_over_directories_beside_each_other(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    numbers = f"generate_series(1, {DIRECTORIES}) d"
    insert(namespace, f"select '/tree/d' || d, 'dir' from {numbers}")
    insert(namespace, f"select '/tree/d' || d || '/f' || f, 'file' from {numbers}, generate_series(1, 3) f")
    daemon = mount()
    with daemon.counting() as count:
        found = tree(daemon.path / "tree")
    assert found == {
        ".": sorted(f"d{number}" for number in range(1, DIRECTORIES + 1)),
        **{f"./d{number}": ["f1", "f2", "f3"] for number in range(1, DIRECTORIES + 1)},
    }
    assert count.counts.trips <= 8, "32 come along each time"


def test_a_walk_over_a_deep_tree(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """As a package manager makes: few entries in each of many directories, at several levels."""
    numbers = "generate_series(1, 40) d"
    insert(namespace, f"select '/tree/d' || d, 'dir' from {numbers}")
    insert(namespace, f"select '/tree/d' || d || '/' || s, 'dir' from {numbers}, unnest(array['lib', 'src']) s")
    insert(
        namespace, f"select '/tree/d' || d || '/' || s || '/f', 'file' from {numbers}, unnest(array['lib', 'src']) s"
    )
    daemon = mount()
    with daemon.counting() as count:
        found = tree(daemon.path / "tree")
    assert found == {
        ".": sorted(f"d{number}" for number in range(1, 41)),
        **{f"./d{number}": ["lib", "src"] for number in range(1, 41)},
        **{f"./d{number}/{name}": ["f"] for number in range(1, 41) for name in ("lib", "src")},
    }
    assert count.counts.trips <= 20, "of 121 directories"


def test_a_large_directory_on_the_way_is_whole(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    insert(namespace, "select '/tree/d' || d, 'dir' from generate_series(1, 10) d")
    insert(namespace, "select '/tree/d5/f' || f, 'file' from generate_series(1, 1000) f")
    daemon = mount()
    assert len(tree(daemon.path / "tree")["./d5"]) == 1000
