"""POSIX cases on names and on what a symlink holds."""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path

from tests.mount.posix_support import RENAME_EXCHANGE, case, errno_of, opened, read_at, refused, renameat2

ODD_NAMES = (
    " ",
    " leading",
    "trailing ",
    "trailing.",
    "...",
    "..x",
    "-rf",
    "--",
    "~",
    "new\nline",
    "tab\there",
    "bell\a",
    "escape\x1b[31m",
    "delete\x7f",
    "back\\slash",
    "quote'",
    'double"',
    "per%cent",
    "under_score",
    "star*",
    "question?",
    "[bracket]",
    "{brace}",
    "semi;colon",
    "dollar$HOME",
    "back`tick",
    "a:b",
    "a|b",
    "#hash",
    "naïve",
    "漢字",
    "Ελληνικά",
    "עברית",
    "🎉",
    "👩‍👩‍👧",
    "\u202eright-to-left",
    "zero\u200bwidth",
    "no\u00a0break",
    "\ufeffbom",
    "\U0010ffff",
    "\uffff",
    "null␀",
    "CON",
    "aux.txt",
)


@case()
def case_odd_names(root: Path) -> None:
    for i, name in enumerate(ODD_NAMES):
        (root / name).write_text(str(i))
    assert sorted(os.listdir(root)) == sorted(ODD_NAMES)
    for i, name in enumerate(ODD_NAMES):
        assert (root / name).read_text() == str(i), repr(name)
        os.rename(root / name, root / f"{name}~")
    for name in ODD_NAMES:
        os.unlink(root / f"{name}~")
    assert os.listdir(root) == []


@case()
def case_odd_names_of_directories(root: Path) -> None:
    for i, name in enumerate(ODD_NAMES):
        (root / name).mkdir()
        (root / name / "f").write_text(str(i))
    for i, name in enumerate(ODD_NAMES):
        assert (root / name / "f").read_text() == str(i), repr(name)
    # The neighbours of `_`, `%` and `/` in a pattern or a range must not move along.
    os.rename(root / "under_score", root / "moved")
    assert (root / "per%cent" / "f").read_text() == str(ODD_NAMES.index("per%cent"))


@case()
def case_neighbours_of_a_renamed_directory_stay(root: Path) -> None:
    # `/` sorts between `.` and `0`: a prefix taken one character too wide catches these.
    for name in ("a", "a.", "a0", "a-", "ab", "aXb", "a_b", "a%b"):
        (root / name).mkdir()
        (root / name / "f").write_text(name)
    os.rename(root / "a", root / "moved")
    os.rename(root / "a_b", root / "moved-too")
    assert sorted(os.listdir(root)) == sorted(["moved", "moved-too", "a.", "a0", "a-", "ab", "aXb", "a%b"])
    for name in ("a.", "a0", "a-", "ab", "aXb", "a%b"):
        assert (root / name / "f").read_text() == name
    assert (root / "moved" / "f").read_text() == "a"


@case()
def case_normal_forms_are_different_names(root: Path) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
    assert composed != decomposed
    (root / composed).write_bytes(b"composed")
    with refused(errno.ENOENT):
        os.stat(root / decomposed)
    (root / decomposed).write_bytes(b"decomposed")
    assert sorted(os.listdir(root)) == sorted([composed, decomposed])
    assert read_at(root / composed) == b"composed"


