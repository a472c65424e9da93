"""Real tools behave on a mount as on a plain directory. Every test runs on both, the plain one first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.tree import contents, make_corpus, snapshot

TOOL_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    make_corpus(path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home")
    (path / ".gitconfig").write_text(
        "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n"
        "[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n[core]\n\tpager = cat\n"
    )
    return path


@pytest.fixture(scope="module")
def plain_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(params=["plain", "mount"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on either file system; `rm -rf` of it must succeed at the first run."""
    base: Path = request.getfixturevalue("plain_base" if request.param == "plain" else "posix_mount")
    path = base / request.node.originalname
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", path], check=True, timeout=TOOL_TIMEOUT_S)
    assert not path.exists()


class Shell:
    """bash in the directory under test."""

    def __init__(self, cwd: Path, home: Path) -> None:
        self.cwd = cwd
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "PYTHON": sys.executable,
            # -es: no screen; -u NONE: no configuration; the swap file beside the file or nowhere.
            "EDIT": "vim -Nes -u NONE -i NONE",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }

    def __call__(self, *lines: str, code: int = 0, **variables: object) -> str:
        """Run the lines of a script; returns stdout. A word on stderr or another exit code is a failure."""
        script = "\n".join(lines)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-ec", script],
            cwd=self.cwd,
            env={**self.env, **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == code, f"{script}\nexit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert not done.stderr, f"{script}\n{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture
def sh(place: Path, home: Path) -> Shell:
    return Shell(place, home)


def test_cp_archive(place: Path, sh: Shell, corpus: Path) -> None:
    sh('cp -a "$CORPUS" copy', CORPUS=corpus)
    assert snapshot(place / "copy") == snapshot(corpus)
    sh("cp -a copy again; diff -r --no-dereference -x pipe copy again")
    assert snapshot(place / "again") == snapshot(corpus)


def _whole_seconds(node: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*node[:4], node[4] // 10**9, node[5])


def test_tar_round_trip(place: Path, sh: Shell, corpus: Path) -> None:
    sh('tar -cf in.tar -C "$CORPUS" . && mkdir out && tar -xpf in.tar -C out', CORPUS=corpus)
    # GNU tar's default format stores whole seconds.
    expected = {path: _whole_seconds(node) for path, node in snapshot(corpus).items()}
    found = {path: _whole_seconds(node) for path, node in snapshot(place / "out").items()}
    assert found == expected
    sh("tar --format=pax -czf out.tgz -C out . && mkdir twice && tar -xzpf out.tgz -C twice")
    assert snapshot(place / "twice") == snapshot(place / "out")
    # Extracting over what is there replaces it.
    sh("echo changed > out/tool && tar -xpf in.tar -C out")
    assert (place / "out" / "tool").read_text() == "#!/bin/sh\nexit 0\n"


def test_rsync_twice(place: Path, sh: Shell, corpus: Path) -> None:
    sh('rsync -a "$CORPUS/" copy/', CORPUS=corpus)
    assert snapshot(place / "copy") == snapshot(corpus)
    assert sh('rsync -ai "$CORPUS/" copy/', CORPUS=corpus) == ""
    sh("echo more >> copy/tool; rm copy/empty; echo extra > copy/extra")
    changed = sh('rsync -aic --delete "$CORPUS/" copy/', CORPUS=corpus).splitlines()
    assert sorted(line.split(maxsplit=1)[1] for line in changed if not line.endswith("/")) == ["empty", "extra", "tool"]
    assert contents(place / "copy") == contents(corpus)
    sh(
        "rsync -a --inplace copy/ back/ && rsync -a --append-verify copy/ back/",
        "diff -r --no-dereference -x pipe copy back",
    )


def test_git(place: Path, sh: Shell, corpus: Path) -> None:
    sh("git init -q repo")
    for package in ("json", "email", "http"):
        shutil.copytree(corpus / package, place / "repo" / package)
    (place / "repo" / "tool").write_text("#!/bin/sh\n")
    (place / "repo" / "tool").chmod(0o755)
    (place / "repo" / "link").symlink_to("json/decoder.py")
    before = contents(place / "repo" / "json")
    sh("cd repo; git add -A; git commit -qm first; git fsck --no-progress; git status --porcelain")
    assert sh("cd repo; git status --porcelain; git diff-index --name-only HEAD") == ""
    assert sh("cd repo; git ls-files -s tool link | cut -c1-6") == "120000\n100755\n"
    sh("cd repo; git checkout -qb work; echo change >> json/decoder.py; git rm -q json/tool.py; git mv email mail")
    sh("cd repo; git commit -qam second; git checkout -q main")
    assert contents(place / "repo" / "json") == before
    assert (place / "repo" / "email").is_dir() and not (place / "repo" / "mail").exists()
    sh("cd repo; git checkout -q work; git gc -q --prune=now; git fsck --no-progress")
    assert sh("cd repo; git status --porcelain") == ""
    assert sh("cd repo; git log --oneline | wc -l").strip() == "2"
    assert (place / "repo" / "json" / "decoder.py").read_text().endswith("change\n")
    sh("git clone -q repo clone; cd clone; git checkout -q main; git fsck --no-progress")
    assert contents(place / "clone" / "json") == before
    sh(
        "cd repo; echo stashed >> tool; git stash -q; test \"$(cat tool)\" = '#!/bin/sh'",
        "git stash pop -q; grep -q stashed tool",
    )
    sh(
        "cd repo; git reset -q --hard; git merge -q main; git worktree add -q ../side main",
        "cd ../side; git status --porcelain",
    )


def test_vim_saves(place: Path, sh: Shell) -> None:
    (place / "f").write_text("old line\nanother\n")
    (place / "f").chmod(0o640)
    sh("$EDIT --cmd 'set directory=.' -c '%s/old/new/' -c wq f")
    assert (place / "f").read_text() == "new line\nanother\n"
    assert sorted(os.listdir(place)) == ["f"]
    for copy in ("yes", "no"):
        options = f"set directory=. backup backupskip= backupcopy={copy}"
        sh(f"$EDIT --cmd '{options}' -c 'normal Gotail {copy}' -c wq f")
        assert (place / "f~").read_text() + f"tail {copy}\n" == (place / "f").read_text()
    assert (place / "f").stat().st_mode & 0o7777 == 0o640
    assert sorted(os.listdir(place)) == ["f", "f~"]


def test_vim_recovers_from_its_swap_file(place: Path, sh: Shell) -> None:
    (place / "f").write_text("line\n")
    # The editor is killed by its own shell after `preserve`: the swap file stays.
    sh("$EDIT --cmd 'set directory=.' -c 'normal oadded' -c preserve -c '!kill -9 $PPID' f", code=-9)
    assert (place / ".f.swp").exists()
    sh("$EDIT --cmd 'set directory=.' -r -c 'w! recovered' -c 'q!' f || true")
    assert (place / "recovered").read_text() == "line\nadded\n"


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist", "wal"])
def test_sqlite(place: Path, sh: Shell, journal: str) -> None:
    got = sh(f"sqlite3 db 'PRAGMA journal_mode={journal}; CREATE TABLE t (id INTEGER PRIMARY KEY, x TEXT)'").strip()
    assert got in (journal, "delete")
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<2000)"
    fill = f"{numbers} INSERT INTO t SELECT i, hex(i*i) FROM n"
    sh(f'sqlite3 db "{fill}"')
    sh(
        "sqlite3 db 'BEGIN; DELETE FROM t WHERE id % 2; ROLLBACK'",
        "sqlite3 db 'DELETE FROM t WHERE id % 3 = 0; VACUUM; CREATE INDEX ix ON t (x)'",
    )
    assert sh("sqlite3 db 'PRAGMA integrity_check; SELECT count(*), sum(id) FROM t'") == "ok\n1334|1334667\n"
    # Four writers that wait for each other's locks.
    (place / "writer").write_text(
        "for i in 1 2 3 4 5; do sqlite3 -cmd '.timeout 30000' db \"INSERT INTO t (x) VALUES ('w$1')\"; done\n"
    )
    sh("for w in 1 2 3 4; do bash -e writer $w & pids+=($!); done", "for p in ${pids[@]}; do wait $p; done")
    assert sh("sqlite3 db \"PRAGMA integrity_check; SELECT count(*) FROM t WHERE x LIKE 'w_'\"") == "ok\n20\n"


def test_python_compileall(place: Path, sh: Shell, corpus: Path) -> None:
    shutil.copytree(corpus / "json", place / "package")
    sh("$PYTHON -m compileall -q package")
    compiled = sorted((place / "package" / "__pycache__").iterdir())
    assert len(compiled) == len(list((place / "package").glob("*.py")))
    before = [path.stat().st_mtime_ns for path in compiled]
    # Up to date: a second run compares the sources' mtimes and writes nothing.
    sh("$PYTHON -m compileall -q package")
    assert [path.stat().st_mtime_ns for path in compiled] == before
    assert sh("$PYTHON -c 'import package; print(package.loads(\"[1]\"))'") == "[1]\n"


def test_python_venv(place: Path, sh: Shell) -> None:
    sh("$PYTHON -m venv --without-pip env")
    assert sh("env/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'") == "True\n"


def test_make(place: Path, sh: Shell) -> None:
    (place / "Makefile").write_text(
        "all: out.txt\nout.txt: a.o b.o\n\tcat $^ > $@\n%.o: %.c\n\tsed s/x/y/ $< > $@\n.PHONY: all\n"
    )
    (place / "a.c").write_text("ax\n")
    (place / "b.c").write_text("bx\n")
    assert len(sh("make -s all; make all").splitlines()) == 1
    assert (place / "out.txt").read_text() == "ay\nby\n"
    sh("make -q all")
    sh("echo axx > a.c; make -q all && exit 9 || test $? = 1")
    assert sh("make all") == "sed s/x/y/ a.c > a.o\ncat a.o b.o > out.txt\n"
    sh("make -s -j4 -B all")
    assert (place / "out.txt").read_text() == "ayx\nby\n"


def test_ripgrep_and_grep(place: Path, sh: Shell, corpus: Path) -> None:
    shutil.copytree(corpus / "email", place / "email")
    shutil.copytree(corpus / "json", place / "json")
    expected = sorted(
        f"{path}:{number}"
        for path, data in contents(place).items()
        for number, line in enumerate(data.decode().split("\n"), 1)  # a form feed ends no line
        if "class " in line
    )
    for command in ("rg -n --no-heading -uu 'class ' .", "grep -rn 'class ' ."):
        found = sorted(":".join(line.removeprefix("./").split(":", 2)[:2]) for line in sh(command).splitlines())
        assert found == expected
    assert sh("rg -uu --files . | wc -l").strip() == str(len(contents(place)))


def test_find(place: Path, sh: Shell) -> None:
    sh("touch -d '2001-01-01' old; touch -d '2002-01-01' mark; touch -d '2003-01-01' new; mkdir d; touch d/newest")
    sh("ln -s old link; mkfifo pipe")
    assert sh("find . -type f -newer mark | sort") == "./d/newest\n./new\n"
    assert sh("find . -type f ! -newermt 2001-06-01") == "./old\n"
    assert sh("find . -type l -o -type p | sort") == "./link\n./pipe\n"
    sh("mkdir -p deep/a/b/c deep/x; touch deep/a/b/c/f deep/x/g")
    assert sh("find deep -depth -delete -print | wc -l") == "7\n"
    assert not (place / "deep").exists()


def test_sed_in_place(place: Path, sh: Shell) -> None:
    for i in range(20):
        (place / f"f{i}").write_text(f"colour {i}\n" * 3)
        (place / f"f{i}").chmod(0o600)
    sh("sed -i 's/colour/color/' f*; sed -i.bak '2d' f0; perl -pi -e 's/color/hue/' f1")
    assert (place / "f0").read_text() == "color 0\n" * 2
    assert (place / "f0.bak").read_text() == "color 0\n" * 3
    assert (place / "f1").read_text() == "hue 1\n" * 3
    assert all((place / f"f{i}").read_text() == f"color {i}\n" * 3 for i in range(2, 20))
    assert (place / "f5").stat().st_mode & 0o7777 == 0o600
    assert len(os.listdir(place)) == 21


def test_diff_and_patch(place: Path, sh: Shell) -> None:
    sh(
        "mkdir a; seq 100 > a/numbers; echo gone > a/gone; cp -r a b",
        "sed -i 's/^50$/fifty/' b/numbers; rm b/gone; echo new > b/new",
    )
    sh("diff -ruN a b > change.patch || test $? = 1")
    sh("cd a; patch -s -p1 < ../change.patch")
    assert contents(place / "a") == contents(place / "b")
    sh("cd a; patch -s -R -p1 < ../change.patch; test -e gone; test ! -e new; patch -s -b -p1 < ../change.patch")
    assert (place / "a" / "numbers.orig").exists()


def test_small_tools(place: Path, sh: Shell) -> None:
    sh('echo one > f; mv f g; mv g d-new; mkdir d; mv d-new d/; mv d e; test "$(cat e/d-new)" = one')
    sh('install -m 0751 -D e/d-new bin/tool; test "$(stat -c %a bin/tool)" = 751')
    sh("install -m 0751 e/d-new bin/tool; ln -s ../e/d-new bin/link; ln -sfn ../e bin/link; test -d bin/link/")
    sh('t=$(mktemp -p . XXXXXX.tmp); test -f $t; test "$(stat -c %a $t)" = 600; d=$(mktemp -d -p .); rmdir $d; rm $t')
    sh("seq 5 | tee t1 t2 > /dev/null; seq 6 7 | tee -a t1 > /dev/null; cmp <(seq 7) t1; cmp <(seq 5) t2")
    sh(
        "printf 0123456789 > dd; printf XY | dd of=dd bs=1 seek=3 conv=notrunc status=none",
        'test "$(cat dd)" = 012XY56789',
    )
    sh('dd if=/dev/zero of=zeros bs=64k count=20 conv=fsync status=none; test "$(stat -c %s zeros)" = 1310720')
    sh(
        "seq 10000 > long; split -l 900 long part-; cat part-* | cmp - long; rm part-*",
        "split -b 4097 long part-; cat part-* | cmp - long",
    )
    sh("seq 1000 | shuf > mixed; sort -n -o mixed mixed; cmp <(seq 1000) mixed")
    sh('truncate -s 100 cut; truncate -s +5 cut; test "$(stat -c %s cut)" = 105; shred -u -n 1 cut; test ! -e cut')
    sh("cp --sparse=always zeros sparse; cmp zeros sparse; cp --reflink=auto zeros clone; cmp zeros clone")
    sh("gzip -k long; gunzip -c long.gz | cmp - long; xargs -n1 test -e <<< 'long mixed'; wc -l long | grep -q 10000")
    sh(
        "set -o noclobber; echo a > new; (echo b > new) 2> err && exit 9",
        "grep -q 'cannot overwrite' err; test \"$(cat new)\" = a",
    )


def test_parallel_writers(place: Path, sh: Shell) -> None:
    sh("seq 200 | xargs -P4 -I{} sh -c 'mkdir -p d$(({} % 7)); echo {} > d$(({} % 7))/f{}; echo {} >> log'")
    assert sorted((place / "log").read_text().split(), key=int) == [str(i) for i in range(1, 201)]
    assert all((place / f"d{i % 7}" / f"f{i}").read_text() == f"{i}\n" for i in range(1, 201))
    sh("ls -d d* | xargs -P4 rm -r; test ! -e d0")


def test_tail_follows(place: Path, sh: Shell) -> None:
    # Without inotify, in which an append between tail's first read and its watch was lost, on a plain directory too.
    sh(
        "seq 3 > log; timeout 30 tail ---disable-inotify -s 0.05 -n +1 -f log > seen & t=$!; seq 4 6 >> log;"
        "while ! grep -qx 6 seen 2> /dev/null; do read -t 0.05 <> <(:) || true; done; kill $t; cmp <(seq 6) seen"
    )


def test_flock_command(place: Path, sh: Shell) -> None:
    sh("echo 0 > n; seq 20 | xargs -P4 -I{} flock lock bash -c 'x=$(cat n); echo $((x+1)) > n'; test \"$(cat n)\" = 20")
