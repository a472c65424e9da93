"""Changes whose outcome nobody knew: found by review, each with its own way to lose bytes, to double them, or to show
what is not there."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.outage import LOGGED, TIMEOUT, kept, put_all, rescue, stored
from tests.mount.posix_support import errno_of
from tests.mount.sides import eventually
from tests.relay import Line

LINE = b"the-line\n"


def append(path: Path) -> int:
    """An open descriptor with a line that is not committed."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, LINE)
    return fd


def live(mounted: harness.Mount) -> None:
    eventually(lambda: mounted.status()["live"], "announcements are back")


# -- The mirror --------------------------------------------------------------------------------------


def test_unlink_of_a_create_nobody_could_settle(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    fd = append(mounted.path / "new")
    line.lose(answer=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    live(mounted)
    os.unlink(mounted.path / "new")
    os.close(fd)
    assert stored(namespace, "/new") is None
    assert "new" not in os.listdir(mounted.path)


def test_late_settled_create_that_was_deleted_meanwhile(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    fd = append(mounted.path / "new")
    line.lose(answer=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    namespace.execute("delete from agent_files where path = '/new'")
    line.open()
    live(mounted)
    errno_of(lambda: os.close(fd))
    eventually(lambda: not os.path.exists(mounted.path / "new"), "the ghost is gone")


def test_removal_whose_announcement_came_before_its_doubt(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    """One connection is lost, and no new one to be had, while the listener's goes on."""
    (mounted.path / "f").write_bytes(b"text")
    os.stat(mounted.path / "f")
    line.refuse()
    line.lose(answer=b"delete from agent_files", all_of_it=False)
    assert errno_of(lambda: os.unlink(mounted.path / "f")) == errno.EIO
    assert stored(namespace, "/f") is None, "it was applied"
    line.open()
    eventually(lambda: not os.path.exists(mounted.path / "f"), "the removal is seen")


def test_append_whose_announcement_came_before_its_doubt(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    (mounted.path / "log").write_bytes(b"old\n")
    fd = append(mounted.path / "log")
    line.refuse()
    line.lose(answer=b"the-line", all_of_it=False)
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()
    eventually(lambda: (mounted.path / "log").read_bytes() == b"old\n" + LINE, "the append is seen")
    (mounted.path / "log").write_bytes(b"new\n")
    assert stored(namespace, "/log") == b"new\n"
    assert "there already" in put_all(rescue_dir, namespace)


def test_unsettled_write_is_seen_by_other_sessions_of_the_daemon(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    host = mount(*TIMEOUT, "--rescue-dir", str(rescue_dir), dsn=line.dsn, layout="host")
    host.expect_log(LOGGED)
    one, two = (host.path / namespace.tenant / namespace.agent / name for name in ("s-1", "s-2"))
    for folder in (one, two):
        folder.mkdir()
    (one / "log").write_bytes(b"old\n")
    assert (two / "log").read_bytes() == b"old\n"
    held = os.open(two, os.O_RDONLY | os.O_DIRECTORY)  # the folders above are asked of Postgres
    fd = append(one / "log")
    line.refuse()
    line.lose(answer=b"the-line", all_of_it=False)
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    eventually(
        lambda: Path(f"/proc/self/fd/{held}/log").read_bytes() == b"old\n" + LINE, "the other session sees the append"
    )
    os.close(fd)
    os.close(held)
    assert stored(namespace, "/log") == b"old\n" + LINE


def test_rename_over_a_file_whose_write_is_unsettled(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    (mounted.path / "f").write_bytes(b"old\n")
    (mounted.path / "g").write_bytes(b"g\n")
    fd = append(mounted.path / "f")
    line.lose(answer=b"the-line")
    assert errno_of(lambda: os.fsync(fd)) == errno.EIO
    line.open()
    live(mounted)
    os.rename(mounted.path / "g", mounted.path / "f")
    os.close(fd)
    assert stored(namespace, "/f") == b"g\n"


def test_plain_rename_onto_a_name_made_at_the_same_time(mounted: harness.Mount, namespace: harness.Namespace) -> None:
    (mounted.path / "a").write_bytes(b"a\n")
    assert not os.path.exists(mounted.path / "b")
    outcome: list[int] = []
    with psycopg.connect(namespace.dsn) as conn, psycopg.connect(namespace.dsn, autocommit=True) as watch:
        conn.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/b', 'theirs')",
            (namespace.tenant_id, namespace.agent_id),
        )
        renaming = threading.Thread(
            target=lambda: outcome.append(errno_of(lambda: os.rename(mounted.path / "a", mounted.path / "b")))
        )
        renaming.start()
        eventually(
            lambda: watch.execute("select from pg_stat_activity where wait_event_type = 'Lock'").rowcount,
            "the rename waits for the insert",
        )
    renaming.join(10)
    assert outcome in ([0], [errno.ESTALE]), "EEXIST is no answer of a plain rename"


def test_truncate_by_path_while_postgres_is_away(mounted: harness.Mount, namespace: harness.Namespace) -> None:
    """It failed, so nothing of it is left to be committed by somebody else's close."""
    path = mounted.path / "f"
    path.write_bytes(b"old old old\n")
    reader = os.open(path, os.O_RDONLY)
    with psycopg.connect(namespace.dsn) as conn:
        conn.execute("select from agent_files where path = '/f' for update")
        assert errno_of(lambda: os.truncate(path, 0)) == errno.EIO
    with open(path, "ab") as file:
        file.write(b"x\n")
    os.close(reader)
    assert stored(namespace, "/f") == b"old old old\nx\n"


def test_announcement_that_is_no_json_with_our_origin(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace
) -> None:
    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        ((channel, origin),) = namespace.execute(
            "select channel, only_follower from agent_namespaces where agent_id = %s", (namespace.agent_id,)
        )
        (mounted.path / "f").write_bytes(b"text")
        line.refuse()
        line.lose(answer=b"delete from agent_files", all_of_it=False)
        assert errno_of(lambda: os.unlink(mounted.path / "f")) == errno.EIO
        line.open()
        conn.execute("select pg_notify(%s, %s)", (channel, f'["{origin}",'))
    (mounted.path / "g").write_bytes(b"text")
    assert mounted.process.poll() is None


# -- Bytes -------------------------------------------------------------------------------------------


def test_write_while_the_last_close_is_rescued(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    """The rescue of 40 MB takes long enough for another process to open the file and write."""
    mounted = mount(
        *TIMEOUT, "--rescue-dir", str(rescue_dir), "--max-file-bytes", str(200 << 20), session="s1", dsn=line.dsn
    )
    mounted.expect_log(LOGGED)
    path = mounted.path / "log"
    path.write_bytes(b"old\n")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for _ in range(40):
        os.write(fd, b"x" * (1 << 20))
    rescue_dir.mkdir(mode=0o700)
    with psycopg.connect(namespace.dsn) as conn:
        conn.execute("select from agent_files where path = '/log' for update")
        assert errno_of(lambda: os.close(fd)) == errno.EIO
        eventually(lambda: os.listdir(rescue_dir), "the rescue has begun")
        second = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(second, b"a line of mine\n")
        eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    closed = errno_of(lambda: os.close(second))
    assert closed != 0 or (stored(namespace, "/log") or b"").endswith(b"a line of mine\n")


def test_dirty_buffer_beside_a_poisoned_handle(
    mount: harness.MountFactory, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    options = (*TIMEOUT, "--rescue-dir", str(rescue_dir), "--max-file-bytes", str(1 << 20))
    mounted = mount(*options, session="s1", dsn=line.dsn)
    mounted.expect_log(rf"{LOGGED}|refused")
    (mounted.path / "f").write_bytes(b"old\n")
    poisoned = os.open(mounted.path / "f", os.O_WRONLY)
    assert errno_of(lambda: os.pwrite(poisoned, b"x", 2 << 20)) == errno.EFBIG
    fd = append(mounted.path / "f")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    errno_of(lambda: os.close(poisoned))
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()
    assert "written" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/f") == b"old\n" + LINE


def test_sigterm_with_a_lost_race_while_postgres_is_silent(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    (mounted.path / "f").write_bytes(b"old\n")
    fd = os.open(mounted.path / "f", os.O_RDWR)
    os.write(fd, b"precious\n")
    namespace.execute("delete from agent_files where path = '/f'")
    eventually(lambda: not os.path.exists(mounted.path / "f"), "the removal is seen")
    line.freeze()
    mounted.expect_log("fusefs: |hint: ")
    mounted.process.terminate()
    mounted.wait(11)
    line.cut()
    errno_of(lambda: os.close(fd))
    assert [one["path"] for one in kept(rescue_dir)] == ["/f"]


# -- Putting back ------------------------------------------------------------------------------------


def rescued_append(mounted: harness.Mount, line: Line, rescue_dir: Path) -> None:
    (mounted.path / "log").write_bytes(b"old\n")
    fd = append(mounted.path / "log")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()


def test_put_whose_answer_was_lost(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    rescued_append(mounted, line, rescue_dir)
    line.lose(answer=b"the-line")
    assert rescue(rescue_dir, "put", "--all", "--dsn", line.dsn).returncode == 11
    assert len(kept(rescue_dir)) == 1
    assert "there already" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/log") == b"old\n" + LINE


def test_two_puts_at_once(mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path) -> None:
    rescued_append(mounted, line, rescue_dir)
    command = [harness.FUSEFS, "rescue", "put", "--all", "--dsn", namespace.dsn, "--rescue-dir", str(rescue_dir)]
    with psycopg.connect(namespace.dsn) as conn, psycopg.connect(namespace.dsn, autocommit=True) as watch:
        conn.execute("select from agent_files where path = '/log' for update")
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        eventually(
            lambda: watch.execute("select from pg_stat_activity where wait_event_type = 'Lock'").rowcount == 2,
            "both wait for the row",
        )
    said = [one.communicate(timeout=30)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert sorted("there already" in text for text in said) == [False, True]
    assert stored(namespace, "/log") == b"old\n" + LINE


@pytest.mark.parametrize("claimed", [True, False])
def test_rescued_result_of_the_harness_can_be_put_back(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path, claimed: bool
) -> None:
    """An agent may create a file there once, and its own handle may go on writing it."""
    folder = mounted.path / "large_tool_results" / "s1"
    os.makedirs(folder)
    fd = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | (os.O_EXCL if claimed else 0))
    os.write(fd, b"precious\n")
    if not claimed:
        os.fsync(fd)
        os.write(fd, b"more\n")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    line.open()
    assert "written" in put_all(rescue_dir, namespace)
    expected = b"precious\n" if claimed else b"precious\nmore\n"
    assert stored(namespace, "/large_tool_results/s1/out") == expected


def test_new_log_that_others_began_meanwhile(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    fd = append(mounted.path / "log")
    line.shut()
    assert errno_of(lambda: os.close(fd)) == errno.EIO
    eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/log', E'theirs\\n')",
        (namespace.tenant_id, namespace.agent_id),
    )
    line.open()
    assert "written" in put_all(rescue_dir, namespace)
    assert stored(namespace, "/log") == b"theirs\n" + LINE


def test_put_ends_the_backend_that_could_still_apply_it(
    mounted: harness.Mount, line: Line, namespace: harness.Namespace, rescue_dir: Path
) -> None:
    """The old connection's server process waits for a lock, and would go on after the put."""
    (mounted.path / "log").write_bytes(b"old\n")
    fd = append(mounted.path / "log")
    with psycopg.connect(namespace.dsn) as conn:
        conn.execute("select from agent_files where path = '/log' for update")
        line.freeze()
        line.refuse()
        closing = threading.Thread(target=lambda: errno_of(lambda: os.close(fd)))
        closing.start()
        eventually(lambda: kept(rescue_dir), "the write is in the rescue directory")
    closing.join(20)
    put_all(rescue_dir, namespace)
    line.cut()
    assert stored(namespace, "/log") == b"old\n" + LINE


def test_rescue_directory_inside_the_mount_is_refused(namespace: harness.Namespace, tmp_path: Path) -> None:
    where = tmp_path / "mnt"
    where.mkdir()
    command = [harness.FUSEFS, "mount", where, "--dsn", namespace.dsn, "--tenant", namespace.tenant]
    command += ["--agent", namespace.agent, "--rescue-dir", str(where / "rescue")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "inside the mount point" in done.stderr