@case()
def case_letter_case_matters(root: Path) -> None:
    for name in ("readme", "README", "Readme", "straße", "STRASSE", "İ", "i", "I", "ı"):
        with opened(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            os.write(fd, name.encode())
    assert len(os.listdir(root)) == 9
    assert read_at(root / "README") == b"README"


@case()
def case_longest_name(root: Path) -> None:
    for name in ("n" * 255, "é" * 127 + "x"):
        (root / name).write_bytes(b"x")
        assert name in os.listdir(root)
        os.rename(root / name, root / "short")
        os.rename("short", name, src_dir_fd=(fd := os.open(root, os.O_RDONLY)), dst_dir_fd=fd)
        os.close(fd)
        os.unlink(root / name)
    for name in ("n" * 256, "é" * 128):
        with refused(errno.ENAMETOOLONG):
            os.open(root / name, os.O_WRONLY | os.O_CREAT)
        with refused(errno.ENAMETOOLONG):
            os.mkdir(root / name)
        with refused(errno.ENAMETOOLONG):
            os.stat(root / name)
        with refused(errno.ENAMETOOLONG):
            os.symlink("x", root / name)
    assert os.listdir(root) == []


@case(mount_only=True)
def case_name_that_is_not_utf8_is_refused(root: Path) -> None:
    (root / "f").write_bytes(b"x")
    for raw in (b"caf\xe9", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf"):
        path = os.path.join(os.fsencode(root), raw)
        with refused(errno.EILSEQ, errno.EINVAL):
            os.open(path, os.O_WRONLY | os.O_CREAT)
        with refused(errno.EILSEQ, errno.EINVAL):
            os.mkdir(path)
        with refused(errno.EILSEQ, errno.EINVAL):
            os.rename(os.fsencode(root / "f"), path)
        with refused(errno.EILSEQ, errno.EINVAL):
            os.symlink(b"x", path)
        # No such name can exist: asking for one is either a miss or the same refusal.
        with refused(errno.ENOENT, errno.EILSEQ, errno.EINVAL):
            os.stat(path)
    assert os.listdir(root) == ["f"]


@case(mount_only=True)
def case_path_limits(root: Path) -> None:
    # 64 levels and 1024 bytes, counted from the root of the namespace: HF-03.
    deep = root
    with refused(errno.ENAMETOOLONG):
        for _ in range(64):
            deep = deep / "d"
            os.mkdir(deep)
    long = root
    with refused(errno.ENAMETOOLONG):
        for _ in range(5):
            long = long / ("n" * 250)
            os.mkdir(long)
    # A directory cannot be renamed to where its content would be over the limit.
    (root / "tree" / ("t" * 200) / ("u" * 200)).mkdir(parents=True)
    target = root / ("n" * 250) / ("n" * 250) / ("n" * 250)
    with refused(errno.ENAMETOOLONG):
        os.rename(root / "tree", target / "tree")
    assert (root / "tree" / ("t" * 200) / ("u" * 200)).is_dir()


@case(mount_only=True)
def case_exchange_keeps_the_path_limits(root: Path) -> None:
    shallow = root / "shallow"
    (shallow / "x" / ("s" * 200) / ("t" * 200)).mkdir(parents=True)
    deep = root / ("n" * 240) / ("n" * 240) / ("n" * 240)
    deep.mkdir(parents=True)
    (deep / "y").mkdir()
    for one, two in ((shallow / "x", deep / "y"), (deep / "y", shallow / "x")):
        with refused(errno.ENAMETOOLONG):
            renameat2(one, two, RENAME_EXCHANGE)
    assert os.listdir(deep / "y") == []
    assert (shallow / "x" / ("s" * 200) / ("t" * 200)).is_dir()


@case(mount_only=True)
def case_symlink_target_that_is_not_utf8(root: Path) -> None:
    target = b"caf\xe9/\xff"
    code = errno_of(lambda: os.symlink(target, os.fsencode(root / "link")))
    assert code in (0, errno.EILSEQ, errno.EINVAL)
    assert code or os.readlink(os.fsencode(root / "link")) == target
    assert os.listdir(root) == ([] if code else ["link"])


@case()
def case_symlink(root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_bytes(b"target")
    os.symlink("d/f", root / "link")
    os.symlink("d", root / "dirlink")
    os.symlink(os.fspath(root / "d" / "f"), root / "absolute")
    assert os.readlink(root / "link") == "d/f"
    assert os.lstat(root / "link").st_size == 3
    for name in ("link", "dirlink/f", "absolute"):
        assert read_at(root / name) == b"target"
    (root / "link").write_bytes(b"through")
    assert read_at(root / "d" / "f") == b"through"
    assert (root / "link").is_symlink()
    os.unlink(root / "link")
    assert read_at(root / "d" / "f") == b"through"


@case()
def case_symlink_errnos(root: Path) -> None:
    (root / "f").write_bytes(b"")
    with refused(errno.EEXIST):
        os.symlink("x", root / "f")
    with refused(errno.ENOENT):
        os.symlink("", root / "empty")
    with refused(errno.EINVAL):
        os.readlink(root / "f")
    with refused(errno.ENOENT):
        os.readlink(root / "missing")
    os.symlink("f", root / "link")
    with refused(errno.ENOTDIR):
        os.rmdir(root / "link")
    with refused(errno.EEXIST):
        os.mkdir(root / "link")


@case()
def case_symlink_that_dangles(root: Path) -> None:
    os.symlink("nowhere/at/all", root / "link")
    assert os.readlink(root / "link") == "nowhere/at/all"
    assert os.listdir(root) == ["link"]
    with refused(errno.ENOENT):
        os.stat(root / "link")
    with refused(errno.ENOENT):
        os.open(root / "link", os.O_WRONLY | os.O_CREAT)


@case()
def case_symlink_targets_are_kept_as_given(root: Path) -> None:
    targets = ("t" * 1023, "/", "..", "../../x/./y//z/", "a b\n%_\\", "漢字/🎉", "/absolute/nowhere", ".")
    for i, target in enumerate(targets):
        os.symlink(target, root / f"l{i}")
    for i, target in enumerate(targets):
        assert os.readlink(root / f"l{i}") == target
        assert os.lstat(root / f"l{i}").st_size == len(target.encode())


@case()
def case_symlink_loops(root: Path) -> None:
    os.symlink("self", root / "self")
    os.symlink("b", root / "a")
    os.symlink("a", root / "b")
    for name in ("self", "a", "b"):
        with refused(errno.ELOOP):
            os.stat(root / name)
        with refused(errno.ELOOP):
            os.open(root / name, os.O_RDONLY)
        os.lstat(root / name)


@case()
def case_symlink_not_followed_on_request(root: Path) -> None:
    (root / "f").write_bytes(b"")
    (root / "d").mkdir()
    os.symlink("f", root / "link")
    os.symlink("d", root / "dirlink")
    with refused(errno.ELOOP):
        os.open(root / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with refused(errno.ENOTDIR, errno.ELOOP):
        os.open(root / "dirlink", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with opened(root / "link", os.O_PATH | os.O_NOFOLLOW) as fd:
        assert os.readlink("", dir_fd=fd) == "f"


@case()
def case_symlink_is_renamed_itself(root: Path) -> None:
    (root / "f").write_bytes(b"file")
    os.symlink("f", root / "link")
    os.rename(root / "link", root / "moved")
    assert os.readlink(root / "moved") == "f"
    (root / "g").write_bytes(b"replaces the link")
    os.rename(root / "g", root / "moved")
    assert not (root / "moved").is_symlink()
    assert read_at(root / "f") == b"file"
    os.symlink("f", root / "other")
    os.rename(root / "other", root / "moved")
    assert os.readlink(root / "moved") == "f"


@case(mount_only=True)
def case_hard_link_is_refused(root: Path) -> None:
    (root / "f").write_bytes(b"x")
    with refused(errno.EPERM):
        os.link(root / "f", root / "g")
    assert os.listdir(root) == ["f"]
    assert (root / "f").stat().st_nlink == 1
