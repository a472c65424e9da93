"""Four sessions in two daemons write at once; afterwards no acknowledged write is lost and nothing was overwritten
unseen. `scripts/soak` does the same for as long as one likes, with daemons killed and Postgres restarted meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import harness
from tests.mount.model.crowd import crowd

ROUNDS = 4
EACH = 50
EXPECTED_LOG = r"stale|conflict|refused"


@pytest.mark.parametrize("seed", ["1", "2"])
def test_nothing_is_lost_or_overwritten_unseen(
    module_mount: harness.MountFactory, module_pg: str, tmp_path: Path, seed: str
) -> None:
    if not module_mount.mounts:
        for _ in range(2):
            module_mount(layout="host").expect_log(EXPECTED_LOG)
    first, second = module_mount.mounts[:2]
    namespace = harness.make_namespace(module_pg)
    with crowd(namespace, (first.path, second.path), tmp_path, seed) as workers:
        found = []
        for _ in range(ROUNDS):
            workers.round(EACH)
            found += workers.agree()
        fresh = module_mount(namespace=namespace, session="fresh")
        run, more = workers.finish(fresh.path, [])
        fresh.umount()
    found += more
    assert not found, f"seed {seed}:\n" + "\n".join(map(str, found[:10]))
    results = Counter(record["r"] for record in run.records)
    assert results["ok"] > results.total() / 3, f"seed {seed}: {results}"
    assert results["ESTALE"] and run.conflicts, f"seed {seed}: the sessions did not meet: {results}"
