"""No path leads out of an agent's mount: not `..`, not a link, not /proc, not a name that looks alike, not a control
file, not a file handle. What one session's policy hides from another is in `test_sessions.py`.

The containers are made of what a container is made of: a mount namespace of its own, a bind mount of the session's
folder, a root that was pivoted to, and fewer capabilities.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import unicodedata
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import harness
from tests.mount.posix_support import file_handle, refused
from tests.mount.sides import eventually

SECRET = "not for session one"
ME, OTHER = "s-one", "s-two"
TIMEOUT_S = 60
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a host mount and makes namespaces")


@dataclass(frozen=True, slots=True)
class Places:
    """One host mount with the attacker's session, another of the same agent, and two other agents' ones."""

    host: Path
    own: Path
    others: tuple[Path, ...]
    namespaces: tuple[harness.Namespace, ...]


@pytest.fixture(scope="module")
def places(module_mount: harness.MountFactory) -> Places:
    first = module_mount.namespace
    sibling = harness.make_namespace(first.dsn, tenant=first.tenant)
    stranger = harness.make_namespace(first.dsn)
    host = module_mount(layout="host")
    host.expect_log("refused|denied")
    folders = [
        host.path / of.tenant / of.agent / session
        for of, session in ((first, ME), (first, OTHER), (sibling, ME), (stranger, ME))
    ]
    for folder in folders:
        folder.mkdir()
    for folder in folders[1:]:
        (folder / "large_tool_results" / folder.name).mkdir(parents=True)
        (folder / "large_tool_results" / folder.name / "call").write_text(SECRET)
    for folder in folders[2:]:
        (folder / "secret").write_text(SECRET)
    (folders[0] / "mine").write_text("mine")
    return Places(host.path, folders[0], tuple(folders[1:]), (first, sibling, stranger))


# A container

_CONTAINER = """
set -eu
root=$1 session=$2; shift 2
mount -t tmpfs none "$root"
mkdir "$root"/{usr,proc,work,old}
mount --bind /usr "$root/usr"
for name in bin lib lib64; do [ -e /$name ] && ln -s usr/$name "$root/$name"; done
mount --bind "$session" "$root/work"
mount -o remount,bind,symfollow "$root/work"
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . old
umount -l old
rmdir old
cd /work
exec setpriv --bounding-set "$1" --inh-caps "$1" --ambient-caps "$1" --no-new-privs bash -c "$2"
"""
NOTHING = "-all"
DOCKER = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+mknod,+setfcap"
"""The capabilities of a container by default, less those that this machine may lack."""


@pytest.fixture
def container_root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def in_container(root: Path, session: Path, script: str, capabilities: str = NOTHING) -> str:
    """What a shell script prints in a container whose /work is the session's folder."""
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
            *("bash", "-c", _CONTAINER, "bash", root, session, capabilities, script),
        ],
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def targets_of(places: Places) -> list[str]:
    """Ways to write a path to what is not the session's own, for a link or for a shell."""
    found = []
    for folder in places.others:
        file = folder / "large_tool_results" / folder.name / "call"
        inside = file.relative_to(places.host)
        climb = "/".join([".."] * 3)
        found += [
            str(file),
            f"/proc/self/root{file}",
            f"/proc/1/root{file}",
            f"/proc/self/root/../../..{file}",
            f"/proc/self/cwd/{climb}/{inside}",
            f"/proc/thread-self/root{file}",
            f"{climb}/{inside}",
            f"../{'/'.join(inside.parts[2:])}",
            f"/work/{climb}/{inside}",
            f"./.././../{inside}",
            f"mine/{climb}/{inside}",
            f".fusefs/{climb}/../{inside}",
            f".fusefs/versions/{climb}/../../{inside}",
            f"/proc/self/fd/9/{climb}/{inside}",
            f"/proc/self/fd/9/../{'/'.join(inside.parts[2:])}",
        ]
    return found


