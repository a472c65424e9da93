#!/usr/bin/env python3
"""Whole trees made at once, beside JuiceFS on the same Postgres: a git checkout, and a package manager's directory.

    benchmarks/trees.py [--quick]

In turn, three times: `git clone` of a local repository with 2000 files and `git status` in the clone; `tar x` of 4000
files of 500 bytes in 2400 directories. Quick: a tenth of that, once. What the comparison script needs is needed here.
"""

from __future__ import annotations

import tarfile
import tempfile
from functools import partial
from io import BytesIO
from pathlib import Path

from _rig import Report, in_turn, peers, run, seconds, shell


def make_repository(path: Path, files: int) -> None:
    for number in range(files):
        file = path / f"src{number % 40}" / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# module {number}\n" + "value = 'a line of source text'\n" * 40)
    identity = "git -c user.name=b -c user.email=b@example.invalid"
    shell(f"git init -q . && git add -A && {identity} commit -qm made", cwd=path)


def make_packages(path: Path, files: int, directories: int) -> None:
    """A tar of packages three levels deep, with more directories than most trees."""
    names = [f"node_modules/p{number // 6}/d{number % 6}" for number in range(directories)]
    with tarfile.open(path, "w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for number in range(files):
            data = f"module.exports = {number};\n".encode() * 20
            entry = tarfile.TarInfo(f"{names[number % directories]}/f{number}.js")
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))


def measure(report: Report, quick: bool) -> None:
    share, rounds = (10, 1) if quick else (1, 3)
    with tempfile.TemporaryDirectory(prefix="fusefs-trees-") as name, peers(("juicefs", "fusefs")) as roots:
        source, packages = Path(name) / "repository", Path(name) / "packages.tar"
        source.mkdir()
        make_repository(source, 2000 // share)
        make_packages(packages, 4000 // share, 2400 // share)
        made = iter(range(1000))

        def clone(root: Path) -> float:
            target = root / f"clone{next(made)}"
            return seconds(lambda: shell(f"git clone -q {source} {target} && git -C {target} status --porcelain"))

        def unpack(root: Path) -> float:
            target = root / f"unpacked{next(made)}"
            target.mkdir()
            return seconds(lambda: shell(f"tar xf {packages} -C {target} --no-same-owner"))

        for row, work in (("git-clone", clone), ("unpack", unpack)):
            medians = in_turn(rounds, **{peer: partial(work, root) for peer, root in roots.items()})
            report.note(f"juicefs {medians['juicefs']:.2f} s, fusefs {medians['fusefs']:.2f} s")
            report.say(row, medians["juicefs"] / medians["fusefs"])


if __name__ == "__main__":
    run(__doc__, measure)
