"""The password of the database and the contents of files: where they must not be found.

A password is looked for in all that a mount leaves where others can read it, and in every text of every failure; a
content in all that the daemon writes but the rows.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fusefs.db import dsn as dsns
from fusefs.telemetry.logs import scrub
from tests import harness
from tests.doors.command import Fusefs
from tests.doors.test_cli_mount import Commands, foreground, pid_of
from tests.mount.posix_support import errno_of, refused, unprivileged
from tests.mount.sides import eventually
from tests.relay import Line

PASSWORD = "hunterA@hunterB/hunterC:hunterD'hunterE\\hunterF %hunterG#hunterH?hunterI&hunterJ=hunterK\"hunterL"
"""Every piece of it is to be found by one word."""
SECRET = "hunter"


@pytest.fixture
def commands(suite_dir: Path, namespace: harness.Namespace) -> Iterator[Commands]:
    harness.require_fuse()
    folder = Path(tempfile.mkdtemp(dir=suite_dir))
    made = Commands(folder, suite_dir, namespace)
    yield made
    for one in made.status():
        made("umount", "--force", one["mountpoint"])
    assert harness.mounts_under(folder) == []


@pytest.fixture
def where(commands: Commands) -> Path:
    path = commands.folder / "mnt"
    path.mkdir()
    return path


def as_url(dsn: str) -> str:
    """The DSN with the password, as a URL."""
    parts = conninfo_to_dict(dsn)
    host = quote(str(parts["host"]), safe="")
    return f"postgresql://{parts['user']}:{quote(PASSWORD, safe='')}@/{parts['dbname']}?host={host}"


def ways(commands: Commands) -> Mapping[str, tuple[tuple[str, ...], dict[str, str]]]:
    """How a password can be given: arguments and environment."""
    dsn = commands.namespace.dsn
    passfile = commands.folder / "pgpass"
    passfile.write_text("*:*:*:*:" + PASSWORD.replace("\\", "\\\\").replace(":", "\\:") + "\n")
    passfile.chmod(0o600)
    pairs = make_conninfo(dsn, password=PASSWORD)
    config = commands.folder / "config.toml"
    config.write_text(f"dsn = '''{pairs}'''\n")
    config.chmod(0o600)
    return {
        "url": (("--dsn", as_url(dsn)), {}),
        "pairs": (("--dsn", pairs), {}),
        "PGPASSWORD": ((), {"PGPASSWORD": PASSWORD}),
        "passfile": (("--dsn", make_conninfo(dsn, passfile=str(passfile))), {}),
        "configuration": (("--config", str(config)), {}),
    }


def command_lines(folder: Path) -> dict[int, str]:
    """What everybody may read of the processes that have to do with a folder: their command lines and names. Others,
    such as those of a second run of this test, are not ours to judge."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = "".join((process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "comm"))
        except OSError:
            continue  # it has ended
        if str(folder) in text:
            found[int(process.name)] = text
    return found


@pytest.mark.parametrize("way", ["url", "pairs", "PGPASSWORD", "passfile", "configuration"])
def test_a_mount_shows_its_password_to_nobody(commands: Commands, where: Path, way: str) -> None:
    arguments, environment = ways(commands)[way]
    if way == "configuration":
        del commands.env["HANGO_FS_DSN"]  # it would go before the file
    said = commands.mount(where, "--session", "s-1", *arguments, **environment)
    pid = pid_of(commands)
    (where / "f").write_text("one")
    with refused(errno.EACCES):
        (where / "memories" / "f").write_text("x")
    lines = command_lines(commands.folder)
    assert pid in lines
    shown = {
        "the command": said,
        "status": commands.ok("status"),
        "status --json": commands.ok("status", "--json"),
        "versions": commands.ok("versions", where / "f", **environment),
        "an error": commands("versions", where / "none", "--debug", **environment).stderr,
        **{f".fusefs/{name}": (where / ".fusefs" / name).read_text() for name in ("status", "errors", "README")},
        **{f"command line of {number}": text for number, text in lines.items()},
        "stat": Path(f"/proc/{pid}/status").read_text(),
        "mounts": Path(f"/proc/{pid}/mountinfo").read_text(),
    }
    commands.ok("umount", where)
    written = [path for folder in ("run", "state") for path in (commands.folder / folder).rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in written)
    shown |= {str(path): path.read_text() for path in written}
    assert [name for name, text in shown.items() if SECRET in text] == []
    assert "No such file" in shown["an error"]