@as_root
@pytest.mark.parametrize("capabilities", [NOTHING, DOCKER], ids=["nothing", "docker"])
def test_no_path_leads_out_of_a_container(
    places: Places, container_root: Path, tmp_path: Path, capabilities: str
) -> None:
    targets = targets_of(places)
    folder = f"paths-{'all' if capabilities == DOCKER else 'none'}"
    (places.own / folder).mkdir()
    (places.own / folder / "targets").write_text("\n".join(targets) + "\n")
    script = f"""
        cd {folder}
        exec 9</work
        n=0
        while IFS= read -r target; do
            n=$((n + 1))
            cat -- "$target" 2>&1
            ln -s -- "$target" "link$n"
            cat "link$n" 2>&1
            # A chain of links, and a link to the directory with the rest of the path behind it.
            ln -s "link$n" "second$n"; ln -s "$PWD/second$n" "third$n"
            cat "third$n" 2>&1
            ln -s -- "${{target%/*}}" "dir$n"
            cat "dir$n/${{target##*/}}" 2>&1
            ls -la "dir$n/" 2>&1
            (cd -P "dir$n" 2>&1 && ls -la .. ../.. 2>&1)
            echo planted > "link$n" 2>&1
            cp "third$n" "copied$n" 2>&1
        done < targets
        ln -s / top; ln -s /proc/self/root root; ln -s .. up; ln -s up/up/up/up higher; ln -s self self
        cat self 2>&1; grep -rs '{SECRET}' top/work root/work up higher
        cat /work/mine
    """
    shown = in_container(container_root, places.own, script, capabilities)
    assert shown.endswith("mine"), "the script did not come to its end"
    assert shown.count("No such file or directory") >= 3 * len(targets)
    assert SECRET not in shown
    for other in places.others:
        assert (other / "large_tool_results" / other.name / "call").read_text() == SECRET
    assert not any((places.own / folder).glob("copied*"))
    shutil.rmtree(places.own / folder)


@as_root
def test_the_same_links_work_where_they_should(places: Places, container_root: Path) -> None:
    """What keeps the test above honest: links are followed there, and one whose target is shown is read."""
    script = """
        ln -s /work/mine absolute; ln -s ../work/mine relative
        ln -s /proc/self/root/work/mine by-proc; ln -s by-proc chain
        cat absolute relative by-proc chain
        rm absolute relative by-proc chain
    """
    assert in_container(container_root, places.own, script) == "mine" * 4
    other = places.others[0]
    shown = in_container(container_root, other, f"cat large_tool_results/{OTHER}/call")
    assert shown == SECRET


@as_root
def test_the_top_of_a_bind_mount_is_the_session(places: Places, container_root: Path) -> None:
    """`..` by name, by an open directory and by the kernel's own idea of the working directory."""
    script = """
        exec 9</work
        readlink -f /work/.. /work/../.. /proc/self/fd/9/.. /proc/self/cwd/..
        cd -P /proc/self/fd/9/../../.. && pwd -P && ls
    """
    lines = in_container(container_root, places.own, script).splitlines()
    assert lines[:5] == ["/"] * 5
    assert sorted(lines[5:]) == sorted({"bin", "lib", "lib64", "proc", "usr", "work"} & set(lines[5:]))
    assert "work" in lines


@as_root
def test_a_link_is_not_followed_in_the_hosts_view(places: Places) -> None:
    """Not at the end of a path, not in its middle, not by a chain, whatever the agent made them say."""
    names = {
        "last": places.others[0] / "mine",
        "middle": places.others[2],
        "up": Path("../../.."),
        "proc": Path("/proc/1/root"),
    }
    for name, target in names.items():
        (places.own / name).symlink_to(target)
    for path in ("last", "middle/secret", "up/", "proc/etc/passwd"):
        with refused(errno.ELOOP):
            os.open(f"{places.own}/{path}", os.O_RDONLY)
    for name in names:
        (places.own / name).unlink()


# Names


