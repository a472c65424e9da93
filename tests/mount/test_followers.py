"""Mounts that come to a namespace and go while another one writes: who writes alone announces nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psycopg

from tests import harness
from tests.mount.sides import eventually


class Writer(threading.Thread):
    """Makes, replaces, moves and removes files of one directory until it is told to stop; `pause` holds it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.count = 0
        self.pause = threading.Lock()
        self.ended = False
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            while not self.ended:
                with self.pause:
                    self._step()
        except Exception as error:  # noqa: BLE001  (handed to the test)
            self.failed = error

    def _step(self) -> None:
        n = self.count
        (self.root / f"f{n}").write_text(f"{n}\n")
        (self.root / "newest").write_text(f"{n}\n")
        if n % 3 == 0:
            (self.root / f"f{n}").rename(self.root / f"g{n}")
        if n % 5 == 0:
            # In a directory of its own: a directory's move is announced in any case, and has the directory loaded anew.
            (self.root / "moves" / f"d{n}").mkdir()
            (self.root / "moves" / f"d{n}" / "x").write_text(f"{n}\n")
            (self.root / "moves" / f"d{n}").rename(self.root / "moves" / f"e{n}")
        if n > 40:
            (self.root / f"{'g' if (n - 40) % 3 == 0 else 'f'}{n - 40}").unlink()
        self.count += 1

    def goes_on(self) -> None:
        """Return after some more steps."""
        seen = self.count
        eventually(lambda: self.failed or self.count > seen + 3, "the writer goes on")
        assert self.failed is None, self.failed


def shown(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def only_follower(namespace: harness.Namespace) -> str | None:
    ((found,),) = namespace.execute(
        "select only_follower from agent_namespaces where agent_id = %s", (namespace.agent_id,)
    )
    return found


def test_mounts_that_come_and_go_see_all_that_another_writes(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    first = mount(session="s-first")
    alone = only_follower(namespace)
    assert alone is not None
    (first.path / "d" / "moves").mkdir(parents=True)
    writer = Writer(first.path / "d")
    writer.start()
    try:
        for number in range(3):
            writer.goes_on()
            comes = mount(session=f"s-{number}")
            root = comes.path / "d"
            os.listdir(root)
            writer.goes_on()
            with writer.pause:
                eventually(lambda root=root: shown(root) == shown(writer.root), "all of it")  # type: ignore[misc]
            writer.goes_on()
            with writer.pause:
                eventually(lambda root=root: shown(root) == shown(writer.root), "what came later")  # type: ignore[misc]
            comes.umount()
    finally:
        writer.ended = True
        writer.join(60)
    assert writer.failed is None, writer.failed


def test_who_is_left_alone_announces_no_more(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    first = mount(session="s-first")
    alone = only_follower(namespace)
    second = mount(session="s-second")
    assert only_follower(namespace) is None
    second.umount()

    def has_found_out() -> bool:
        (first.path / "f").write_text("text\n")  # whoever announces hears itself, and asks
        return only_follower(namespace) == alone

    eventually(has_found_out, "it found out that it is alone")
    ((channel,),) = namespace.execute("select channel from agent_namespaces where agent_id = %s", (namespace.agent_id,))
    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        conn.execute(f'listen "{channel}"'.encode())
        (first.path / "quiet").write_text("text\n")
        namespace.execute("update agent_files set content = 'sql' where path = '/f'")
        (heard,) = conn.notifies(timeout=10, stop_after=1)
    assert '"/f"' in heard.payload