def test_the_record_of_a_mount_is_found_while_it_runs(commands: Commands, where: Path) -> None:
    commands.mount(where, "--dsn", as_url(commands.namespace.dsn))
    (record,) = (commands.folder / "run").glob("*.json")
    assert '"dsn": "user=' in record.read_text()
    assert SECRET not in record.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as somebody else")
def test_the_environment_of_a_daemon_is_its_owners_alone(commands: Commands, where: Path) -> None:
    commands.mount(where, "--dsn", as_url(commands.namespace.dsn))
    pid = pid_of(commands)
    assert SECRET in Path(f"/proc/{pid}/environ").read_text(), "else there is nothing to hide"

    def attempt() -> None:
        for name in ("environ", "mem", "maps", "auxv"):
            with refused(errno.EACCES, errno.EPERM):
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text()

    unprivileged(attempt)


@pytest.mark.parametrize("way", ["url", "pairs"])
def test_the_command_line_of_the_foreground(commands: Commands, where: Path, way: str) -> None:
    arguments, _ = ways(commands)[way]
    with foreground(commands, where, *arguments) as (process, _ready):
        assert SECRET not in Path(f"/proc/{process.pid}/cmdline").read_text()


# What is said when it fails

QUOTED = quote(PASSWORD, safe="")
UNREACHABLE = {
    "url": f"postgresql://u:{QUOTED}@127.0.0.1:1/x",
    "url, two hosts": f"postgres://u:{QUOTED}@127.0.0.1:1,127.0.0.1:2/x",
    "url, parameter": f"postgresql://127.0.0.1:1/x?user=u&password={QUOTED}",
    "pairs": make_conninfo("host=127.0.0.1 port=1 user=u", password=PASSWORD),
    "no such host": f"postgresql://u:{QUOTED}@nowhere.invalid/x",
    "no such socket": make_conninfo("host=/nowhere user=u", password=PASSWORD),
    "a bad port": f"postgresql://u:{QUOTED}@127.0.0.1:99999/x",
    "a bad option": make_conninfo("host=127.0.0.1 port=1 user=u", password=PASSWORD) + " sslmode=maybe",
    "certificates": make_conninfo("host=127.0.0.1 port=1 sslkey=/none", sslpassword=PASSWORD, password=PASSWORD),
}
MISWRITTEN = {
    "url, nothing escaped": f"postgresql://u:{PASSWORD}@127.0.0.1:1/x",
    "url, a bare @": "postgresql://u:hunterA@hunterB@127.0.0.1:1/x",
    "url, a bare @ at the end": "postgresql://u:hunterA@@127.0.0.1:1/x",
    "url, a bare /": "postgresql://u:12345/hunterB@127.0.0.1:1/x",
    "url, a bare / and letters": "postgresql://u:hunterA/hunterB@127.0.0.1:1/x",
    "url, a bare / and ?": "postgresql://u:hunterA/b?c=hunterB@127.0.0.1:1/x",
    "url, a bare %": "postgresql://u:hunterA%hunterB@127.0.0.1:1/x",
    "url, a bare ?": "postgresql://u:hunterA?hunterB@127.0.0.1:1/x",
    "pairs, nothing quoted": f"host=127.0.0.1 port=1 password={PASSWORD}",
    "pairs, an open quote": "host=127.0.0.1 port=1 password='hunterA",
    "pairs, a blank": "host=127.0.0.1 port=1 password=hunterA hunterB",
    "another scheme": f"mysql://u:{QUOTED}@127.0.0.1/x",
    "no DSN at all": f"u:{QUOTED}@127.0.0.1/x",
}