def look_alikes(name: str) -> set[str]:
    found = {
        name.upper(),
        name.capitalize(),
        f"{name} ",
        f" {name}",
        f"{name}.",
        f"{name}\u200b",
        f"\u202e{name}",
        f"{name}\n",
        f"{name};",
        f"{name}%",
        f"{name}*",
        name.replace("-", "\u2010"),
        name.replace("-", "_"),
        name.replace("a", "\u0430").replace("s", "\u0455").replace("t", "\uff54"),
        unicodedata.normalize("NFD", name + "\u00e9").removesuffix("\u0301"),
        name[:-1],
        f"{name}'--",
        f"x' or slug='{name}",
    }
    return found - {name}


@as_root
def test_a_folder_has_one_name(places: Places) -> None:
    """Tenant, agent and session are found by the very name that is listed, and by no other."""
    first = places.namespaces[0]
    for name in look_alikes(first.tenant) | {first.tenant_id, first.tenant_id.upper()}:
        with refused(errno.ENOENT):
            os.stat(places.host / name)
    for name in look_alikes(first.agent) | {first.agent_id, places.namespaces[1].agent_id, places.namespaces[2].agent}:
        with refused(errno.ENOENT):
            os.stat(places.host / first.tenant / name)
    for name in look_alikes(ME):
        with refused(errno.ENOENT):
            os.stat(places.own.parent / name)


@as_root
def test_a_slug_of_another_program_cannot_pass_for_another_tenant(mount: harness.MountFactory) -> None:
    """`tenants` may belong to a program that lets tenants choose their slug: one is the UUID of another tenant, others
    are no names of a folder. Each has the one folder of its own id, and the listing of all is whole."""
    victim = mount.namespace
    victim.execute("update tenants set slug = null where id = %s", (victim.tenant_id,))
    for slug in (victim.tenant_id, f"{{{victim.tenant_id.upper()}}}", "a/b", "..", ".", "x" * 256):
        foreign = str(uuid.uuid4())
        victim.execute("insert into tenants (id, slug) values (%s, %s)", (foreign, slug))
        victim.execute("insert into agents (tenant_id, slug) values (%s, %s)", (foreign, victim.agent))
    host = mount(layout="host")
    listed = os.listdir(host.path)
    assert sorted(listed) == sorted(id for (id,) in victim.execute("select id::text from tenants"))
    session = host.path / victim.tenant_id / victim.agent / ME
    session.mkdir()
    (session / "f").write_text("the victim's")
    assert victim.execute("select tenant_id::text from agent_files where path = '/f'") == [(victim.tenant_id,)]
    same = mount(namespace=harness.Namespace(victim.dsn, "", "", victim.tenant_id, victim.agent), session=ME)
    assert (same.path / "f").read_text() == "the victim's"
    one = mount("--tenant", victim.tenant_id, layout="all")
    assert os.listdir(one.path) == [victim.tenant_id]


# Control files


def record_conflict(namespace: harness.Namespace, path: str, session: str) -> str:
    made = str(uuid.uuid4())
    namespace.execute(
        "insert into agent_file_conflicts (tenant_id, agent_id, id, path, op, content, session, principal)"
        " values (%s, %s, %s, %s, 'write', %s, %s, 'agent')",
        (namespace.tenant_id, namespace.agent_id, made, path, SECRET.encode(), session),
    )
    return made


@as_root
@pytest.mark.parametrize(
    "path",
    [
        f"/large_tool_results/{OTHER}/call",
        f"/large_tool_results/{OTHER}/deep/er/call",
        f"/large_tool_results/{OTHER}",
        f"/conversation_history/{OTHER}.md",
    ],
)
def test_conflicts_of_other_sessions_machine_paths_are_not_shown(places: Places, path: str) -> None:
    kept = record_conflict(places.namespaces[0], path, OTHER)
    name = f"{kept[:8]}-{path.rpartition('/')[2]}"
    shown = places.others[0] / ".fusefs" / "conflicts"
    assert name in os.listdir(shown)
    assert (shown / name).read_text() == SECRET
    hidden = places.own / ".fusefs" / "conflicts"
    assert name not in os.listdir(hidden)
    for guess in (name, f"{kept}-{path.rpartition('/')[2]}", kept, kept[:8], f"../conflicts/{name}"):
        with refused(errno.ENOENT):
            (hidden / guess).read_bytes()
    stranger = places.others[2] / ".fusefs" / "conflicts"
    assert os.listdir(stranger) == []


@as_root
def test_old_versions_of_other_sessions_machine_paths_are_not_shown(places: Places) -> None:
    """Also of files that were deleted, and of one that an administrator has put where everybody sees it: the versions
    that it had in the other session's folder stay there."""
    first, other = places.namespaces[0], places.others[0]
    base = f"/large_tool_results/{OTHER}"
    for name in ("gone", "moved"):
        first.execute(
            "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, %s, %s)",
            (first.tenant_id, first.agent_id, f"{base}/{name}", SECRET),
        )
        first.execute(
            "update agent_files set content = 'for all' where agent_id = %s and path = %s",
            (first.agent_id, f"{base}/{name}"),
        )
    ids = (first.agent_id, f"{base}/gone")
    first.execute("delete from agent_files where agent_id = %s and path = %s", ids)
    first.execute(
        "update agent_files set path = '/published' where agent_id = %s and path = %s",
        (first.agent_id, f"{base}/moved"),
    )
    eventually(lambda: (places.own / "published").read_text() == "for all", "the published file")
    versions = places.own / ".fusefs" / "versions"
    for path in (
        f"{base}/gone/1", f"{base}/gone/2", f"{base}/gone", base, f"{base}/call/1", "/published/1", f"{base}/moved/1",
        f"/large_tool_results/{ME}/../{OTHER}/gone/1", "/published/01", "/published/-1",
    ):  # fmt: skip
        with refused(errno.ENOENT):
            (versions / path.lstrip("/")).read_bytes()
    assert OTHER not in os.listdir(versions / "large_tool_results")
    # The session itself reads what it had.
    assert (other / ".fusefs" / "versions" / base.lstrip("/") / "gone" / "1").read_text() == SECRET


@as_root
def test_control_files_tell_nothing_of_others(places: Places) -> None:
    own, other = places.own / ".fusefs", places.others[2] / ".fusefs"
    with refused(errno.EACCES):
        (places.others[2] / "memories" / "refused-there").write_text("x")
    assert "refused-there" in (other / "errors").read_text()
    assert "refused-there" not in (own / "errors").read_text()
    status = (own / "status").read_text()
    assert json.loads(status)["session"] == ME
    for namespace in places.namespaces:
        for name in (namespace.tenant, namespace.agent, namespace.tenant_id, namespace.agent_id):
            assert name not in status
    assert OTHER not in status


@as_root
def test_the_control_directory_has_one_name_and_takes_nothing(places: Places) -> None:
    for name in look_alikes(".fusefs") - {".fusefs/"}:
        with refused(errno.ENOENT):
            os.stat(places.own / name / "status")
    control = places.own / ".fusefs"
    (places.own / "to-control").symlink_to(".fusefs/status")
    (places.own / "f").write_text("x")
    for attempt in (
        lambda: os.rename(places.own / "f", control / "f"),
        lambda: os.rename(places.own / "f", places.own / ".fusefs"),
        lambda: os.rename(control, places.own / "taken"),
        lambda: os.mkdir(control / "d"),
        lambda: os.unlink(control / "errors"),
        lambda: os.symlink("/", control / "versions" / "link"),
        lambda: os.rmdir(control),
        lambda: os.chmod(control / "status", 0o777),
        lambda: os.truncate(control / "errors", 0),
        lambda: os.link(places.own / "f", control / "conflicts" / "f"),
    ):
        with refused(errno.EACCES, errno.EROFS, errno.EPERM, errno.EXDEV, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR):
            attempt()
    assert (places.own / "f").read_text() == "x"
    for name in ("to-control", "f"):
        (places.own / name).unlink()


# File handles