@pytest.mark.parametrize("dsn", [*UNREACHABLE.values(), *MISWRITTEN.values()], ids=[*UNREACHABLE, *MISWRITTEN])
def test_failures_say_nothing_of_it(bare_fusefs: Fusefs, dsn: str) -> None:
    for words in ("df", "migrate status", "init", "check"):
        done = bare_fusefs(*words.split(), "--dsn", dsn, check=False)
        assert done.code in (2, 11)
        assert done.stderr.startswith("fusefs: ")
        assert SECRET not in done.text + done.stderr


@pytest.mark.parametrize("dsn", UNREACHABLE.values(), ids=[*UNREACHABLE])
@pytest.mark.parametrize("words", ["df", "versions --agent a", "conflicts list --agent a"])
def test_a_dsn_in_the_wrong_place_is_not_repeated(bare_fusefs: Fusefs, words: str, dsn: str) -> None:
    """click quotes an argument that it does not expect, and we a path that is none."""
    done = bare_fusefs(*words.split(), dsn, check=False)
    assert done.code != 0
    assert done.stderr.startswith("fusefs: ")
    assert SECRET not in done.text + done.stderr


@pytest.mark.parametrize("dsn", [UNREACHABLE["url"], UNREACHABLE["pairs"], MISWRITTEN["url, nothing escaped"]])
def test_a_traceback_says_nothing_of_it(commands: Commands, where: Path, dsn: str) -> None:
    for arguments in (("df", "--debug"), ("mount", where, "--tenant", "t", "--agent", "a", "--foreground", "--debug")):
        done = commands(*arguments, HANGO_FS_DSN=dsn)
        assert done.returncode in (2, 11)
        assert "Traceback" in done.stderr
        assert SECRET not in done.stderr + done.stdout