_GUESS_C = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* guess DIRECTORY PATH: reads lines "NODE GENERATION", opens each by handle through the file system that DIRECTORY is
   in, and prints the errno of each, or what is in the file (PATH below it, where it is a directory). */
int main(int argc, char **argv) {
    int where = open(argv[1], O_RDONLY | O_DIRECTORY);
    uint64_t node;
    uint32_t generation;
    if (argc != 3 || where < 0) return 2;
    while (scanf("%" SCNu64 " %" SCNu32, &node, &generation) == 2) {
        union { struct file_handle head; char room[sizeof(struct file_handle) + 12]; } handle;
        uint32_t *words = (uint32_t *)handle.head.f_handle;
        char text[64] = "";
        handle.head.handle_bytes = 12;
        handle.head.handle_type = 0x81; /* FILEID_INO64_GEN */
        words[0] = node >> 32, words[1] = node, words[2] = generation;
        int fd = open_by_handle_at(where, &handle.head, O_RDONLY);
        if (fd < 0) { printf("%d\n", errno); continue; }
        int file = *argv[2] ? openat(fd, argv[2], O_RDONLY) : fd;
        ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
        printf("opened %s\n", got < 0 ? strerror(errno) : text);
        if (file != fd) close(file);
        close(fd);
    }
    return 0;
}
"""
HANDLES = "-all,+dac_read_search"
ESTALE = str(errno.ESTALE)


@pytest.fixture(scope="module")
def guess(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guess")
    (folder / "guess.c").write_text(_GUESS_C)
    command = ["gcc", "-O1", "-Wall", "-Werror", "-o", "guess", "guess.c"]
    subprocess.run(command, cwd=folder, check=True, timeout=TIMEOUT_S)
    return folder / "guess"


@dataclass(frozen=True, slots=True)
class Guesser:
    """Tries handles from a bind mount of a session's folder."""

    program: Path
    session: Path
    mountpoint: Path

    def __call__(self, *guesses: tuple[int, int], below: str = "", capabilities: str = HANDLES) -> list[str]:
        script = (
            'set -eu; mount --bind "$1" "$2"; exec setpriv --bounding-set "$3" --inh-caps "$3" --ambient-caps "$3"'
            ' --no-new-privs "$4" "$2" "$5"'
        )
        done = subprocess.run(
            [
                *("unshare", "--mount", "--propagation", "private", "bash", "-c", script, "bash"),
                *(self.session, self.mountpoint, capabilities, self.program, below),
            ],
            input="".join(f"{node} {generation}\n" for node, generation in guesses),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == len(guesses)
        return lines


@pytest.fixture
def guesser(guess: Path, places: Places, tmp_path: Path) -> Guesser:
    return Guesser(guess, places.own, tmp_path)


def handle_of(path: Path) -> tuple[int, int]:
    """Inode number and generation, as name_to_handle_at(2) tells whoever can name the file."""
    words = memoryview(file_handle(path)).cast("I")
    return words[0] << 32 | words[1], words[2]


@pytest.fixture
def held(places: Places) -> Iterator[Sequence[Path]]:
    """Files of the other sessions, kept open, so that the kernel has them in memory: nothing else can be opened."""
    files = [folder / "large_tool_results" / folder.name / "call" for folder in places.others]
    fds = [os.open(path, os.O_RDONLY) for path in files]
    yield files
    for fd in fds:
        os.close(fd)


@as_root
def test_a_guessed_generation_is_stale(places: Places, guesser: Guesser, held: Sequence[Path]) -> None:
    own = handle_of(places.own / "mine")
    assert own[0] == (places.own / "mine").stat().st_ino
    assert guesser(own) == ["opened mine"]
    known = {own[1], handle_of(places.own)[1], 0, 1, 2, (1 << 32) - 1}
    some = random.Random(1).sample(range(1 << 32), 5000)
    for path in held:
        node, right = handle_of(path)
        guesses = [generation for generation in (*known, *some, (right + 1) % (1 << 32)) if generation != right]
        answers = guesser(*((node, generation) for generation in guesses))
        assert set(answers) == {ESTALE}
        # What a right guess needs: the number, which a session can work out, and 32 random bits.
        assert guesser((node, right)) == [f"opened {SECRET}"]


@as_root
def test_one_sessions_generations_say_nothing_of_anothers(places: Places, guesser: Guesser) -> None:
    """Two sessions of an agent see the same file by two numbers, of which the lower bits are the same. So are those of
    their roots: with a generation in common a handle would lead from one session's view into the other's."""
    (places.own / "shared").write_text("x")
    other = places.others[0]
    for mine, theirs in ((places.own / "shared", other / "shared"), (places.own, other)):
        with_fd = os.open(theirs, os.O_RDONLY)
        (node, generation), (their_node, their_generation) = handle_of(mine), handle_of(theirs)
        assert node % (1 << 40) == their_node % (1 << 40)
        assert node != their_node
        assert guesser((their_node, generation)) == [ESTALE]
        below = f"large_tool_results/{OTHER}/call" if theirs is other else ""
        assert guesser((their_node, their_generation), below=below)[0].startswith("opened ")
        os.close(with_fd)
    (places.own / "shared").unlink()


@as_root
def test_the_root_of_a_mount_needs_no_guess(places: Places, guesser: Guesser) -> None:
    """The limit that the page states: why a container with CAP_DAC_READ_SEARCH gets a mount of its own."""
    for other in places.others:
        path = other / "large_tool_results" / other.name / "call"
        assert guesser((1, 0), below=str(path.relative_to(places.host))) == [f"opened {SECRET}"]


@as_root
@pytest.mark.parametrize("capabilities", [NOTHING, DOCKER], ids=["nothing", "docker"])
def test_handles_need_the_capability(places: Places, guesser: Guesser, held: Sequence[Path], capabilities: str) -> None:
    guesses = [(1, 0), handle_of(places.own / "mine"), *(handle_of(path) for path in held)]
    assert set(guesser(*guesses, capabilities=capabilities)) == {str(errno.EPERM)}


@as_root
def test_a_mount_of_one_session_has_nothing_else_in_it(
    mount: harness.MountFactory, guess: Path, tmp_path: Path
) -> None:
    """What a container with the capability is to be given: the root is the session itself."""
    namespace = mount.namespace
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, %s, %s)",
        (namespace.tenant_id, namespace.agent_id, f"/large_tool_results/{OTHER}/call", SECRET),
    )
    alone = mount("--allow-other", session=ME)
    (alone.path / "mine").write_text("mine")
    guesser = Guesser(guess, alone.path, tmp_path)
    assert guesser((1, 0), below="mine") == ["opened mine"]
    assert guesser((1, 0), below=f"large_tool_results/{OTHER}/call") == ["opened No such file or directory"]
    assert guesser((1, 0), below="..") == ["opened Is a directory"]


# A mount that only root can reach


@as_root
def test_without_default_permissions_modes_do_not_bind_root(mount: harness.MountFactory) -> None:
    """A mount that root keeps for itself is not asked for permissions: modes do not stop a root process that gave up
    CAP_DAC_OVERRIDE. The policy does, and so do modes in a mount that others may enter."""
    attempt = 'cat "$1/secret" && echo x > "$1/memories/f"'
    for options, reads in (((), True), (("--allow-other",), False)):
        mounted = mount(*options, session=f"s-{len(options)}")
        mounted.expect_log("refused|denied")
        (mounted.path / "secret").write_text("read")
        os.chmod(mounted.path / "secret", 0)
        done = subprocess.run(
            ["setpriv", "--bounding-set", NOTHING, "--inh-caps", NOTHING, "bash", "-c", attempt, "bash", mounted.path],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert (done.stdout == "read") == reads
        assert done.returncode != 0
        assert "Permission denied" in done.stderr
        assert not (mounted.path / "memories" / "f").exists()
        os.chmod(mounted.path / "secret", 0o600)
        (mounted.path / "secret").unlink()