def test_a_fault_of_ours_leaves_no_password_in_the_log(
    bare_fusefs: Fusefs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fusefs.cli import main, status

    def broken(*_args: object) -> None:
        raise RuntimeError(f"cannot use {UNREACHABLE['url']} or password='hunterX hunterY'")

    monkeypatch.setattr(status.registry, "all_records", broken)
    assert main.run(["status", "--debug"]) == 70
    said = capsys.readouterr().err
    assert "RuntimeError: cannot use postgresql://u:***@127.0.0.1:1/x or password=***" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "text", [f"dsn = '{UNREACHABLE['url']}", f'password = "{QUOTED}"', f"dsn = 5 # {QUOTED}", f"[{QUOTED}]\nx = "]
)
def test_a_broken_configuration_says_nothing_of_it(bare_fusefs: Fusefs, tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert SECRET not in bare_fusefs.fails(2, "df", "--config", str(file))


@pytest.mark.parametrize("dsn", MISWRITTEN.values(), ids=[*MISWRITTEN])
def test_a_miswritten_dsn_is_never_shown_in_part(dsn: str) -> None:
    """A piece of the password may have become the host or the database: those are shown."""
    assert SECRET not in dsns.redact(dsn)
    if "://" in dsn and " " not in dsn:
        assert SECRET not in scrub(f"cannot use {dsn} now")


def test_urls_with_one_reading_are_taken() -> None:
    for dsn in (
        f"postgresql://u:{QUOTED}@h:1,h2:2/d?sslmode=require",
        "postgresql://u@h/d",
        "postgresql://h/d?options=-cx%3Da@b/c",
        "postgresql:///d?host=/run/x",
        "postgresql://u:p@[::1]:5432/d",
        "postgresql://u:p@%2Frun%2Fx/d",
        "host=h password='a@b/c' dbname=a@b/c",
    ):
        dsns.parse(dsn)
    assert dsns.parse(UNREACHABLE["url"])["password"] == PASSWORD


# Contents

MARK = "mark-of-a-content"


def test_contents_are_in_no_log_and_no_error(
    mount: harness.MountFactory, pg: str, namespace: harness.Namespace, tmp_path: Path
) -> None:
    """Written, refused, in conflict, over a limit, rescued, linked to, renamed, deleted: the bytes are in rows and in
    the rescue directory, and nowhere else that the daemon writes."""
    rescue_dir = tmp_path / "rescue"
    with Line(pg) as line:
        options = ("--debug", "--write-timeout", "0.5", "--rescue-dir", str(rescue_dir))
        one = mount(*options, session="s-one", dsn=line.dsn)
        two = mount("--debug", session="s-two")
        for mounted in (one, two):
            mounted.expect_log(
                r"refused|stale|conflict|rescued|navailable|LostInFlight|Unsettled|NotConnected|malformed"
            )
        (one.path / "f").write_text(f"{MARK} one")
        os.rename(one.path / "f", one.path / "g")
        (one.path / "binary").write_bytes(b"\0\xff" + MARK.encode())
        with (one.path / "g").open("a") as file:
            file.write(f"{MARK} appended")
        (one.path / "link").symlink_to(MARK)
        (one.path / "gone").write_text(MARK)
        (one.path / "gone").unlink()
        with refused(errno.EACCES):
            (one.path / "memories" / "f").write_text(MARK)
        namespace.execute("select fusefs_set_quotas_v1(%s, %s, 400, null)", (namespace.tenant_id, namespace.agent_id))
        with refused(errno.EDQUOT, errno.EFBIG, errno.ENOSPC):
            (one.path / "over").write_text(MARK * 100)
        namespace.execute("select fusefs_set_quotas_v1(%s, %s, -1, null)", (namespace.tenant_id, namespace.agent_id))
        # A lost race.
        eventually(lambda: (two.path / "g").read_text().startswith(MARK), "the file in the other session")
        fd = os.open(one.path / "g", os.O_WRONLY)
        (two.path / "g").write_text(f"{MARK} two")
        eventually(lambda: (one.path / "g").read_text() == f"{MARK} two", "the other's text")
        assert errno_of(lambda: os.write(fd, f"{MARK} lost".encode())) == errno.ESTALE
        assert errno_of(lambda: os.close(fd)) in (0, errno.ESTALE)
        fd = os.open(one.path / "g", os.O_WRONLY)
        os.write(fd, f"{MARK} lost".encode())
        (two.path / "g").write_text(f"{MARK} three")
        assert errno_of(lambda: os.close(fd)) == errno.ESTALE
        assert MARK in str(namespace.execute("select convert_from(content, 'UTF8') from agent_file_conflicts"))
        # A statement that Postgres refuses, and one that nobody can settle.
        namespace.execute("alter table agent_files add constraint planted check (content not like '%%forbidden%%')")
        assert errno_of(lambda: (one.path / "refused").write_text(f"{MARK} forbidden")) == errno.EIO
        # The kernel releases the handle after close(2) has returned, and the release tries once more.
        eventually(lambda: len([*rescue_dir.glob("*.rescued")]) == 1, "the refused write is kept")
        namespace.execute("alter table agent_files drop constraint planted")
        fd = os.open(one.path / "rescued", os.O_WRONLY | os.O_CREAT)
        os.write(fd, f"{MARK} rescued".encode())
        line.lose(request=b"rescued")
        assert errno_of(lambda: os.fsync(fd)) == errno.EIO
        errno_of(lambda: os.close(fd))
        eventually(lambda: len([*rescue_dir.glob("*.rescued")]) == 2, "the lost write is kept, too")
        line.open()
        kept = [path.read_bytes() for path in rescue_dir.glob("*.rescued")]
        assert all(MARK.encode() in data for data in kept)
        listed = subprocess.run(
            [harness.FUSEFS, "rescue", "list", "--json", "--rescue-dir", rescue_dir], capture_output=True, check=True
        )
        assert b"/rescued" in listed.stdout
        assert MARK.encode() not in listed.stdout + listed.stderr
        shown = {
            f"errors of {mounted.session}": (mounted.path / ".fusefs" / "errors").read_text() for mounted in (one, two)
        }
        shown["status"] = (one.path / ".fusefs" / "status").read_text()
        shutil.rmtree(rescue_dir)
        for mounted in (one, two):
            mounted.umount()
            shown[f"log of {mounted.session}"] = mounted.log_path.read_text()
    assert "/refused" in shown["errors of s-one"]
    assert "fs.write" in shown["log of s-one"]
    assert [name for name, text in shown.items() if MARK in text] == []
